"""Measured times decide what ``auto`` drafts, and nothing else: whole answers, any decisions."""

import random

import pytest

from cudflash.cli.draft_options import draft_line
from cudflash.drafters import AlwaysWrong, KeepK, Oracle
from cudflash.events import EconomyChanged, RoundFinished
from cudflash.receipt import validate_receipt
from cudflash.spec.economy import ALLOWANCE, Economy, RoundCosts
from tests.helpers.engines import engine
from tests.helpers.speculation import (
    GREEDY,
    LENGTHS,
    SAMPLED,
    draft_engine,
    plain_answer,
    same_answer,
)

PROMPT = tuple(range(3, 60))


class _Given:
    """A meter that says what it was told."""

    first, count = None, 9

    def __init__(self, ms):
        self._ms = ms

    @property
    def ms(self):
        return self._ms() if callable(self._ms) else self._ms

    def add(self, ms):
        pass

    def clear(self):
        pass


class GivenCosts(RoundCosts):
    """Costs that were not measured: what the clock says is left out.

    Parameters
    ----------
    cost : callable
        Milliseconds of a round that drafts so many tokens, 0 for a plain one.
    """

    def __init__(self, cost):
        super().__init__()
        self.plain, self._cost = _Given(lambda: cost(0)), cost

    def meter(self, drafter, length):
        return _Given(lambda: self._cost(length))


def given_times(monkeypatch, one, cost):
    """Let all that the economy of an engine is told come from ``cost``, nothing from a clock."""
    monkeypatch.setattr(one, "round_costs", GivenCosts(cost))
    record, rest = Economy.record, Economy.rest

    def given_record(self, drafted, accepted, emitted, ms, feed_ms, ended):
        record(self, drafted, accepted, emitted, cost(drafted), 0.0, ended)

    monkeypatch.setattr(Economy, "record", given_record)
    monkeypatch.setattr(Economy, "rest", lambda self, ms, feed_ms: rest(self, cost(0), 0.0))


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
    monkeypatch.setattr("cudflash.spec.economy.ALLOWANCE", 1e9)
    monkeypatch.setattr("cudflash.spec.economy.MOST_DEBT", 0.0)
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
    given_times(monkeypatch, one, lambda n: 1.0 if n == 0 else 50.0)
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
    assert not told and stats["skipped"].keys() <= {"measure", "budget"}
    told, stats = answer(AlwaysWrong(plain.tokens), speculative="on")
    assert not told and stats["economy"] is None and stats["draft_rounds"] > 190


def test_under_ratio_times_decide_nothing(monkeypatch):
    """Catches tokens that depend on the clock: under ratio they depend on what was drafted."""
    one = engine("llama", threads=1)
    given_times(monkeypatch, one, lambda n: 1.0 if n == 0 else 50.0)
    plain = plain_answer(one, PROMPT, SAMPLED, max_tokens=60, ignore_eos=True)
    result = one.session().generate(
        list(PROMPT), max_tokens=60, sampling=SAMPLED, seed=4, ignore_eos=True, accept="ratio",
        drafter=KeepK(plain.tokens, 3), verify_length=3,
    ).result()  # fmt: skip
    stats = result.stats["speculative"]
    assert stats["economy"] is None and not {"economy", "measure"} & stats["skipped"].keys()
    assert stats["draft_rounds"] > 5
