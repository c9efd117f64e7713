"""The forward pass of the engine: against recorded logits, and against itself bit for bit."""

import numpy as np
import pytest

from cudflash.model.runner import ALL, LAST, NONE, Runner
from tests import tolerances
from tests.helpers.engines import SMALL_ROWS, engine
from tests.helpers.vectors import ARCHES, N_PROMPTS, TARGETS, target_case

PROMPTS = range(N_PROMPTS)
PACKED = tuple(t for t in TARGETS if t[1] != "f32")


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def relative_rms(found, expected):
    return np.sqrt(np.sum((found - expected) ** 2) / np.sum(expected**2))


def long_ids(arch, n=300):
    """Ids beyond every window and ring, the same for each run."""
    vocab = engine(arch).config.vocab_size
    return np.random.default_rng(7).integers(0, vocab, n).tolist()


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("i", PROMPTS)
def test_exact_weights_give_the_recorded_logits(arch, i):
    """Catches any wiring, metadata or op fault; prompts reach past the sliding windows."""
    case = target_case(arch, "f32")
    found = engine(arch, "f32", kv_type="f32").logits(case.prompt(i))
    np.testing.assert_allclose(
        found, case.prefill_logits(i), rtol=0, atol=tolerances.LOGITS_F32
    )
    rounded = engine(arch, "f32").logits(case.prompt(i))
    np.testing.assert_allclose(
        rounded, case.prefill_logits(i), rtol=0, atol=tolerances.LOGITS_KV_F16
    )


@pytest.mark.parametrize("arch, variant", PACKED, ids=lambda value: value)
@pytest.mark.parametrize("activations, bound", [
    ("int8", tolerances.RELATIVE_RMS_INT8), ("int8x2", tolerances.RELATIVE_RMS_INT8X2),
])  # fmt: skip
def test_packed_weights_stay_within_the_rounding_of_activations(arch, variant, activations, bound):
    """Catches a format, scale or activation term that is wrong but plausible."""
    case = target_case(arch, variant)
    one = engine(arch, variant, kv_type="f32", activations=activations)
    for i in PROMPTS:
        found = one.logits(case.forced_tokens(i))
        n = len(case.prompt(i))
        assert relative_rms(found[:n], case.prefill_logits(i)) < bound
        clear = case.greedy_margin(i) > tolerances.GREEDY_MARGIN[activations]
        np.testing.assert_array_equal(
            found[n - 1 :].argmax(axis=1)[clear], case.greedy_ids(i)[clear]
        )


@pytest.mark.parametrize("arch", ARCHES)
def test_taps_are_the_recorded_residuals(arch):
    """Catches taps off by one layer, from before the embedding norm, or in another order."""
    case = target_case(arch, "f32")
    one = engine(arch, "f32", kv_type="f32")
    n_layers = one.config.n_layers
    for i in PROMPTS:
        recorded = case.layer_inputs(i)
        if recorded is None:
            continue
        order = list(range(n_layers - 1))[::-1]
        found = one.taps(case.prompt(i), order)[-recorded.shape[1] :]
        for slot, layer in enumerate(order):
            np.testing.assert_allclose(
                found[:, slot], recorded[layer + 1], rtol=0, atol=tolerances.TAPS_F32
            )


@pytest.mark.parametrize("arch", ARCHES)
def test_last_layer_tap_gives_the_logits(arch):
    """Catches a tap of the last layer that misses the rows whose logits are not wanted."""
    from tests.reference.forward import Reference

    case = target_case(arch, "f32")
    one = engine(arch, "f32", kv_type="f32")
    tokens = case.prompt(2)
    found = one.taps(tokens, [one.config.n_layers - 1])[:, 0]
    expected = Reference(case.path).forward(tokens).layer_inputs[-1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerances.TAPS_F32)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
def test_logits_do_not_depend_on_chunking(arch, rows):
    """Catches any dependence of a row's bits on the rows beside it, over 300 positions."""
    tokens = long_ids(arch)
    whole = engine(arch).logits(tokens)
    np.testing.assert_array_equal(bits(engine(arch, rows=rows).logits(tokens)), bits(whole))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("n_rows", [1, 2, 3, 7, 8])
