"""The independent NumPy forward against llama.cpp's recorded logits on exact weights.

If these fail, no comparison of the engine with the reference means anything.
"""

import numpy as np
import pytest

from tests import tolerances
from tests.helpers.vectors import N_PROMPTS, target_case, vector_path
from tests.helpers.vectors import TARGETS as ALL_TARGETS
from tests.reference import activation_rounding
from tests.reference.forward import Reference

TARGETS = [target for target in ALL_TARGETS if target[0] != "qwen35"]  # see test_reference_hybrid
PROMPTS = range(N_PROMPTS)


@pytest.fixture(scope="module", params=TARGETS, ids="-".join)
def case_and_passes(request):
    """A target with the float64 passes over its four prompts and greedy continuations."""
    case = target_case(*request.param)
    reference = Reference(case.path)
    return case, [reference.forward(case.forced_tokens(i)) for i in PROMPTS]


def logits_bound(case):
    """float32 noise, except where only llama.cpp's GELU table was recorded."""
    if case.arch == "gemma3" and case.variant != "f32":
        return tolerances.LOGITS_GELU_TABLE
    return tolerances.LOGITS_F32


@pytest.mark.parametrize("i", PROMPTS)
def test_prefill_logits_match_llama_cpp(case_and_passes, i):
    """Catches any wiring, metadata or expansion fault of the reference, at every position.

    Prompts of 1, 7, 40 and 72 tokens: the last two are longer than the sliding windows (24, 32),
    so a window off by one shows.
    """
    case, passes = case_and_passes
    n_tokens = len(case.prompt(i))
    np.testing.assert_allclose(
        passes[i].logits[:n_tokens], case.prefill_logits(i), rtol=0, atol=logits_bound(case)
    )


def test_decode_logits_match_llama_cpp(case_and_passes):
    """Catches a position or window fault past the prompt that llama.cpp's decode would not share."""
    case, passes = case_and_passes
    recorded = [i for i in PROMPTS if case.decode_logits(i) is not None]
    assert 3 in recorded
    for i in recorded:
        found = passes[i].logits[len(case.prompt(i)) :]
        np.testing.assert_allclose(
            found, case.decode_logits(i), rtol=0, atol=logits_bound(case), err_msg=f"prompt {i}"
        )


@pytest.mark.parametrize("i", PROMPTS)
def test_greedy_ids_match_llama_cpp(case_and_passes, i):
    """Catches ids that differ where the margin is too wide for rounding to explain it."""
    case, passes = case_and_passes
    found = passes[i].logits[len(case.prompt(i)) - 1 :].argmax(axis=1)
    clear = case.greedy_margin(i) > 2 * logits_bound(case)
    assert clear.all(), "prompts were chosen so that no margin is this narrow"
    np.testing.assert_array_equal(found, case.greedy_ids(i))


def test_layer_inputs_match_llama_cpp(case_and_passes):
    """Catches taps off by one layer, taken before the embedding norm or after the final norm."""
    case, passes = case_and_passes
    recorded = [i for i in PROMPTS if case.layer_inputs(i) is not None]
    assert recorded == {"f32": [1, 2, 3], "kq": [2], "leg": []}[case.variant]
    for i in recorded:
        n_tokens, n_rows = len(case.prompt(i)), case.layer_inputs(i).shape[1]
        np.testing.assert_allclose(
            passes[i].layer_inputs[:-1, n_tokens - n_rows : n_tokens],
            case.layer_inputs(i),
            rtol=0,
            atol=tolerances.TAPS_F32,
            err_msg=f"prompt {i}",
        )


def test_chosen_logit_rows_equal_the_full_pass():
    """Catches rows returned in another order than asked for, or of other positions."""
    case = target_case("qwen3", "kq")
    reference = Reference(case.path, np.float64)
    tokens = case.prompt(2)
    full = reference.forward(tokens).logits
    some = reference.forward(tokens, logit_rows=[39, 0, 7]).logits
    np.testing.assert_allclose(some, full[[39, 0, 7]], rtol=1e-12, atol=1e-12)
    assert reference.forward(tokens, logit_rows=[]).logits.shape == (0, full.shape[1])


@pytest.mark.parametrize("arch, variant", TARGETS, ids=lambda value: value)
def test_derivations_of_the_bounds_still_hold(arch, variant):
    """Catches bounds that drifted from what they were derived from (`tests/tolerances.py`).

    float32 arithmetic, float16 keys and values, and rounded activations must each use at most
    half of the room their bound gives.
    """
    case = target_case(arch, variant)
    tokens = case.forced_tokens(3)
    exact = Reference(case.path).forward(tokens).logits

    def largest(**options):
        return np.abs(Reference(case.path, **options).forward(tokens).logits - exact).max()

    def relative_rms(rounding):
        found = Reference(case.path, round_input=rounding).forward(tokens).logits
        return np.sqrt(np.sum((found - exact) ** 2) / np.sum(exact**2))

    assert largest(dtype=np.float32) < tolerances.LOGITS_F32 / 2
    assert largest(kv_dtype=np.float16) < tolerances.LOGITS_KV_F16 / 2
    assert relative_rms(activation_rounding.int8) < tolerances.RELATIVE_RMS_INT8 / 2
    assert relative_rms(activation_rounding.int8x2) < tolerances.RELATIVE_RMS_INT8X2 / 2


def test_vector_path_refuses_unlisted_files():
    """Catches vectors that slip into the suite without a recorded checksum."""
    with pytest.raises(ValueError, match="not listed"):
        vector_path("targets/unknown.gguf")
