"""The random hybrid that equality tests run on: sound, lively, and computed as written down."""

import numpy as np
import pytest

import cudflash
from cudflash.errors import UnsupportedError, UsageError
from tests import tolerances
from tests.helpers import parity
from tests.helpers.engines import greedy
from tests.helpers.hybrid_model import hybrid_engine, hybrid_path
from tests.helpers.speculation import GREEDY
from tests.reference.hybrid import HybridReference


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 500, n).tolist()


def test_greedy_answers_are_not_degenerate():
    """Catches a model on which equality of tokens proves little: at least 40 of 200 differ."""
    for seed in range(3):
        answer = greedy(hybrid_engine(), ids(12, seed), 200, ignore_eos=True)
        assert len(set(answer.tokens)) >= 40


def test_logits_and_mtp_drafts_are_those_of_the_reference():
    """Catches another order of heads than tiled (more value heads than key heads), other shapes."""
    one = hybrid_engine(activations="int8x2", kv_type="f32", drafter="mtp")
    reference = HybridReference(hybrid_path())
    tokens = ids(60)
    expected = reference.forward(tokens)
    parity.assert_relative_rms(
        one.logits(tokens), expected.logits, tolerances.RELATIVE_RMS_INT8X2, "random hybrid"
    )
    answer = one.generate(
        tokens, max_tokens=6, sampling=GREEDY, speculative="on", ignore_eos=True
    )
    first = answer.speculation["trace"][0]
    drafts = reference.draft(tokens, expected.hidden, first["anchor"], len(first["drafted"]))
    assert list(first["drafted"]) == drafts and len(drafts) == 3


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_any_depth_of_mtp_gives_the_plain_answer(k):
    """Catches keys and values that drafting leaves behind, at every number of passes."""
    one = hybrid_engine()
    plain = greedy(one, ids(20), 60, ignore_eos=True)
    drafted = greedy(
        one, ids(20), 60, ignore_eos=True, speculative="on", drafter=one.mtp_drafter(k)
    )
    assert drafted.tokens == plain.tokens
    lengths = [len(r["drafted"]) for r in drafted.speculation["trace"]]
    assert max(lengths) == k and drafted.stats["speculative"]["reason"] == ""


def test_mtp_rows_do_not_depend_on_how_they_came_in():
    """Catches catch-up that differs by blocks: drafts after a prompt and after an answer are equal."""
    one = hybrid_engine(drafter="mtp")
    prompt = ids(30)
    session = one.session()
    answer = greedy(session, prompt, 40, speculative="on", ignore_eos=True)
    at = 25  # any round in the midst: the same tokens as a prompt give the same drafts
    record = next(r for r in answer.speculation["trace"] if r["n_past"] >= len(prompt) + at)
    text = prompt + list(answer.tokens)
    fresh = greedy(one, text[: record["n_past"]], 6, speculative="on", ignore_eos=True)
    first = fresh.speculation["trace"][0]
    assert first["anchor"] == record["anchor"] and first["drafted"] == record["drafted"]


def test_an_mtp_drafter_needs_the_block_and_a_sound_depth():
    """Catches an error from deep inside where one sentence would do."""
    one = hybrid_engine()
    for k in (0, 16, True, "3"):
        with pytest.raises(UsageError, match="expected a whole number from 1 to 15"):
            one.mtp_drafter(k)
    with pytest.raises(UsageError, match="^mtp_k is 0, expected a whole number from 1 to 15"):
        cudflash.load(hybrid_path(), device="cpu", drafter="mtp", mtp_k=0)
    with pytest.raises(UsageError, match="^drafter is 'zzz', expected 'mtp', a Drafter or"):
        cudflash.load(hybrid_path(), device="cpu", drafter="zzz")
    with pytest.raises(UnsupportedError, match="has no MTP block"):
        cudflash.load(hybrid_path(mtp=False), device="cpu", drafter="mtp")
    with pytest.raises(UnsupportedError, match="has no MTP block"):
        cudflash.load(hybrid_path(mtp=False), device="cpu", n_ctx=64).mtp_drafter()


@pytest.mark.parametrize("k, length", [(1, 3), (3, 3), (5, 7), (15, 15)])
def test_default_verify_length_holds_every_token_of_the_block(k, length):
    """Catches a k above 7 that is bounded by a default nobody asked for."""
    for one, own in (
        (hybrid_engine(n_ctx=300, drafter="mtp", mtp_k=k), {}),
        (lent := hybrid_engine(n_ctx=300), {"drafter": lent.mtp_drafter(k)}),
    ):
        session = one.session()
        spec = {"speculative": "on", "ignore_eos": True}
        answer = greedy(session, ids(30), 40, **spec, **own)
        found = answer.stats["speculative"]
        assert found["verify_length"] == length and len(found["proposed_at"]) == k
        bounded = greedy(session, ids(30), 40, verify_length=3, **spec, **own)
        assert len(bounded.stats["speculative"]["proposed_at"]) == min(k, 3)
        assert bounded.tokens == answer.tokens


@pytest.mark.parametrize("drafter", [None, "mtp"])
def test_plan_counts_state_and_block(drafter):
    """Catches a plan without the recurrent state, or with keys and values for layers without."""
    one = hybrid_engine(n_ctx=300, drafter=drafter)
    planned = cudflash.plan.plan(hybrid_path(), n_ctx=300, drafter=drafter, device="cpu")
    assert planned == one.plan and planned.state > 0
    session = one.session()
    allocated = one.allocator.total + session._runner.allocator.total
    if drafter:
        allocated += one._mtp.allocator.total + session._drafter.drafter.runner.allocator.total
    assert allocated == pytest.approx(planned.total, rel=0.01)
    attends = [n > 0 for n in planned.kv_layers]
    assert attends == [layer.delta is None for layer in one.config.layers]
    assert {row.total_bytes - row.kv_bytes >= planned.state for row in planned.contexts} == {True}


def test_ratio_with_mtp_is_repeatable_and_accepts():
    """Catches draws outside the answer's generator, and a distribution that is not drawn from."""
    one = hybrid_engine()
    options = {"max_tokens": 50, "sampling": cudflash.SamplingConfig(temperature=1.0), "seed": 11,
               "speculative": "on", "accept": "ratio", "ignore_eos": True}  # fmt: skip
    a, b = (one.generate(ids(20), drafter=one.mtp_drafter(3), **options) for _ in range(2))
    assert a.tokens == b.tokens and a.speculation["trace"] == b.speculation["trace"]
    assert a.stats["speculative"]["drafted"] > 50
