"""Counters against traces counted by hand, and the identities they document."""

import pytest

from cudflash.drafters import Cycle, KeepK, NoDrafter, Oracle
from cudflash.errors import CudflashError, UsageError
from cudflash.sampling import SamplingConfig
from cudflash.spec.guard import DrafterFault
from cudflash.spec.stats import RoundRecord, SpecStats, identities, require_draft
from tests.spec.fakes import drafted, plain

GREEDY = SamplingConfig(temperature=0)


def record(
    index=0, drafted=(), accepted=0, tested=0, decided=(1,), emitted=1, end="plain",
    times=(0, 0, 0), skipped="",
):  # fmt: skip
    return RoundRecord(
        index, 10 + index, 1, tuple(drafted), accepted, tested, tuple(decided), emitted, end,
        "open", skipped, (), *map(float, times),
    )  # fmt: skip


# a full block with bonus; a partial one; a rejected one; a plain round; a stop after two accepted
TRACE = [
    record(0, (5, 6, 7), 3, 3, (5, 6, 7, 8), 4, "bonus", (1, 10, 0.5)),
    record(1, (9, 1, 2), 1, 2, (9, 4), 2, "corrected", (1, 10, 0.5)),
    record(2, (3, 3, 3), 0, 1, (6,), 1, "corrected", (1, 10, 0.5)),
    record(3, (), 0, 0, (2,), 1, "plain", (0, 8, 0.5), "gate"),
    record(4, (4, 0), 2, 2, (4, 0), 2, "stopped", (1, 10, 0.5)),
]


def counted(trace, **kwargs):
    stats = SpecStats(**kwargs)
    for one in trace:
        stats.record(one)
        identities(stats.to_dict())
    return stats


def test_a_trace_counted_by_hand():
    """Catches partial acceptances counted as zero, skipped rounds in a denominator (A94, A95)."""
    found = counted(TRACE).to_dict()
    assert {k: v for k, v in found.items() if isinstance(v, int)} == {
        "rounds": 5, "draft_rounds": 4, "plain_rounds": 1, "drafted": 11, "tested": 8,
        "accepted": 6, "accepted_emitted": 6, "emitted": 10, "bonus": 1, "corrected": 2,
        "stopped": 1, "cut": 0,
    }  # fmt: skip
    assert found["proposed_at"] == [4, 4, 3]
    assert found["tested_at"] == [4, 3, 1] and found["accepted_at"] == [3, 2, 1]
    assert found["skipped"] == {"gate": 1}
    assert found["acceptance_rate"] == 6 / 11
    assert found["acceptance_length"] == 9 / 4 and found["tokens_per_pass"] == 2.0


def test_times_and_speedup():
    """Catches plain rounds in the verify time, and a speed-up against an unmeasured step (A97)."""
    stats = counted(TRACE, plain_step_ms=8.5)
    assert (stats.draft_ms, stats.verify_ms, stats.plain_ms) == (4, 40, 8)
    assert stats.decide_ms == 2.5 and stats.plain_step_ms == 8.5
    assert stats.estimated_speedup == pytest.approx(10 * 8.5 / 54.5)
    assert stats.draft_speedup == pytest.approx(9 * 8.5 / 46)
    assert stats.warning() == ""
    slow = counted(TRACE[1:], plain_step_ms=8.5)
    assert slow.draft_speedup < 1.5
    losing = counted([TRACE[2], TRACE[2], TRACE[3]], plain_step_ms=8.5)
    assert losing.draft_speedup == pytest.approx(2 * 8.5 / 23)
    assert "0.74 times" in losing.warning() and "0%" in losing.warning()


def test_speedup_without_a_plain_step_is_unknown():
    """Catches an invented speed-up; a step measured elsewhere will do."""
    assert counted(TRACE[:1]).estimated_speedup is None
    assert counted(TRACE[:1]).warning() == ""
    assert counted(TRACE[:1], plain_step_ms=11.5).estimated_speedup == pytest.approx(4.0)


