"""The independent draft forward against z-lab's classes: every recorded array of every draft."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.draft_vectors import (
    DRAFTS,
    QUANTISED,
    draft_case,
    quantised_draft,
    target_tables,
)
from tests.reference.draft import DraftReference

# Largest differences of z-lab float32 to its own float64, over all drafts: fused 1.6e-6, hidden
# 1.0e-5, logits 4.3e-5; keys of llama.cpp 2.3e-5. Three times these, rounded up. A tap list in
# another order, a window off by one or a causal block moves hidden rows by more than 0.1.
FUSED, CONTEXT, HIDDEN, LOGITS = 1e-5, 1e-4, 1e-4, 2e-4

VARIANTS = [(name, "f32") for name in DRAFTS] + [(name, "kq") for name in QUANTISED]
CAUSAL = {"causal_null": None, "causal_true": True, "causal_false": False}


def reference_for(case, variant="f32", **options):
    embedding, head = target_tables(case.target)
    path = quantised_draft(case.name) if variant == "kq" else case.directory
    return DraftReference(path, embedding, head, **options)


def run_rounds(reference, case):
    """Fused rows, keys, values, and (ids, hidden, logits) of every recorded round."""
    fused = reference.fuse(case.data["hidden"])
    keys, values = reference.context(fused, np.arange(len(fused)))
    rounds = []
    for r in range(case.n_rounds):
        start, ids = case.start(r), case.get(r, "block_ids")
        hidden = reference.block(ids, keys[:, :start], values[:, :start])
        rounds.append((ids, hidden, reference.logits(hidden[1:])))
    return fused, keys, values, rounds


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def passes(request):
    """A draft, its variant, and the float64 pass over all rounds."""
    name, variant = request.param
    case = draft_case(name)
    reference = reference_for(case, variant)
    return case, variant, reference, run_rounds(reference, case)


def close(found, expected, atol, what):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=what)


def test_context_rows_match(passes):
    """Catches a tap order, a missing norm, an input norm too many, or a wrong rotation of keys."""
    case, variant, _, (fused, keys, values, _) = passes
    rows = case.data["ctx_rows"]
    close(fused[rows], case.data[f"{variant}/fused"], FUSED, "fused")
    if variant == "f32":
        close(keys[:, rows], case.data["f32/ctx_k"], CONTEXT, "keys")
        close(values[:, rows], case.data["f32/ctx_v"], CONTEXT, "values")


def test_block_rows_and_logits_match(passes):
    """Catches window, causality, convolution and scale faults, also past the window's end."""
    case, variant, _, (_, _, _, rounds) = passes
    compared = 0
    for r, (_, hidden, logits) in enumerate(rounds):
        for leaf, found, atol in (("block_hidden", hidden, HIDDEN), ("logits", logits, LOGITS)):
            expected = case.get(r, leaf, variant)
            if expected is not None:
                close(found, expected, atol, f"round {r} {leaf}")
                compared += 1
    assert compared >= (2 if variant == "kq" else case.n_rounds + 3)


def test_proposals_match(passes):
    """Catches an off-by-one of block rows, a tie rule, or a selector walk gone wrong."""
    case, variant, reference, (_, _, _, rounds) = passes
    for r, (ids, hidden, logits) in enumerate(rounds):
        expected = case.get(r, "proposals", variant)
        if not reference.settings.top_k:
            np.testing.assert_array_equal(logits.argmax(axis=1), expected)
            continue
        walk = reference.select(hidden[1:], logits, ids[0])
        np.testing.assert_array_equal(walk.tokens, expected)
        np.testing.assert_array_equal(walk.candidates, case.get(r, "candidates", variant))
        for leaf in ("unary", "path_scores", "lattice"):
            scores = case.get(r, leaf, variant)
            if scores is not None:
                close(getattr(walk, leaf), scores, LOGITS, f"round {r} {leaf}")


@pytest.mark.parametrize(
    "name, variant",
    [(name, v) for name in DRAFTS for v in CAUSAL if f"{v}/r1/proposals" in draft_case(name).data],
)
def test_causal_variants_match(name, variant):
    """Catches is_causal read with llama.cpp's rule where z-lab's holds, and the reverse."""
    case = draft_case(name)
    reference = reference_for(case, is_causal=CAUSAL[variant])
    _, _, _, rounds = run_rounds(reference, case)
    _, hidden, logits = rounds[1]
    close(hidden, case.get(1, "block_hidden", variant), HIDDEN, f"{variant} block_hidden")
    if reference.settings.top_k:
        found = reference.select(hidden[1:], logits, rounds[1][0][0]).tokens
    else:
        found = logits.argmax(axis=1)
    np.testing.assert_array_equal(found, case.get(1, "proposals", variant))


def test_every_recorded_array_is_read():
    """Catches vectors that lie in the repository and test nothing."""
    read = {"seq_ids", "hidden", "rounds", "ctx_rows", "fused", "ctx_k", "ctx_v", "start", "n_new",
            "accepted", "block_ids", "block_hidden", "logits", "proposals", "margin", "candidates",
            "unary", "path_scores", "lattice", "topk_margin"}  # fmt: skip
    for name in DRAFTS:
        assert {key.split("/")[-1] for key in draft_case(name).data} <= read


def test_rounds_follow_one_another():
    """Catches a record whose rounds do not start where the accepted tokens of the last one end."""
    for name in DRAFTS:
        case = draft_case(name)
        for r in range(case.n_rounds):
            assert case.get(r, "block_ids")[0] == case.data["seq_ids"][case.start(r)]
            if r + 1 < case.n_rounds:
                assert case.start(r + 1) == case.start(r) + int(case.get(r, "accepted")) + 1


@pytest.mark.parametrize("name", ["v2-qwen35-mixed", "v2-muse-full"])
def test_selector_without_successors_is_argmax(name):
    """Catches a selector that moves candidates although its codebook says nothing."""
    case = draft_case(name)
    reference = reference_for(case)
    reference.weights["selector_successor.weight"][:] = 0
    _, _, _, rounds = run_rounds(reference, case)
    ids, hidden, logits = rounds[0]
    walk = reference.select(hidden[1:], logits, ids[0])
    np.testing.assert_array_equal(walk.tokens, logits.argmax(axis=1))


def test_identity_convolution_is_dflash():
    """Catches a convolution that is not the identity when its kernels say so."""
    case = draft_case("v2-muse-full")
    reference = reference_for(case)
    for layer in range(reference.settings.n_layers):
        for part in ("attn", "ffn"):
            base = reference.weights[f"blk.{layer}.{part}_conv_base"]
            base[:, 0], base[:, 1:] = 1, 0
            reference.weights[f"blk.{layer}.{part}_conv_proj.weight"][:] = 0
    with_conv = run_rounds(reference, case)[3][0][1]
    object.__setattr__(reference.settings, "group", 0)
    close(with_conv, run_rounds(reference, case)[3][0][1], 1e-12, "identity")


def test_derivation_of_the_bounds_holds():
    """Catches bounds that drifted: float32 arithmetic may use half of each."""
    for name in DRAFTS:
        case = draft_case(name)
        exact = run_rounds(reference_for(case), case)
        rounded = run_rounds(reference_for(case, dtype=np.float32), case)
        assert np.abs(exact[0] - rounded[0]).max() < FUSED / 2
        assert np.abs(exact[1] - rounded[1]).max() < CONTEXT / 2
        for (_, hidden, logits), (_, hidden32, logits32) in zip(exact[3], rounded[3], strict=True):
            assert np.abs(hidden - hidden32).max() < HIDDEN / 2
            assert np.abs(logits - logits32).max() < LOGITS / 2
