"""Draft passes on the op set against z-lab's classes: every recorded array of every draft."""

import numpy as np
import pytest

from cudflash.model.draft_runner import draft_block
from cudflash.ops import cpu as ops
from tests.helpers.draft_models import (
    bound_draft,
    load_model,
    loaded,
    make_runner,
    tap_rows,
    with_causal,
)
from tests.helpers.draft_vectors import DRAFTS, QUANTISED, draft_case, target_tables
from tests.reference.draft import DraftReference
from tests.test_reference_draft import CAUSAL

# float32 arithmetic on exact weights: three times the largest difference of z-lab's own float32 to
# float64 (tests/test_reference_draft.py). Another tap order, window or causality moves hidden rows
# by more than 0.1.
CONTEXT, HIDDEN, LOGITS = 1e-4, 1e-4, 2e-4


def close(found, expected, atol, what):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=what)


@pytest.fixture(autouse=True)
def two_threads():
    ops.set_threads(2)


def follow_rounds(case, runner, check):
    """Observe and propose as the record did, round after round; ``check(round, outcome)``."""
    rows = ops.upload(tap_rows(case.name))
    for r in range(case.n_rounds):
        start = case.start(r)
        n_new = int(case.get(r, "n_new"))
        assert runner.length == start - n_new
        runner.observe(rows[start - n_new : start], n_new)
        ids = case.get(r, "block_ids")
        assert ids[1:].tolist() == [runner.config.mask_token_id] * (len(ids) - 1)
        check(r, runner.propose(int(ids[0]), len(ids) - 1))


@pytest.mark.parametrize("name", DRAFTS)
def test_rounds_match_the_record(name):
    """Catches window, causality, convolution, scale and selector faults, past the window's end."""
    case, runner = draft_case(name), make_runner(name)
    embedding, head = target_tables(case.target)
    compared = 0

    def check(r, outcome):
        nonlocal compared
        hidden, logits = runner.hidden(runner.config.block_size), runner.logits()
        close(hidden, case.get(r, "block_hidden"), HIDDEN, f"round {r} hidden")
        expected = case.get(r, "logits")
        if expected is not None:
            close(logits, expected, LOGITS, f"round {r} logits")
            compared += 1
        assert case.get(r, "margin").min() > 2 * LOGITS, "a margin below the bound proves nothing"
        np.testing.assert_array_equal(outcome.tokens, case.get(r, "proposals"))
        if runner.config.kind == "dflash2":
            check_selector(case, r, runner, outcome)

    follow_rounds(case, runner, check)
    assert compared >= 3


def check_selector(case, r, runner, outcome):
    ids, lattice = runner.lattice()
    np.testing.assert_array_equal(ids, case.get(r, "candidates"))
    close(runner.unary(), case.get(r, "unary"), LOGITS, "unary")
    close(lattice, case.get(r, "lattice"), LOGITS, "lattice")
    path = case.get(r, "path_scores")
    close(outcome.scores, path.max(axis=1), LOGITS, "path scores")
    best = path.max(axis=1, keepdims=True)
    softmax = 1 / np.exp(path - best).sum(axis=1)
    close(outcome.confidence, softmax, LOGITS, "confidence")


@pytest.mark.parametrize("name", DRAFTS)
def test_context_rows_match_the_record(name):
    """Catches a tap order, a norm too many or missing, a convolved context, a wrong rotation."""
    case = draft_case(name)
    model, work = loaded(name)
    block = draft_block(ops, model, work, tap_rows(name), 5)
    rows = case.data["ctx_rows"]
    close(block.context_k[:, rows], case.data["f32/ctx_k"], CONTEXT, "keys")
    close(block.context_v[:, rows], case.data["f32/ctx_v"], CONTEXT, "values")


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_block_equals_the_running_context(name):
    """Catches an inspection that sees other rows than a conversation does: bits are equal."""
    case, r = draft_case(name), draft_case(name).n_rounds - 1
    start, anchor = case.start(r), int(case.get(r, "block_ids")[0])
    model, work = loaded(name)
    whole = draft_block(ops, model, work, tap_rows(name)[:start], anchor)
    runner = make_runner(name)
    runner.observe(ops.upload(tap_rows(name)), start)
    assert runner.propose(anchor, model.config.block_size - 1) == whole.outcome
    for found, expected in (
        (runner.logits(), whole.logits), (runner.hidden(model.config.block_size), whole.hidden)
    ):  # fmt: skip
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(
    "name, variant",
    [(name, v) for name in DRAFTS for v in CAUSAL if f"{v}/r1/proposals" in draft_case(name).data],
)
def test_causal_variants_match_the_record(name, variant):
    """Catches causality taken from the wrong rule, or one flag for all layers."""
    case = draft_case(name)
    draft = with_causal(bound_draft(name), CAUSAL[variant])
    model, work, _ = load_model(draft, case.target)
    start, ids = case.start(1), case.get(1, "block_ids")
    block = draft_block(ops, model, work, tap_rows(name)[:start], int(ids[0]))
    close(block.hidden, case.get(1, "block_hidden", variant), HIDDEN, "hidden")
    np.testing.assert_array_equal(block.tokens, case.get(1, "proposals", variant))


