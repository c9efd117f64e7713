"""Measured times decide what ``auto`` drafts, and nothing else: whole answers, any decisions."""

import random
import time

import pytest

import cudflash

from cudflash.cli.draft_options import draft_line
from cudflash.drafters import AlwaysWrong, KeepK, Oracle
from cudflash.events import EconomyChanged, RoundFinished, TokenEvent
from cudflash.receipt import validate_receipt
from cudflash.spec.economy import ALLOWANCE
from tests.helpers.engines import engine
from tests.helpers.given_times import given_times
from tests.helpers.speculation import (
    GREEDY,
    LENGTHS,
    SAMPLED,
    draft_engine,
    plain_answer,
    same_answer,
)

PROMPT = tuple(range(3, 60))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["v1-muse-swa", "v2-muse-full", "v1-qwen3-full"])
def test_no_decision_changes_a_token(name, sampling, monkeypatch):
    """Catches a pause that leaves a hole in the draft's context, rows handed over twice or late, a
    change of length that moves the answer's stream: costs are drawn anew at every look, so the
    economy pauses, resumes and changes its length all the time."""
    one = draft_engine(name)
    rng = random.Random(7)
    given_times(monkeypatch, one, lambda n: 1.0 if n == 0 else rng.uniform(0.3, 2.2))
    monkeypatch.setattr("cudflash.spec.economy.FIRST_PAUSE", 5)
    monkeypatch.setattr("cudflash.spec.economy.LONGEST_PAUSE", 40)
    monkeypatch.setattr("cudflash.spec.economy.DOUBT", 0.0)
    monkeypatch.setattr("cudflash.spec.account.ALLOWANCE", 1e9)
    monkeypatch.setattr("cudflash.spec.account.MOST_DEBT", 0.0)
    monkeypatch.setattr("cudflash.spec.gate.FLOOR", 0.0)  # these drafts were never trained
    options = {"max_tokens": 260, "ignore_eos": True}
    plain = plain_answer(one, PROMPT, sampling, **options)
    session = one.session()
    running = session.generate(
        list(PROMPT), sampling=sampling, seed=4, verify_length=max(
            n for n in LENGTHS if n < one.draft_config.block_size), **options,
    )  # fmt: skip
    events = list(running)
    same_answer(running.result(), plain)
    assert session.check_draft_context() is None
    kinds = {e.event.kind for e in events if isinstance(e, EconomyChanged)}
    assert kinds == {"paused", "resumed", "length"}
    part = running.result().speculation
    assert part["fault"] is None and len(part["economy"]["events"]) == sum(
        isinstance(e, EconomyChanged) for e in events
    )
    drafted = {len(record["drafted"]) for record in part["trace"]}
    assert len(drafted & {0, *LENGTHS}) >= 2
    validate_receipt(running.result().receipt)


def test_rows_kept_back_in_a_pause_reach_the_draft_unchanged(monkeypatch):
    """Catches rows of the wrong pass, in the wrong order, or lost at the end of a pause: the context
    is compared with a fresh one in the midst of pauses, and drafts after a pause with those of an
    answer that never paused."""
    one = draft_engine("v1-qwen3-full")
    given_times(monkeypatch, one, lambda n: 10.0 if n == 0 else 500.0)
    session = one.session()
    options = {"max_tokens": 150, "sampling": GREEDY, "ignore_eos": True}
    running = session.generate(list(PROMPT), **options)
    n_rounds = 0
    for event in running:
        if isinstance(event, RoundFinished):
            n_rounds += 1
            if n_rounds in (3, 31, 32, 33, 90):
                assert session.check_draft_context() is None
                kept = session._drafter.drafter.runner.length
                assert kept == event.record.n_past + event.record.emitted
    assert running.result().stats["speculative"]["draft_rounds"] == 0
    text = [*PROMPT, *running.result().tokens]
    warm = session.generate(text, speculative="on", **options).result()
    cold = one.generate(text, speculative="on", **options)
    assert warm.usage.cached_tokens == len(text) - 1
    assert warm.speculation["trace"] == cold.speculation["trace"]


