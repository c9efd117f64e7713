"""What the monitor knows: counters known by hand, tokens by what chose them."""

import pytest

from cudflash.events import EconomyChanged, Finished, RoundFinished, Started, TokenEvent
from cudflash.spec.economy import EconomyEvent
from cudflash.spec.gate import GateStatus
from cudflash.spec.stats import identities
from cudflash.tui.panels import gate, gate_title
from cudflash.tui.state import MonitorState
from cudflash.tui.style import UNICODE
from tests.helpers.recorded_runs import (
    answer,
    events_of,
    facts,
    finished,
    recording,
    state_of,
)

# drafted, accepted, end, emitted: A | BCD E | F G | H | IJ(K cut)
ROUNDS = ((3, 3, "bonus", 4), (3, 1, "corrected", 2), (0, 0, "plain", 1), (3, 2, "corrected", 2))


def seen(events):
    state = MonitorState()
    for at, event in enumerate(events):
        state.see(event, 0.1 * at)
    return state


def test_counters_of_a_scripted_run_are_those_known_by_hand():
    """Catches a token counted twice, a cut token counted, a share of the wrong whole."""
    state = seen(answer(ROUNDS))
    assert state.counts == {"accepted": 6, "bonus": 1, "corrected": 1, "plain": 2}
    assert state.text == "ABCDEFGHIJ" and state.n_tokens == 10
    stats = state.stats.to_dict()
    identities(stats)
    assert (stats["drafted"], stats["tested"], stats["accepted"]) == (9, 8, 6)
    assert stats["proposed_at"] == [3, 3, 3]
    assert stats["tested_at"] == [3, 3, 2] and stats["accepted_at"] == [3, 2, 1]
    assert stats["acceptance_length"] == pytest.approx(8 / 3)
    assert list(state.recent) == [1.0, pytest.approx(1 / 3), None, pytest.approx(2 / 3)]
    assert state.shares == pytest.approx(
        {"draft": 4 / 20, "verify": 9 / 20, "decide": 4 / 20, "plain": 3 / 20}
    )
    assert stats["plain_step_ms"] is None and stats["estimated_speedup"] is None  # one plain round


def test_kinds_of_tokens_are_those_of_the_trace():
    """Catches a coloured token that the counters do not know: believed, and wrong."""
    state = seen(answer(ROUNDS))
    kinds = {span.text: span.kind for span in state.spans}
    assert [kinds[c] for c in "ABCDEFGHIJ"] == [
        "plain", "accepted", "accepted", "accepted", "bonus", "accepted", "corrected", "plain",
        "accepted", "accepted",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["scripted", "demo-pair"])
def test_kinds_of_a_recorded_run_add_up_to_its_counters(name):
    """Catches a colouring that drifts by one over a long answer, pauses of the gate included."""
    state = state_of(recording(name))
    stats = state.stats
    identities(stats.to_dict())
    assert state.counts["accepted"] == stats.accepted_emitted
    assert state.counts["plain"] == stats.ends["plain"] + 1
    cut = stats.ends["bonus"] + stats.ends["corrected"] - state.counts["bonus"]
    assert 0 <= cut - state.counts["corrected"] <= 1
    assert sum(state.counts.values()) == state.n_tokens == len(state.result.tokens)
    assert state.text == state.result.text
    told = state.result.stats["speculative"]
    for name in ("drafted", "tested", "accepted", "proposed_at", "accepted_at"):
        assert getattr(stats, name) == told[name], name
    index = {record.index: record for record in stats.records}
    spans = iter(state.spans[1:])
    for record in index.values():
        kinds = [next(spans) for _ in range(record.emitted)]
        assert [s.token for s in kinds] == list(record.decided[: record.emitted])
        assert [s.kind == "accepted" for s in kinds] == [
            i < record.accepted for i in range(record.emitted)
        ]


def test_gate_is_followed_through_closing_and_reopening():
    """Catches a countdown that runs the wrong way, or survives the pause."""
    state, left = MonitorState(), []
    for t, event in events_of(recording()):
        state.see(event, t)
        if isinstance(event, RoundFinished) and state.gate.state == "closed":
            left.append(state.pause)
    assert len(left) > 50 and left[0][1] in (1, 64) and left[-1] == (0, 64)
    lefts = [n for n, _ in left]
    assert lefts == sorted(lefts, reverse=True) and lefts[1] <= 64
    assert state.pause is None and state.gate_event.kind == "reopened"
    assert sum("gate" in notice for notice in state.notices) == 2