def test_block_after_a_rollback_equals_decoding_one_by_one(arch, n_rows):
    """Catches rows whose bits depend on the block, and dropped rows that stay visible.

    At every position of 60: a block of wrong rows is dropped, then a block of right rows must give
    the logits of the plain pass. Rings are small here, so dropped rows do overwrite old slots.
    """
    one = engine(arch, rows=SMALL_ROWS)
    tokens = long_ids(arch, 150)
    expected = bits(engine(arch).logits(tokens))
    runner = Runner(one.ops, one.model, one.work, 200, one.kv_type)
    for start in range(0, 100, SMALL_ROWS):
        runner.prefill_chunk(tokens[start : min(start + SMALL_ROWS, 100)], False)
    rng = np.random.default_rng(1)
    position = 100
    while position + n_rows <= len(tokens):
        runner.step(rng.integers(0, one.config.vocab_size, n_rows).tolist(), ALL)
        runner.rollback()
        runner.step(tokens[position : position + n_rows], ALL)
        found = one.ops.download(one.work.logits[:n_rows])
        np.testing.assert_array_equal(bits(found), expected[position : position + n_rows])
        kept = 1 + position % n_rows
        runner.commit(kept)
        position += kept


@pytest.mark.parametrize("arch", ["gemma3", "muse-glimmer", "llama"])
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_poison_in_dead_slots_changes_nothing(arch, kv_type):
    """Catches attention that multiplies masked rows by zero instead of leaving them out."""
    one = engine(arch, rows=SMALL_ROWS, kv_type=kv_type)
    tokens = long_ids(arch, 280)
    expected = bits(engine(arch, kv_type=kv_type).logits(tokens))
    runner = Runner(one.ops, one.model, one.work, 300, one.kv_type)
    for start in range(0, 240, SMALL_ROWS):
        poison(runner, SMALL_ROWS)
        runner.prefill_chunk(tokens[start : start + SMALL_ROWS], False)
    for position in range(240, 280, 4):
        poison(runner, 4)
        runner.step(tokens[position : position + 4], ALL)
        found = one.ops.download(one.work.logits[:4])
        np.testing.assert_array_equal(bits(found), expected[position : position + 4])
        runner.commit(4)


def poison(runner, n_rows):
    """NaN in every slot that the next block neither reads nor writes."""
    cache = runner.cache
    for index, layer in enumerate(cache.layers):
        alive = {p % layer.capacity for p in cache.visible(index)}
        for slot in set(range(layer.capacity)) - alive:
            layer.k[:, slot // 16, :, slot % 16] = np.nan
            layer.v[:, slot] = np.nan


@pytest.mark.parametrize("arch", ["gemma3", "qwen2"])
def test_selected_rows_equal_those_of_all(arch):
    """Catches the short-cut of the last layer changing a bit, or the wrong row selected."""
    one = engine(arch)
    tokens = long_ids(arch, 40)
    expected = bits(one.logits(tokens))
    for n in (1, 2, 5, 40):
        runner = Runner(one.ops, one.model, one.work, 64, one.kv_type)
        if n < 40:
            runner.step(tokens[: 40 - n], NONE)
            runner.commit(40 - n)
        runner.step(tokens[40 - n :], LAST)
        np.testing.assert_array_equal(
            bits(one.ops.download(one.work.logits[:1])), expected[39:40]
        )
        assert int(one.ops.download(one.work.next_ids[:1])[0]) == int(
            one.ops.download(one.work.logits[0]).argmax()
        )


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_do_not_depend_on_threads(threads):
    """Catches sums split by the number of threads."""
    one = engine("gemma3")
    tokens = long_ids("gemma3", 60)
    before = one.ops.threads()
    try:
        one.ops.set_threads(1)
        expected = bits(one.logits(tokens))
        one.ops.set_threads(threads)
        np.testing.assert_array_equal(bits(one.logits(tokens)), expected)
    finally:
        one.ops.set_threads(before)