def test_a_draft_that_does_not_pay_is_paused_and_that_is_told(monkeypatch):
    """Catches an economy that is consulted and not followed, or followed in silence."""
    one = engine("llama", threads=1)
    given_times(monkeypatch, one, lambda n: 1.0 if n == 0 else 1.5)
    options = {"max_tokens": 200, "ignore_eos": True}
    plain = plain_answer(one, PROMPT, GREEDY, **options)

    def answer(drafter, **more):
        running = one.session().generate(
            list(PROMPT), sampling=GREEDY, seed=4, drafter=drafter, verify_length=3, **options,
            **more,
        )  # fmt: skip
        events = [e.event for e in running if isinstance(e, EconomyChanged)]
        same_answer(running.result(), plain)
        return events, running.result().stats["speculative"]

    told, stats = answer(AlwaysWrong(plain.tokens))
    assert told and told[0].kind == "paused" and "times the speed of plain" in told[0].reason
    assert stats["economy"]["pauses"] and stats["skipped"]["economy"] > 100
    assert stats["draft_rounds"] < 2 * ALLOWANCE
    line = draft_line(stats)
    assert f"drafted in {stats['draft_rounds']} of {stats['rounds']} rounds" in line
    assert stats["economy"]["state"] == "paused" and "then paused (drafting" in line
    told, stats = answer(Oracle(plain.tokens))
    assert not told and stats["skipped"].keys() <= {"measure", "budget", "economy"}
    assert stats["skipped"].get("economy", 0) <= 2  # the rest of the answer, shorter than a round
    told, stats = answer(AlwaysWrong(plain.tokens), speculative="on")
    assert not told and stats["economy"] is None and stats["draft_rounds"] > 190


def test_under_ratio_times_decide_nothing(monkeypatch):
    """Catches tokens that depend on the clock: under ratio they depend on what was drafted."""
    one = engine("llama", threads=1)
    given_times(monkeypatch, one, lambda n: 10.0 if n == 0 else 500.0)
    plain = plain_answer(one, PROMPT, SAMPLED, max_tokens=60, ignore_eos=True)
    result = one.session().generate(
        list(PROMPT), max_tokens=60, sampling=SAMPLED, seed=4, ignore_eos=True, accept="ratio",
        drafter=KeepK(plain.tokens, 3), verify_length=3,
    ).result()  # fmt: skip
    stats = result.stats["speculative"]
    assert stats["economy"] is None and not {"economy", "measure"} & stats["skipped"].keys()
    assert stats["draft_rounds"] > 5


QUICK = {"max_tokens": 700, "ignore_eos": True}


def quick_pair():
    """A draft that need not see every row: windowed, no pinned rows."""
    return draft_engine("v1-muse-swa", draft_sink=0, n_ctx=1024)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_quick_target_leaves_its_draft_alone_and_comes_back_without_a_hole(sampling, monkeypatch):
    """Catches skipped rows that a block sees, rows kept of the wrong passes, layers not captured:
    steps of 0.2 ms, so the parts of a round are timed first, and in each pause the draft sees
    nothing until the last rows before its next block. What it holds is compared with a fresh one."""
    one, rng = quick_pair(), random.Random(5)

    def cost(n):
        return 0.2 if n == 0 else rng.uniform(0.1, 0.5)

    given_times(monkeypatch, one, cost, prepare_ms=1.0, draft_ms=0.05)
    monkeypatch.setattr("cudflash.spec.economy.FIRST_PAUSE", 20)
    monkeypatch.setattr("cudflash.spec.economy.LONGEST_PAUSE", 60)
    monkeypatch.setattr("cudflash.spec.economy.DOUBT", 0.0)
    for module in ("account", "economy"):
        monkeypatch.setattr(f"cudflash.spec.{module}.REFILL", 1.0)
    monkeypatch.setattr("cudflash.spec.gate.FLOOR", 0.0)
    plain = plain_answer(one, PROMPT, sampling, **QUICK)
    session = one.session()
    running = session.generate(list(PROMPT), sampling=sampling, seed=4, verify_length=7, **QUICK)
    told, checked = [], 0
    for event in running:
        told += [event.event.kind] if isinstance(event, EconomyChanged) else []
        if isinstance(event, RoundFinished) and event.record.drafted and checked < 12:
            assert session.check_draft_context() is None
            checked += 1
    same_answer(running.result(), plain)
    part = running.result().speculation
    assert part["fault"] is None and checked == 12
    assert told.count("resumed") > 2 and told.count("paused") > 2
    assert session.check_draft_context() is None
    lengths = [len(record["drafted"]) for record in part["trace"]]
    assert 0 < lengths.count(7) and len(part["trace"]) == running.result().stats["rounds"]
    validate_receipt(running.result().receipt)
    # a drafted answer of the same session needs every row that it sees
    text = [*PROMPT, *running.result().tokens]
    warm = session.generate(text, speculative="on", max_tokens=20, sampling=GREEDY).result()
    cold = one.generate(text, speculative="on", max_tokens=20, sampling=GREEDY)
    assert warm.tokens == cold.tokens and warm.speculation["trace"] == cold.speculation["trace"]