def test_the_round_that_records_its_pass_is_no_plain_step():
    """Catches a step of the first plain round, ten times too long: a loss that looks like a gain."""
    first, usual = (record(end="plain", times=(0, ms, 0.5)) for ms in (80, 8))
    assert counted([*TRACE[:1], first]).plain_step_ms is None
    assert counted([*TRACE[:1], first], plain_step_ms=8.1).plain_step_ms == 8.1
    assert counted([first, usual]).plain_step_ms == 8.5  # better than nothing
    assert counted([first, usual], plain_step_ms=8.1).plain_step_ms == 8.1
    assert counted([first, usual, usual, usual], plain_step_ms=99).plain_step_ms == 8.5
    empty = SpecStats().to_dict()
    assert empty["acceptance_rate"] is None and empty["tokens_per_pass"] is None
    identities(empty)


def test_a_one_word_answer_keeps_the_identities():
    """Catches accepted above emitted and ratios below zero when a stop cuts a block (A96)."""
    cut = counted([record(0, (5, 6, 7), 3, 3, (5, 6, 7, 8), 1, "bonus")]).to_dict()
    assert (cut["accepted"], cut["accepted_emitted"], cut["emitted"], cut["cut"]) == (3, 1, 1, 3)
    ids = plain(GREEDY, 30)
    answer = drafted(GREEDY, 30, Oracle(ids), ends=lambda tokens: len(tokens) == 2)
    stats = answer.state.stats.to_dict()
    assert stats["emitted"] == 1 == stats["accepted_emitted"] and stats["cut"] == 7
    only_first = drafted(GREEDY, 1, Oracle(ids))
    assert only_first.state.stats.rounds == 0


@pytest.mark.parametrize("ks", [(0,), (1, 2), (15,), (3, 0, 7)])
def test_counters_follow_a_scripted_drafter(ks):
    """Catches counters that disagree with what the drafter did, round by round."""
    ids = plain(GREEDY, 300)
    stats = drafted(GREEDY, 300, Cycle(ids, ks), verify_length=7).state.stats
    for index, one in enumerate(stats.records):
        n = len(one.drafted)
        assert one.accepted == min(ks[index % len(ks)], n)
        assert one.tested == min(one.accepted + 1, n)
        assert one.end == ("bonus" if one.accepted == n and n else "corrected" if n else "plain")
    assert stats.accepted == sum(one.accepted for one in stats.records)


@pytest.mark.parametrize("key", ["rounds", "emitted", "tested", "drafted", "accepted_emitted"])
def test_broken_counters_are_noticed(key):
    """Catches a check of identities that checks nothing."""
    stats = counted(TRACE).to_dict()
    with pytest.raises(CudflashError, match="break"):
        identities(stats | {key: stats[key] + 20})


def test_require_draft_fails_without_a_proposal():
    """Catches a silent fallback to plain decoding (A98)."""
    ids = plain(GREEDY, 20)
    require_draft(drafted(GREEDY, 20, KeepK(ids, 0)).state.stats)
    with pytest.raises(UsageError, match=r"empty \(18 rounds\)"):
        require_draft(drafted(GREEDY, 20, NoDrafter()).state.stats)
    with pytest.raises(UsageError, match="no round"):
        require_draft(SpecStats())
    with pytest.raises(UsageError, match="ring is full"):
        require_draft(SpecStats(), DrafterFault("observe", 3, "RuntimeError", "ring is full"))


def test_records_leave_times_out():
    """Catches traces of equal answers that differ."""
    assert not [key for key in TRACE[0].to_dict() if "ms" in key]
    slow = record(0, (5, 6, 7), 3, 3, (5, 6, 7, 8), 4, "bonus", (9, 99, 9))
    assert slow.to_dict() == TRACE[0].to_dict()
