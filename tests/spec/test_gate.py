"""The acceptance gate: when it closes, when it comes back, what it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudflash.errors import UsageError
from cudflash.spec.gate import AcceptanceGate

WARMUP = [(15, 15), (15, 15)]  # accepted, so that counting them would show


def play(rounds, mode="auto", committed=100):
    """Feed rounds at a standing count of committed tokens."""
    gate = AcceptanceGate(mode)
    for index, (drafted, accepted) in enumerate(rounds):
        gate.record(index, drafted, accepted, committed)
    return gate


def test_needs_32_proposals():
    """Catches a gate that closes on too little: 30 proposals are open, 32 are enough."""
    assert play([*WARMUP, (15, 0), (15, 0)]).state == "open"
    gate = play([*WARMUP, (15, 0), (15, 0), (2, 0)])
    assert gate.state == "closed" and gate.events[0].proposals == 32


def test_exactly_a_quarter_stays_open():
    """Catches <= against the floor."""
    assert play([*WARMUP, (15, 4), (15, 4), (2, 0)]).state == "open"
    assert play([*WARMUP, (15, 4), (15, 3), (2, 0)]).state == "closed"


def test_looks_at_the_last_eight_rounds_only():
    """Catches a cumulative rate: 22.9 % over all rounds, 80 % of late."""
    gate = play([(15, 0)] * 20 + [(15, 12)] * 8, mode="on")
    assert gate.sample() == (96, 120, 8)
    recovered = play([*WARMUP] + [(7, 7)] * 30 + [(7, 0)] * 6)
    assert recovered.state == "open"  # 2 of 8 rounds are still good: 14 of 56, a quarter


def test_warm_up_rounds_are_not_part_of_the_sample():
    """Catches a warm-up that only delays (a defect of the original): here it would decide."""
    bad_start = play([(15, 0), (15, 0)] + [(15, 4)] * 3)
    assert bad_start.state == "open" and bad_start.sample() == (12, 45, 3)
    good_start = play([(15, 15), (15, 15)] + [(15, 0)] * 3)
    assert good_start.state == "closed" and good_start.events[0].accepted == 0
    assert [r.warmup for r in good_start.history] == [True, True, False, False, False]


def test_short_blocks_can_close_it_too():
    """Catches 32 proposals as a condition that 8 rounds of length 3 never meet."""
    assert play([*WARMUP] + [(3, 0)] * 7).state == "open"
    gate = play([*WARMUP] + [(3, 0)] * 8)
    assert gate.state == "closed" and gate.events[0].proposals == 24


def test_pauses_double_up_to_512():
    """Catches a gate that never comes back, or comes back ever sooner."""
    gate, committed, index, pauses = AcceptanceGate(), 0, 0, []
    while len(pauses) < 6:
        assert gate.allows(index, committed)
        while gate.state == "open":
            gate.record(index, 15, 0, committed)
            index, committed = index + 1, committed + 1
        pauses.append(gate.resume_at - (committed - 1))
        assert not gate.allows(index, gate.resume_at - 1)
        committed = gate.resume_at
    assert pauses == [64, 128, 256, 512, 512, 512]
    assert [e.kind for e in gate.events[:4]] == ["closed", "reopened", "closed", "reopened"]
    assert gate.events[0].reason == (
        "0 of 45 proposals of the last 3 rounds were accepted, less than 25%; drafting pauses for "
        "64 tokens"
    )
    assert "64 tokens" in gate.events[1].reason and gate.closings == 6


def test_reopening_starts_a_fresh_sample_with_a_new_warm_up():
    """Catches a gate that closes at once on what it knew before."""
    gate = play([*WARMUP, (15, 0), (15, 0), (15, 0)], committed=100)
    assert gate.resume_at == 164 and not gate.allows(5, 163) and gate.allows(5, 164)
    assert gate.sample() == (0, 0, 0)
    for index, round_ in enumerate([(15, 0), (15, 0), (15, 4), (15, 4), (2, 1)]):
        gate.record(5 + index, *round_, 164 + index)
    assert gate.state == "open" and gate.sample() == (9, 32, 3)


def test_modes():
    """Catches on that closes and off that opens; both keep the history."""
    on = play([*WARMUP] + [(15, 0)] * 30, mode="on")
    assert on.state == "open" and on.allows(32, 100) and not on.events and len(on.history) == 32
    off = AcceptanceGate("off")
    assert off.state == "off" and not off.allows(0, 0)
    with pytest.raises(UsageError, match="auto, on or off"):
        AcceptanceGate("yes")


def test_a_fault_closes_it_for_good():
    """Catches a drafter that is asked again after it failed."""
    gate = AcceptanceGate()
    gate.disable(3, 20, "the drafter failed")
    gate.disable(4, 21, "again")
    assert gate.state == "disabled" and not gate.allows(99, 10_000)
    assert [(e.kind, e.reason, e.round) for e in gate.events] == [
        ("disabled", "the drafter failed", 3)
    ]


def test_rounds_without_proposals_say_nothing():
    """Catches empty rounds that push real ones out of the sample."""
    gate = play([*WARMUP, (15, 0), (15, 0)] + [(0, 0)] * 10 + [(2, 0)])
    assert gate.state == "closed" and gate.events[0].proposals == 32
    with pytest.raises(ValueError, match="accepted"):
        gate.record(0, 2, 3, 0)


@given(
    rounds=st.lists(
        st.integers(0, 15).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=80
    )
)
def test_closes_exactly_when_a_plain_reading_of_the_rule_says_so(rounds):
    """Catches slips of the window: compared with the rule written down naively."""
    gate, committed, since, closings, resume = AcceptanceGate(), 0, [], 0, None
    for index, (drafted, accepted) in enumerate(rounds):
        if resume is not None and committed >= resume:
            since, resume = [], None
        allowed = gate.allows(index, committed)
        assert allowed == (resume is None)
        committed += 1 + (accepted if allowed else 20)
        if not allowed:
            continue
        gate.record(index, drafted, accepted, committed)
        since += [(drafted, accepted)] if drafted else []
        sample = since[2:][-8:]
        d, a = sum(x for x, _ in sample), sum(y for _, y in sample)
        if (d >= 32 or len(sample) == 8) and a / max(d, 1) < 0.25:
            resume = committed + min(64 * 2**closings, 512)
            closings += 1
        assert (gate.state == "closed") == (resume is not None) and gate.closings == closings
    assert [e.kind for e in gate.events][::2] == ["closed"] * ((len(gate.events) + 1) // 2)