@pytest.mark.parametrize("rounds", [(), ((3, 0, "corrected", 1),)])
def test_short_answers_have_no_rates(rounds):
    """Catches a division by zero in an answer of one token, or of two."""
    state = seen(answer(rounds))
    assert state.n_tokens == len(rounds) + 1
    assert state.stats.acceptance_rate in (None, 0.0)
    assert state.tokens_per_second is None or state.tokens_per_second > 0


def test_answer_without_tokens():
    """Catches an answer of length 0 that looks unfinished."""
    state = seen([Started(facts()), Finished(finished(()), "")])
    assert state.result is not None and state.text == "" and state.tokens_per_second is None
    assert "complete: 0 tokens" in state.notices[-1]


def test_draft_that_never_accepts():
    """Catches percentages of nothing, and a warning that is not shown."""
    state = seen(answer([(3, 0, "corrected", 1)] * 20))
    assert state.counts["accepted"] == 0 and state.counts["corrected"] == 20
    assert set(state.recent) == {0.0} and state.stats.acceptance_rate == 0.0


def test_plain_answer_needs_no_rounds():
    """Catches tokens that stay pending where there is no drafter."""
    events = [Started(facts(drafter=False))]
    events += [TokenEvent(i, 65 + i, chr(65 + i), None) for i in range(5)]
    state = seen(events)
    assert state.text == "ABCDE" and state.counts["plain"] == 5 and not state.pending
    assert state.tokens_per_second == pytest.approx(10.0)


def test_text_held_back_by_a_cancelled_answer_is_shown():
    """Catches the end of an answer that only ``Finished`` carries."""
    events = list(answer(ROUNDS[:1], finish="cancelled"))
    events[-1] = Finished(events[-1].result, "...")
    assert seen(events).text == "ABCDE..."


def test_answers_of_a_conversation_begin_anew():
    """Catches counters that run on over the answers of a conversation."""
    state = seen([*answer(ROUNDS), *answer(ROUNDS[:1])])
    assert state.answers == 2 and state.text == "ABCDE" and state.stats.rounds == 1


def test_round_whose_tokens_were_lost_is_counted():
    """Catches a reader of a damaged recording that fails where a token is missing."""
    events = [e for e in answer(ROUNDS) if getattr(e, "index", None) not in (1, 2)]
    state = seen(events)
    assert state.stats.rounds == 4 and state.text == "ADEFGHIJ"
    assert [s.kind for s in state.spans][:3] == ["plain", "accepted", "bonus"]


def test_unknown_events_are_left_alone():
    """Catches a monitor that ends the answer over an event of a newer version."""
    state = MonitorState()
    state.see(object(), 1.0)
    assert state.answers == 0


def test_a_pause_that_times_have_decided_is_shown_and_counted_down():
    """Catches a draft that stands still beside a gate that says open, without a reason."""
    state = seen(answer(ROUNDS[:2]))
    status = GateStatus("open", 1, 6, 2, 0, 6, None)
    state.gate = status
    paused = EconomyEvent("paused", 2, 6, 0, 0.4, 70, "drafting has cost more than it saved")
    state.see(EconomyChanged(paused))
    assert state.paused and state.pause == (64, 64)
    assert "does not pay" in "".join(part[0] for part in gate_title(state))
    assert any("cost more" in "".join(s.text for s in line) for line in gate(state, UNICODE, 60, 8))
    state.see(EconomyChanged(EconomyEvent("resumed", 9, 70, 3, None, None, "tried again")))
    assert not state.paused and state.pause is None
    assert [n.split(":")[0] for n in state.notices][-2:] == ["drafting paused", "drafting resumed"]


def test_recorded_draft_that_never_accepts_is_named():
    """Catches a real run of zeros that looks like nothing has happened."""
    state = state_of(recording("never-accepted"))
    assert state.counts == {"accepted": 0, "bonus": 0, "corrected": 198, "plain": 2}
    assert state.stats.drafted == 1365 and set(state.recent) == {0.0}
    assert {finding.name for finding in state.findings} >= {"zero-acceptance"}
    assert (state.context.rows, state.context.window_start) == (64, 1259 - 64)