def test_a_pair_that_cannot_pay_is_left_alone_and_that_is_told(monkeypatch):
    """Catches drafting tried at any price, silence about it, and a prompt that a draft sees in vain
    in every later answer: the draft's pass alone takes longer than the tokens it could save."""
    one = quick_pair()
    given_times(monkeypatch, one, lambda n: 0.2 if n == 0 else 2.0, prepare_ms=1.0, draft_ms=1.8)
    session, text = one.session(), list(PROMPT)
    for n_tokens in (300, 100):
        options = {"max_tokens": n_tokens, "sampling": GREEDY, "ignore_eos": True}
        plain = one.generate(text, speculative="off", **options)
        running = session.generate(text, **options)
        told = [e.event for e in running if isinstance(e, EconomyChanged)]
        assert running.result().tokens == plain.tokens
        assert told[-1].kind == "paused" and told[-1].resume_at is None
        assert "cannot pay" in told[-1].reason and "a draft pass takes 9.0" in told[-1].reason
        stats = running.result().stats["speculative"]
        assert stats["draft_rounds"] == 0 and stats["skipped"] == {"economy": n_tokens - 1}
        assert "cannot pay" in draft_line(stats)
        text += plain.tokens
    assert running.result().usage.cached_tokens == len(PROMPT) + 300 - 1
    assert session._drafter.length <= len(PROMPT), "an answer has fed the draft"
    assert session.check_draft_context() is None


def test_rounds_of_a_quick_pause_are_told_in_order_and_complete(monkeypatch):
    """Catches rounds that are lost or told twice when they are told of many at a time, also in an
    answer that is cut off in between."""
    one = quick_pair()
    given_times(monkeypatch, one, lambda n: 0.2 if n == 0 else 2.0, prepare_ms=1.0, draft_ms=1.8)
    for stop_after in (None, 100):
        running = one.session().generate(list(PROMPT), sampling=GREEDY, **QUICK)
        rounds, tokens = [], []
        for event in running:
            rounds += [event] if isinstance(event, RoundFinished) else []
            tokens += [event.token] if isinstance(event, TokenEvent) else []
            if stop_after == len(tokens):
                running.cancel()
        result = running.result()
        assert tokens == list(result.tokens)
        assert [e.record.index for e in rounds] == list(range(len(tokens) - 1))
        assert [t for e in rounds for t in e.record.decided] == tokens[1:]
        assert all(e.gate is None or e.gate.committed == e.record.index + 1 for e in rounds)
        assert rounds[-1].gate is not None
        assert [e.record.to_dict() for e in rounds] == result.speculation["trace"]
        validate_receipt(result.receipt)


def test_a_drafting_round_counts_with_what_it_takes_beside_its_passes():
    """Catches a round that looks cheaper than it is: records, events and the commit are left out."""
    one = draft_engine("v1-muse-swa")
    session = one.session()
    running = session.generate(list(PROMPT), max_tokens=40, sampling=GREEDY, ignore_eos=True,
                               speculative="on")  # fmt: skip
    assert running.result().stats["speculative"]["draft_rounds"] > 3
    assert 0.0 < running._rounds._state.around_ms < 100.0


def test_a_short_prompt_does_not_hide_that_the_target_is_quick(monkeypatch):
    """Catches a first answer that takes the loading of kernels for the time of a step, and drafts at
    once: a fifth slower over 1,000 tokens. And a second recording of the plain pass."""
    from cudflash.model.runner import Runner

    step, seen = Runner.step, []

    def slow_at_first(self, *args, **kwargs):
        if not seen:
            time.sleep(0.015)
        seen.append(args)
        return step(self, *args, **kwargs)

    one = cudflash.load("demo", "demo:dflash", device="cpu", n_ctx=128)
    monkeypatch.setattr(Runner, "step", slow_at_first)
    session = one.session()
    part = session.generate([65], max_tokens=40, sampling=GREEDY, ignore_eos=True).result().speculation
    assert seen and one.round_costs.plain.ms < 10
    first = part["economy"]["events"][0]
    assert first["kind"] == "paused" and first["round"] == 0
    assert part["trace"][0]["drafted"] == []
    recorded = {key[3] for key in session._runner._graphs if key[0] == 1}
    assert len(recorded) == 1, "the pass of one row was recorded with layers captured and without"
    one.close()
