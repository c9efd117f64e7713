"""Each signature is named when its fault is injected, and not otherwise."""

import pytest

from cudflash.drafters import AlwaysWrong, KeepK, Oracle
from cudflash.sampling import SamplingConfig
from cudflash.spec.diagnosis import (
    context_hole,
    diagnose,
    not_from_file,
    seed_echo,
    seed_echo_score,
    window_collapse,
    zero_acceptance,
    zero_mid_block,
)
from tests.spec.fakes import drafted, plain

GREEDY = SamplingConfig(temperature=0)


def names(answer, **kwargs):
    stats = answer.state.stats
    return [f.name for f in diagnose(stats.records, stats, **kwargs)]


@pytest.fixture(scope="module")
def ids():
    return plain(GREEDY, 400)


def test_a_draft_of_another_model_is_zero_acceptance(ids):
    """Catches silence when nothing is ever accepted (A34), also when the gate closed early."""
    assert names(drafted(GREEDY, 200, AlwaysWrong(ids))) == ["zero-acceptance"]
    assert names(drafted(GREEDY, 200, AlwaysWrong(ids), verify_length=15, mode="auto")) == [
        "zero-acceptance"
    ]
    assert names(drafted(GREEDY, 200, Oracle(ids))) == []


def test_zero_acceptance_needs_64_proposals():
    """Catches a warning before there is evidence, and one after a single hit."""
    assert zero_acceptance([(7, 0)] * 9) is None
    finding = zero_acceptance([(7, 0), (0, 0)] * 10)
    assert finding.numbers == {"proposals": 70, "rounds": 10} and "70" in finding.sentence
    assert zero_acceptance([(7, 0)] * 8 + [(7, 1)] + [(7, 0)] * 90) is None
    # later failures are another signature: the first 64 were not all rejected
    assert zero_acceptance([(7, 1)] + [(7, 0)] * 90) is None


def test_a_block_that_dies_in_the_middle_is_named_with_its_position(ids):
    """Catches a per-position curve that hits exactly zero unnoticed (A18)."""
    answer = drafted(GREEDY, 400, KeepK(ids, 4), verify_length=15)
    stats = answer.state.stats
    assert names(answer) == ["zero-mid-block"]
    finding = zero_mid_block(stats.tested_at, stats.accepted_at)
    assert finding.numbers["position"] == 4 and finding.numbers["rate_before"] == 1.0


def test_a_curve_that_fades_is_not_a_fault():
    """Catches false alarms: few tests, or a conditional rate that was low already."""
    assert zero_mid_block([100, 50, 20], [50, 20, 0]) is None
    assert zero_mid_block([1000, 100, 24], [100, 24, 0]) is None
    assert zero_mid_block([100, 80, 64], [80, 64, 50]) is None
    assert zero_mid_block([], []) is None and zero_mid_block([64], [0]) is None
    assert zero_mid_block([100, 60, 30], [60, 30, 0]).numbers["position"] == 2


def test_collapse_at_a_boundary_is_named(ids):
    """Catches acceptance that falls apart exactly where the window is full (A20, A21)."""

    class Wrapped(Oracle):
        """Right until the context passes 150 rows."""

        def propose(self, anchor, n, context):
            wrong = AlwaysWrong(self._ids)
            return (wrong if context.n_past >= 150 else super()).propose(anchor, n, context)

    answer = drafted(GREEDY, 400, Wrapped(ids), verify_length=3)
    boundaries = {"window": 150, "ring": 300}
    assert names(answer, boundaries=boundaries) == ["window-collapse"]
    rounds = [(r.n_past, len(r.drafted), r.accepted) for r in answer.state.stats.records]
    finding = window_collapse(rounds, boundaries)
    assert finding.numbers["boundary"] == 150 and finding.numbers["what"] == "window"
    healthy = drafted(GREEDY, 400, Oracle(ids), verify_length=3)
    assert names(healthy, boundaries=boundaries) == []


def test_collapse_needs_proposals_on_both_sides():
    """Catches a verdict from a handful of rounds."""
    assert window_collapse([(10, 7, 7)] * 9 + [(100, 7, 0)] * 50, {"window": 50}) is None
    assert window_collapse([(10, 7, 7)] * 10 + [(100, 7, 0)] * 9, {"window": 50}) is None
    assert window_collapse([(10, 7, 1)] * 50 + [(100, 7, 0)] * 50, {"window": 50}) is None
    assert window_collapse([(10, 7, 7)] * 10 + [(100, 7, 0)] * 10, {"window": 50}) is not None


def test_settings_that_are_not_the_files_are_named():
    """Catches an override or an absent key that nobody is told about."""
    assert not_from_file("window", 2048, "file", 2048) is None
    assert not_from_file("window", 2048, "override", 2048) is None
    halved = not_from_file("window", 1024, "override", 2048)
    assert halved.name == "window-not-from-file" and "1024" in halved.sentence
    assert "2048" in halved.sentence
    absent = not_from_file("taps", [1, 2], "absent")
    assert absent.name == "taps-not-from-file" and "says nothing" in absent.sentence


def test_a_hole_is_named_with_both_lengths():
    """Catches an invariant that is checked but does not say what it found."""
    assert context_hole(10, 10) is None
    finding = context_hole(10, 74)
    assert finding.numbers == {"draft_length": 10, "committed": 74}
    assert finding.to_dict()["name"] == "context-hole"


def test_seed_echo():
    """Catches a score over the wrong rows, and a verdict from too few."""
    assert seed_echo_score([], []) is None
    assert seed_echo_score([1, 2, 3, 4], [1, 2, 9, 4]) == 0.75
    assert seed_echo([0] * 7, [1] * 7) is None
    assert seed_echo([1] * 8, [1] * 8) is None
    low = seed_echo([0] * 6 + [1] * 2, [1] * 8)
    assert low.numbers == {"score": 0.25, "blocks": 8}
    with pytest.raises(ValueError, match="anchors"):
        seed_echo_score([1], [1, 2])
