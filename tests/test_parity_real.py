"""The engine and the reference against llama.cpp's exact-weight records on two real models.

SmolLM2-135M (Q4_1, Q8_0) and Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0; a vocabulary of 262,144). What
the tiny targets cannot show: real shapes, outlier activations, text through the real tokenizers.
Get the files with `python scripts/fetch_models.py`.
"""

import json

import numpy as np
import pytest

from tests import tolerances
from tests.helpers import parity
from tests.helpers.real_models import NAMES, require_model
from tests.helpers.vectors import real_case
from tests.reference.forward import Reference

pytestmark = [pytest.mark.models, pytest.mark.slow]

PROMPTS = range(12)
TEXT_TOKENS = 300  # of the perplexity text: 315 MB of logits for Gemma


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    """Short name of a real model."""
    return request.param


@pytest.fixture(scope="module", params=["int8", "int8x2"])
def activations(request):
    """Activation precision."""
    return request.param


@pytest.fixture(scope="module")
def engine(name, activations):
    """The model with a float32 cache, so that activations are the only rounding."""
    return parity.load_engine(require_model(name), kv_type="f32", activations=activations)


def sampled(row, case, i):
    """The recorded columns of a row of logits (V,): 64 best ids, then every V/1024-th."""
    bins = np.arange(1024) * len(row) // 1024
    return np.concatenate([row[case[f"deq/p{i}/top_ids"]], row[bins]])


def recorded(case, i):
    """Exact values of the same columns: (1088,)."""
    return np.concatenate([case[f"deq/p{i}/top_logits"], case[f"deq/p{i}/bins"]])


def test_reference_matches_llama_cpp(name):
    """Catches a reference that is right on tiny models only (defaults of absent keys, tied head)."""
    case, reference = real_case(name), Reference(require_model(name))
    bound = tolerances.LOGITS_F32 if name == "smollm2" else tolerances.REAL_LOGITS_GELU_TABLE
    for i in range(2):
        ids = case[f"p{i}/ids"]
        row = reference.forward(ids, logit_rows=[len(ids) - 1]).logits[0]
        parity.assert_close(sampled(row, case, i), recorded(case, i), bound, f"{name} prompt {i}")


def test_prompt_ids_match_llama_cpp(name):
    """Catches a tokenizer that feeds the model other ids than the records were made from."""
    case = real_case(name)
    engine = parity.load_engine(require_model(name))
    for i, text in enumerate(json.loads(bytes(case["prompts_utf8_json"]))):
        ids = engine.tokenizer.encode(text, add_special=True, parse_special=True)
        assert list(ids) == case[f"p{i}/ids"].tolist(), f"{name} prompt {i}"


def test_next_token_logits_match_exact_weights(engine, name, activations):
    """Catches a wrong format, layer shape or vocabulary tile in files people really have."""
    case = real_case(name)
    for i in PROMPTS:
        row = np.asarray(engine.logits(case[f"p{i}/ids"]))[-1]
        found, expected = sampled(row, case, i), recorded(case, i)
        what = f"{name} {activations} prompt {i}"
        bound = tolerances.REAL_RELATIVE_RMS[activations]
        parity.assert_relative_rms(found, expected, bound, what)


def test_clear_greedy_ids_match_exact_weights(engine, name, activations):
    """Catches ids that differ where the recorded margin leaves rounding no room.

    Every step is fed the exact answer so far, so that one near-tie does not end the comparison.
    """
    case, n_compared = real_case(name), 0
    smallest = 2 * tolerances.REAL_LOGITS[name, activations]
    for i in PROMPTS:
        ids, answer = case[f"p{i}/ids"], case[f"deq/p{i}/greedy_ids"]
        logits = engine.logits(np.concatenate([ids, answer[:-1]]))[len(ids) - 1 :]
        margins = case[f"deq/p{i}/greedy_margin"]
        what = f"{name} {activations} prompt {i}"
        n_compared += parity.assert_clear_ids(logits, answer, margins, smallest, what)
    assert n_compared > (300 if activations == "int8x2" else 20), "too few margins to mean anything"


def test_greedy_answer_follows_exact_weights(engine, name, activations):
    """Catches decode that leaves the exact answer before the first narrow margin allows it to."""
    case = real_case(name)
    smallest = 2 * tolerances.REAL_LOGITS[name, activations]
    for i in PROMPTS:
        answer, margins = case[f"deq/p{i}/greedy_ids"], case[f"deq/p{i}/greedy_margin"]
        n_clear = next(iter(np.flatnonzero(margins <= smallest)), len(answer))
        if n_clear == 0:
            continue
        expected = parity.until_end(answer[:n_clear], engine.tokenizer.eog_ids)
        found = parity.answer_tokens(engine, case[f"p{i}/ids"], int(n_clear))
        assert found == expected, f"{name} {activations} prompt {i}, {n_clear} clear tokens"


def test_text_likelihood_matches_exact_weights(engine, name, activations):
    """Catches damage that grows with position, or that hides in tokens no prompt reaches."""
    ids = real_case(name)["ppl_ids"][: TEXT_TOKENS + 1]
    exact = real_case(f"{name}-exact")["ppl_nll"][:TEXT_TOKENS]
    logits = np.asarray(engine.logits(ids[:-1]))  # (TEXT_TOKENS, V)
    nll = np.empty(TEXT_TOKENS)
    for t, row in enumerate(logits):
        row = row.astype(np.float64)
        nll[t] = row.max() + np.log(np.exp(row - row.max()).sum()) - row[ids[t + 1]]
    off = np.sqrt(np.mean((nll - exact) ** 2))
    bound = tolerances.REAL_NLL_RMS[activations]
    assert off <= bound, f"{name} {activations}: rms difference of nll {off:.2e}, bound {bound:g}"
    shift = abs(nll.mean() - exact.mean())
    assert shift <= bound / 4, f"{name} {activations}: mean nll moved by {shift:.2e}"
