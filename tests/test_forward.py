"""The forward pass of the engine against itself, bit for bit.

That it computes the right thing at all is shown in `test_parity_targets.py`.
"""

import numpy as np
import pytest

from cudflash.model.runner import ALL, LAST, NONE, Runner
from tests.helpers.engines import SMALL_ROWS, engine
from tests.helpers.vectors import ARCHES


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def long_ids(arch, n=300):
    """Ids beyond every window and ring, the same for each run."""
    vocab = engine(arch).config.vocab_size
    return np.random.default_rng(7).integers(0, vocab, n).tolist()


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
        assert int(one.ops.download(one.work.outcome.next_ids[:1])[0]) == int(
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
