"""The independent qwen35 reference against llama.cpp's records: what the engine is judged by.

Records and their origin: `tests/vectors/README.md`.
"""

from functools import cache

import numpy as np
import pytest

from tests import tolerances
from tests.helpers import parity
from tests.helpers.vectors import N_PROMPTS, target_case
from tests.reference.hybrid import HybridReference


@cache
def reference(variant):
    return HybridReference(target_case("qwen35", variant).path)


@pytest.mark.parametrize("variant", ["f32", "kq"])
@pytest.mark.parametrize("i", range(N_PROMPTS))
def test_reference_matches_llama_cpp(variant, i):
    """Catches any misreading of the graph: order of heads, taps, gates, norms, sections, scales."""
    case = target_case("qwen35", variant)
    found = reference(variant).forward(case.forced_tokens(i))
    expected = case.prefill_logits(i)
    if (decode := case.decode_logits(i)) is not None:
        expected = np.concatenate([expected, decode])
    parity.assert_close(
        found.logits[: len(expected)], expected, tolerances.LOGITS_F32, f"{variant} prompt {i}"
    )
    inputs = case.layer_inputs(i)
    if inputs is not None:
        n = len(case.prompt(i))
        part = found.layer_inputs[: len(inputs), n - inputs.shape[1] : n]
        parity.assert_close(part, inputs, tolerances.TAPS_F32, f"{variant} layer inputs {i}")


def test_mtp_block_matches_llama_cpp():
    """Catches halves of the joined input in the wrong order, the hidden row before its norm,
    a missing gate, or the head without its own norm.

    llama.cpp's record joins token t with the hidden row t - 1 (zeros for t = 0) at position t.
    """
    case = target_case("qwen35", "f32")
    tokens = case.prompt(2)
    model = reference("f32")
    hidden = model.forward(tokens).hidden
    parity.assert_close(hidden, case.data["f32/p2/mtp_h"], tolerances.TAPS_F32, "hidden rows")
    before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
    found, _ = model.mtp(tokens, before, np.arange(len(tokens)))
    parity.assert_close(
        found, case.data["f32/p2/mtp_logits"], tolerances.LOGITS_F32, "MTP logits"
    )
    raw = model.forward(tokens).layer_inputs[-1]  # before the final norm: not what it was given
    other, _ = model.mtp(tokens, np.concatenate([0 * raw[:1], raw[:-1]]), np.arange(len(tokens)))
    assert np.abs(other - found).max() > 0.1


def test_states_after_a_sequence_match_its_parts():
    """Catches a state that is taken before the last token, or a convolution history off by one."""
    model = reference("f32")
    tokens = target_case("qwen35", "f32").prompt(1)
    whole = model.forward(tokens).states
    for layer, (state, rows) in whole.items():
        assert model.is_recurrent(layer)
        assert state.shape == (model.n_v, model.width, model.width)
        assert rows.shape[0] == model.taps - 1 and np.abs(state).max() > 0
