"""The engine against llama.cpp's exact-weight logits on the tiny targets.

Records and their origin: `tests/vectors/README.md`. Bounds: `tests/tolerances.py`. Where the
records end (longer contexts, output of the last layer) the NumPy reference takes over, which
`tests/test_reference.py` ties to the same records.
"""

import numpy as np
import pytest

from tests import tolerances
from tests.helpers import parity
from tests.helpers.references import reference_of
from tests.helpers.vectors import ARCHES, N_PROMPTS, TARGETS, target_case

PROMPTS = range(N_PROMPTS)
PACKED = [target for target in TARGETS if target[1] != "f32"]
LONG = 300  # more than two key chunks of 128, more than nine windows of 32


@pytest.fixture(scope="module", params=ARCHES)
def exact(request):
    """F32 file and float32 cache: the case without rounding beyond float32."""
    case = target_case(request.param, "f32")
    return case, parity.load_engine(case.path, kv_type="f32")


@pytest.fixture(scope="module", params=PACKED, ids="-".join)
def packed_case(request):
    """A target with packed weights."""
    return target_case(*request.param)


@pytest.fixture(scope="module", params=["int8", "int8x2"])
def packed(request, packed_case):
    """Packed weights and float32 cache, at each activation precision."""
    engine = parity.load_engine(packed_case.path, kv_type="f32", activations=request.param)
    return packed_case, request.param, engine


def packed_bounds(case, activations):
    """(relative RMS, largest difference) of logits of a packed target."""
    rms = {"int8": tolerances.RELATIVE_RMS_INT8, "int8x2": tolerances.RELATIVE_RMS_INT8X2}
    largest = tolerances.GREEDY_MARGIN[activations] / 2
    if case.arch == "qwen35":
        rms["int8"] = tolerances.RELATIVE_RMS_INT8_HYBRID
        largest = tolerances.LARGEST_HYBRID[activations]
    return rms[activations], largest


def expected_logits(case, i):
    """Recorded logits of the prompt, then of the greedy steps where recorded: (n, V)."""
    decode = case.decode_logits(i)
    prefill = case.prefill_logits(i)
    return prefill if decode is None else np.concatenate([prefill, decode])


def long_tokens(case):
    """LONG token ids without structure, so that a wrong window or slot cannot hide."""
    return np.random.default_rng(7).integers(3, case.prefill_logits(0).shape[1] - 8, LONG)


# -- float32 weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("i", PROMPTS)
def test_f32_logits_match_llama_cpp(exact, i):
    """Catches any wiring fault: eps, norms, RoPE style and base, windows, scales, caps, biases."""
    case, engine = exact
    expected = expected_logits(case, i)
    found = engine.logits(case.forced_tokens(i))[: len(expected)]
    parity.assert_close(found, expected, tolerances.LOGITS_F32, f"{case.arch} f32 prompt {i}")


@pytest.mark.parametrize("i", PROMPTS)
def test_f32_greedy_answer_matches_llama_cpp(exact, i):
    """Catches decode steps that differ from prefill: positions, cache slots, stale rows."""
    case, engine = exact
    assert case.greedy_margin(i).min() > tolerances.GREEDY_MARGIN["f32"]
    found = parity.answer_tokens(engine, case.prompt(i), len(case.greedy_ids(i)))
    assert found == parity.until_end(case.greedy_ids(i), engine.tokenizer.eog_ids)


def test_f32_taps_match_llama_cpp_layer_inputs(exact):
    """Catches taps off by one layer, before a post norm, or returned in another order than asked.

    Tap l is the residual stream after layer l, which llama.cpp records as the input of l + 1.
    """
    case, engine = exact
    for i in (1, 2, 3):
        expected = case.layer_inputs(i)[1:]  # (L - 1, rows, C)
        layers = list(reversed(range(len(expected))))
        found = np.asarray(engine.taps(case.prompt(i), layers))  # (T, L - 1, C)
        found = found[-expected.shape[1] :].transpose(1, 0, 2)
        parity.assert_close(
            found, expected[layers], tolerances.TAPS_F32, f"{case.arch} taps of prompt {i}"
        )


def test_f32_long_context_matches_reference(exact):
    """Catches faults that need many keys: ring wrap, chunk borders, positions past the prompts."""
    case, engine = exact
    tokens = long_tokens(case)
    reference = reference_of(case).forward(tokens)
    parity.assert_close(
        engine.logits(tokens), reference.logits, tolerances.LOGITS_F32, f"{case.arch} long"
    )
    last = len(reference.layer_inputs) - 2
    parity.assert_relative_rms(
        np.asarray(engine.taps(tokens, [last]))[:, 0],
        reference.layer_inputs[-1],
        tolerances.TAPS_RELATIVE_RMS_F32,
        f"{case.arch} tap of the last layer",
    )