# Relative RMS error of hidden rows from rounded activations. One rounding errs by a uniform
# peak / 127 / sqrt(12) per value; of 256 normal values the peak is about 3 RMS, so 0.7 % per product,
# and some 37 products in a row (7 in each of 5 layers) add up in squares to 4 %. The second term of
# int8x2 divides that by 254. Bounds: two and a half times, five times that.
ROUNDING = {"int8": 0.1, "int8x2": 8e-4}
# A choice between two scores, each of a logit and a codebook term (4 errors in squares: 2), at three
# standard errors, of the scores' spread (about 3).
SURE = {activations: 2 * 3 * 3 * bound for activations, bound in ROUNDING.items()}


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("activations", ["int8", "int8x2"])
def test_quantised_draft_matches_its_record(name, activations):
    """Catches a projection packed as another type, misread codebooks, activations ignored.

    Weights carry their rounding in the record, too, so only activations differ.
    """
    case, runner = draft_case(name), make_runner(name, "kq", activations)
    errors, sure_ones = [], 0

    def check(r, outcome):
        nonlocal sure_ones
        expected = case.get(r, "block_hidden", "kq")
        if expected is not None:
            differ = runner.hidden(runner.config.block_size) - expected
            errors.append(np.sqrt(np.mean(differ**2) / np.mean(expected**2)))
        sure = np.cumprod(case.get(r, "margin", "kq") > SURE[activations]).astype(bool)
        sure_ones += sure.sum()
        agree = np.array(outcome.tokens) == case.get(r, "proposals", "kq")
        assert agree[sure].all()

    follow_rounds(case, runner, check)
    assert len(errors) >= 2 and sure_ones >= 3
    assert ROUNDING[activations] / 50 < max(errors) < ROUNDING[activations]


@pytest.mark.parametrize("name", DRAFTS)
def test_shortened_block_matches_the_reference(name):
    """Catches a short block that still attends to the masks it leaves out."""
    case, runner = draft_case(name), make_runner(name)
    reference = DraftReference(case.directory, *target_tables(case.target))
    fused = reference.fuse(case.data["hidden"])
    keys, values = reference.context(fused, np.arange(len(fused)))
    start, ids = case.start(2), case.get(2, "block_ids")[:4]
    runner.observe(ops.upload(tap_rows(name)), start)
    full = runner.propose(int(ids[0]), 3)
    full_hidden = runner.hidden(4)
    outcome = runner.propose(int(ids[0]), 3, block=4)
    expected = reference.block(ids, keys[:, :start], values[:, :start])
    close(runner.hidden(4), expected, HIDDEN, "hidden")
    logits = reference.logits(expected[1:])
    if runner.config.kind == "dflash2":
        np.testing.assert_array_equal(
            outcome.tokens, reference.select(expected[1:], logits, ids[0]).tokens
        )
    else:
        np.testing.assert_array_equal(outcome.tokens, logits.argmax(axis=1))
    assert not np.array_equal(runner.hidden(4), full_hidden), "the masks left out make no difference"
    assert runner.propose(int(ids[0]), 3) == full


@pytest.mark.parametrize("name", DRAFTS)
def test_fewer_tokens_of_a_full_block_are_its_first_ones(name):
    """Catches rows that depend on how many of them are asked for."""
    runner = make_runner(name)
    runner.observe(ops.upload(tap_rows(name)), 20)
    block = runner.config.block_size
    whole = runner.propose(7, block - 1)
    logits = runner.logits()
    for n in (1, 3, block - 1):
        part = runner.propose(7, n)
        assert part.tokens == whole.tokens[:n] and part.echo == whole.echo
        np.testing.assert_array_equal(runner.logits().view(np.int32), logits[:n].view(np.int32))
        if whole.scores is not None:
            assert part.scores == whole.scores[:n] and part.confidence == whole.confidence[:n]
