"""The curve of speed against k, MTP beside DFlash2."""

import pytest

from cudflash.bench.depth import depth_notes
from cudflash.bench.lanes import Lane, choose_lanes
from cudflash.drafters import AtMost, Oracle
from cudflash.spec.verify_length import covering
from tests.helpers.engines import greedy
from tests.helpers.hybrid_model import hybrid_engine


def test_lanes_of_any_depth():
    """A depth that is left out or rounded to a pinned length."""
    depths = (1, 2, 3, 5, 7)
    lanes = choose_lanes(
        ["dflash2", "mtp"], ["dflash2"], depths, ["match"], {"dflash2": 8}, has_mtp=True
    )["dflash2"]
    assert [lane.name for lane in lanes] == [
        f"{kind} k{k}" for kind in ("dflash2", "mtp") for k in depths
    ]
    assert [covering(k) for k in depths] == [3, 3, 3, 7, 7]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_drafter_held_to_k_proposes_k(k):
    """A cut that loses tokens, or that the verify length overrides."""
    one = hybrid_engine()
    plain = greedy(one, [5, 6, 7], 30, ignore_eos=True)
    held = greedy(one, [5, 6, 7], 30, ignore_eos=True, speculative="on",
                  drafter=AtMost(Oracle(plain.tokens), k))  # fmt: skip
    assert held.tokens == plain.tokens
    assert max(len(r["drafted"]) for r in held.speculation["trace"]) == k


def test_where_a_drafter_starts_to_lose_is_said():
    """A curve read from the wrong end, or across drafters."""
    lanes = [Lane("mtp", k, "match", False, "on") for k in (1, 2, 3, 5, 7)]
    record = {"groups": [{"lanes": [lane.to_dict() for lane in lanes]}]}
    speeds = dict(zip((1, 2, 3, 5, 7), (10.0, 12.0, 13.0, 11.0, 7.0)))
    rows = [
        {"lane": lane.name, "set": "chat", "test": "tg128", "stop": "natural",
         "t/s": speeds[lane.verify_length], "speed-up": speeds[lane.verify_length] / 9,
         "acceptance length": 1 + lane.verify_length / 4}
        for lane in lanes
    ]  # fmt: skip
    (note,) = depth_notes(record, rows)
    assert "mtp is fastest at k = 3 (13.00 t/s, 1.750 tokens per forward)" in note
    assert "from k = 5 on it loses: 11.00 t/s at 2.250" in note
    assert "slower than plain decoding at k = 7" in note
    assert depth_notes(record, rows[:2]) == []