@pytest.mark.parametrize("arch", ARCHES)
def test_kv_f16_logits_stay_near(arch):
    """Catches a float16 cache that loses more than rounding K and V does.

    Against the exact record by the wide bound; against the reference that rounds K and V the same
    way by a narrow one, which a value rounded twice or toward zero would break.
    """
    case = target_case(arch, "f32")
    engine = parity.load_engine(case.path, kv_type="f16")
    rounded = reference_of(case, kv_dtype=np.float16)
    for i in PROMPTS:
        tokens, expected = case.forced_tokens(i), expected_logits(case, i)
        found = engine.logits(tokens)
        what = f"{arch} kv f16 prompt {i}"
        parity.assert_close(found[: len(expected)], expected, tolerances.LOGITS_KV_F16, what)
        same_rounding = rounded.forward(tokens).logits
        parity.assert_relative_rms(
            found, same_rounding, tolerances.RELATIVE_RMS_SAME_KV_ROUNDING, what
        )
        n = len(case.prompt(i))
        smallest = tolerances.GREEDY_MARGIN_KV_F16
        parity.assert_clear_ids(
            found[n - 1 :], case.greedy_ids(i), case.greedy_margin(i), smallest, what
        )


# -- packed weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("i", PROMPTS)
def test_packed_logits_match_exact_weights(packed, i):
    """Catches a wrong scale, minimum, nibble order or tile in any format of the file.

    Also the largest difference, so that one broken row of the vocabulary cannot drown in the mean.
    """
    case, activations, engine = packed
    expected = expected_logits(case, i)
    found = engine.logits(case.forced_tokens(i))[: len(expected)]
    what = f"{case.arch} {case.variant} {activations} prompt {i}"
    if case.arch == "gemma3" and activations == "int8x2":
        # the record carries llama.cpp's GELU table: the reference is the finer yardstick
        expected = reference_of(case).forward(case.forced_tokens(i)).logits[: len(expected)]
    rms, largest = packed_bounds(case, activations)
    parity.assert_relative_rms(found, expected, rms, what)
    parity.assert_close(found, expected, largest, what)


def test_packed_clear_greedy_ids_match_exact_weights(packed):
    """Catches ids that differ where the recorded margin leaves rounding no room."""
    case, activations, engine = packed
    n_compared = 0
    for i in PROMPTS:
        found = engine.logits(case.forced_tokens(i))[len(case.prompt(i)) - 1 :]
        n_compared += parity.assert_clear_ids(
            found,
            case.greedy_ids(i),
            case.greedy_margin(i),
            2 * packed_bounds(case, activations)[1],
            f"{case.arch} {case.variant} {activations} prompt {i}",
        )
    assert n_compared > (60 if activations == "int8x2" else 0), "too few margins to mean anything"


@pytest.mark.parametrize("i", PROMPTS)
def test_packed_int8x2_greedy_answer_matches_exact_weights(packed_case, i):
    """Catches packed decode (one row) that differs from packed prefill (many rows)."""
    engine = parity.load_engine(packed_case.path, kv_type="f32", activations="int8x2")
    ids, margins = packed_case.greedy_ids(i), packed_case.greedy_margin(i)
    assert margins.min() > 2 * packed_bounds(packed_case, "int8x2")[1]
    found = parity.answer_tokens(engine, packed_case.prompt(i), len(ids))
    assert found == parity.until_end(ids, engine.tokenizer.eog_ids)


def test_packed_taps_match_llama_cpp_layer_inputs(packed_case):
    """Catches taps of packed models taken from anything but the float32 residual stream."""
    expected = packed_case.layer_inputs(2)
    if expected is None:
        expected = reference_of(packed_case).forward(packed_case.prompt(2)).layer_inputs[:-1]
    expected = expected[1:]  # (L - 1, rows, C)
    engine = parity.load_engine(packed_case.path, kv_type="f32", activations="int8x2")
    found = np.asarray(engine.taps(packed_case.prompt(2), range(len(expected))))
    found = found[-expected.shape[1] :].transpose(1, 0, 2)
    what = f"{packed_case.arch} {packed_case.variant} taps"
    parity.assert_relative_rms(found, expected, tolerances.RELATIVE_RMS_INT8X2, what)


def test_packed_long_context_matches_reference(packed_case):
    """Catches faults of packed products that only appear at large row counts or positions."""
    engine = parity.load_engine(packed_case.path, kv_type="f32", activations="int8x2")
    tokens = long_tokens(packed_case)
    expected = reference_of(packed_case).forward(tokens).logits
    what = f"{packed_case.arch} {packed_case.variant} long"
    parity.assert_relative_rms(
        engine.logits(tokens), expected, tolerances.RELATIVE_RMS_INT8X2, what
    )
