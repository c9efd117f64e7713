"""Rounds whose drafts stay on the device until the target has evaluated them: the same rounds.

The CPU runs them as the GPU does, when it is told to; the GPU's own are in tests/emulation.
"""

import numpy as np
import pytest

import cudflash
from cudflash.drafters import AtMost
from cudflash.sampling import SamplerChain
from cudflash.spec.acceptance import DecidedRows, TokenRows, match
from tests.helpers.engines import engine
from tests.helpers.speculation import GREEDY, draft_engine

PROMPT = [7, 3, 250, 11, 42, 42, 9, 100, 5, 31, 77, 12]
SAMPLED = cudflash.SamplingConfig(temperature=0.9, top_k=20)


def drafted_engine(kind):
    if kind == "mtp":
        return engine("qwen35", drafter="mtp", threads=1)
    return draft_engine(kind, draft_sink=0) if "qwen35" in kind else draft_engine(kind)


def both_ways(one, monkeypatch, **options):
    """The same answer, waiting twice a round and once."""
    options = {"max_tokens": 40, "seed": 3, "speculative": "on", "ignore_eos": True, **options}
    found = []
    for once in (False, True):
        monkeypatch.setattr(one.backend, "one_copy", once)
        found.append(one.generate(PROMPT, **options))
    return found


def rounds(answer):
    return answer.speculation["trace"]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["v1-muse-swa", "v2-muse-full", "v2-qwen35-mixed", "mtp"])
def test_the_rounds_are_those_of_a_host_that_knows_the_drafts(kind, sampling, monkeypatch):
    """A draft evaluated in another place, a decision from other rows, a row kept too many."""
    one = drafted_engine(kind)
    twice, once = both_ways(one, monkeypatch, sampling=sampling)
    assert once.tokens == twice.tokens
    assert rounds(once) == rounds(twice) and any(r["drafted"] for r in rounds(once))
    plain = one.generate(PROMPT, max_tokens=40, seed=3, speculative="off", sampling=sampling,
                         ignore_eos=True)
    assert plain.tokens == once.tokens


def test_a_stop_token_among_the_drafts_ends_the_block(monkeypatch):
    """Drafts after a stop token that are counted, or an answer that goes on."""
    one = drafted_engine("v2-muse-full")
    tokens = one.generate(PROMPT, max_tokens=30, sampling=GREEDY, ignore_eos=True).tokens
    stop = next(t for i, t in enumerate(tokens) if i > 4 and t not in tokens[:i])
    for stops in ((stop,), (stop, *(i for i in range(290) if i not in tokens))):  # few, and too many
        twice, once = both_ways(one, monkeypatch, sampling=GREEDY, stop=stops)
        assert once.tokens == twice.tokens and once.finish_reason == "stop"
        assert rounds(once) == rounds(twice)


def test_a_drafter_held_to_fewer_tokens_is_held_to_them(monkeypatch):
    """A wrapper that is passed by: more drafts than it lets through."""
    one = drafted_engine("v2-muse-full")
    monkeypatch.setattr(one.backend, "one_copy", True)
    session = one.session()
    answer = session.generate(
        PROMPT, max_tokens=20, sampling=GREEDY, speculative="on", ignore_eos=True,
        drafter=AtMost(session._drafter.drafter, 2)).result()
    drafted = [len(r["drafted"]) for r in answer.speculation["trace"]]
    assert max(drafted) == 2


def test_a_draft_that_is_not_finite_is_a_fault_and_the_answer_goes_on(monkeypatch):
    """Tokens chosen among NaNs that are evaluated, taken, or end the answer."""
    one = drafted_engine("v1-muse-swa")
    monkeypatch.setattr(one.backend, "one_copy", True)
    plain = one.generate(PROMPT, max_tokens=12, sampling=GREEDY, speculative="off", ignore_eos=True)
    session = one.session()
    runner = session._drafter.drafter.runner
    learn = runner.learn

    def damaged(words):
        words = words.copy()
        words[0] = 0
        return learn(words)

    monkeypatch.setattr(runner, "learn", damaged)
    answer = session.generate(PROMPT, max_tokens=12, sampling=GREEDY, speculative="on",
                              ignore_eos=True).result()
    assert answer.tokens == plain.tokens
    assert "not finite" in answer.speculation["fault"]["reason"]


def test_a_decision_of_the_device_is_the_hosts(monkeypatch):
    """Other counts or another name for how a round has ended."""
    from cudflash.ops import cpu as ops

    rng = np.random.default_rng(2)
    for n in (0, 1, 3, 7, 15, 31):
        for turn in range(30):
            best = rng.integers(0, 5, n + 1).astype(np.int32)
            drafts = np.where(rng.random(n) < 0.8, best[:n], 9).astype(np.int32)
            stops = np.array([-1, *rng.integers(0, 8, turn % 3)], np.int32)
            outcome = np.full(5 + n, -5, np.int32)
            ops.accept_greedy(outcome, drafts, best, np.ones(1, np.int32), stops)
            expected = match(drafts.tolist(), TokenRows(best), frozenset(stops.tolist()))
            _, accepted, n_tokens, end = outcome[:4].tolist()
            found = DecidedRows(accepted, end, outcome[4:4 + n_tokens].tolist()).decision()
            assert found == expected
            assert (outcome[4 + n_tokens:] == -5).all()
            ops.accept_greedy(outcome, drafts, best, np.zeros(1, np.int32), stops)
            assert not outcome[:4].any()


@pytest.mark.parametrize("settings", [
    {}, {"top_k": 3}, {"typical_p": 0.6}, {"min_p": 0.2, "top_p": 1.0}, {"dynatemp_range": 0.4},
    {"xtc_probability": 0.7, "xtc_threshold": 0.02}, {"temperature": 1.0, "min_keep": 5}])
def test_a_choice_from_the_largest_logits_is_that_from_all(settings):
    """Another order, another draw, a generator that has moved on: ties are left to the whole row."""
    config = cudflash.SamplingConfig(**settings)
    whole, few = (SamplerChain(config, 5, n_vocab=300) for _ in range(2))
    rng, undecided = np.random.default_rng(1), 0
    for turn in range(300):
        row = (rng.standard_normal(300) * 3).astype(np.float32)
        if turn % 3 == 0:
            row = np.round(row * 4) / 4  # full of ties
        order = np.argsort(-row, kind="stable")[: few.n_largest]
        before = few.snapshot()
        token = few.sample_largest(order.astype(np.int32), row[order])
        if token is None:
            assert few.snapshot() == before
            undecided += 1
            token = few.sample(row)
        assert token == whole.sample(row), turn
        few.accept(token), whole.accept(token)
    assert 0 < undecided <= 100


@pytest.mark.parametrize("settings, expected", [
    ({}, 41), ({"top_k": 0}, 0), ({"top_k": 300}, 0), ({"temperature": 0}, 0), ({"mirostat": 2}, 0),
    ({"repeat_penalty": 1.1}, 0), ({"logit_bias": {3: 1.0}}, 0), ({"top_n_sigma": 1.0}, 0),
    ({"dry_multiplier": 0.8, "dry_sequence_breakers": ()}, 0)])
def test_settings_that_look_at_the_whole_row_are_known(settings, expected):
    """A penalty or a cut that is computed from a part of the row."""
    chain = SamplerChain(cudflash.SamplingConfig(**settings), 5, n_vocab=300, n_ctx=64)
    assert chain.n_largest == expected
