"""The arithmetic of bench, on numbers known by hand, and its identities on random rounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudflash.bench.statistics import (
    acceptance,
    cells,
    geometric_mean,
    interval,
    phases,
    pool,
    ratio_of_sums,
    verdict,
)
from cudflash.errors import CudflashError
from tests.helpers.bench_records import counts, record, run, simple_record


def test_counters_of_hand_made_rounds():
    """A rate with the wrong denominator: four rounds of three proposals, 3, 1, 2 and 0 accepted."""
    found = acceptance(pool([counts([3, 1]), counts([2, 0])]))
    assert found["length"] == (4 + 2 + 3 + 1) / 4 == 2.5
    assert found["tokens_per_pass"] == 2.5 and found["rate"] == 6 / 12
    assert found["at"] == [3 / 4, 2 / 4, 1 / 4]
    assert found["at_conditional"] == [3 / 4, 2 / 3, 1 / 2]


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), min_size=1, max_size=5))
def test_identities_on_any_rounds(answers):
    """Lengths, unconditional and conditional shares that do not follow from the same rounds."""
    sums = pool([counts(blocks, 7) for blocks in answers])
    found = acceptance(sums)
    assert sums["emitted"] == sums["accepted"] + sums["corrected"] + sums["bonus"]
    # blocks are full, nothing is cut or stopped: the length is 1 + the shares
    assert found["length"] == pytest.approx(1 + sum(found["at"]), abs=1e-12)  # 7 roundings of 1e-16
    assert found["length"] == sums["emitted"] / sums["draft_rounds"]
    assert found["rate"] == sums["accepted"] / sums["drafted"]
    product = 1.0
    for share, given_all_before in zip(found["at"], found["at_conditional"]):
        assert (given_all_before is None) == (product == 0)
        product *= given_all_before or 0.0
        assert share == pytest.approx(product, abs=1e-12)
    assert found["at"] == sorted(found["at"], reverse=True)


def test_cut_and_stopped_rounds_shorten_the_length():
    """A length that counts tokens which are not in the answer, or a target token that is none."""
    one = counts([3, 2])
    one |= {"bonus": 0, "stopped": 1, "emitted": 5, "cut": 1}  # 3 stopped, then 2 + 1 with one cut
    one["tested"], one["tested_at"] = 6, [2, 2, 2]
    found = acceptance(pool([one]))
    lost = (one["stopped"] + one["cut"]) / one["draft_rounds"]
    assert found["length"] == 2.5 == 1 + sum(found["at"]) - lost


def test_broken_counters_are_refused():
    """A sum over answers of which one was counted otherwise."""
    wrong = counts([1, 1])
    wrong["accepted"] += 1
    with pytest.raises(CudflashError, match="break"):
        pool([counts([1]), wrong])


def test_a_draft_that_never_accepts_has_length_one():
    """A division by zero, or a length of 0 although every round emits the target's token."""
    found = acceptance(pool([counts([0, 0, 0])]))
    assert found["length"] == 1.0 and found["rate"] == 0.0
    assert found["at"] == [0, 0, 0] and found["at_conditional"] == [0, None, None]


def test_no_round_at_all():
    """One-token answers: there is nothing to divide by."""
    found = acceptance(pool([]))
    assert found["length"] is found["rate"] is found["tokens_per_pass"] is None
    assert found["at"] == []


def test_plain_rounds_are_in_tokens_per_pass_only():
    """A gate that pauses drafting, hidden in the acceptance length."""
    one = counts([3])
    one |= {"rounds": 4, "plain_rounds": 3, "emitted": 7}
    found = acceptance(pool([one]))
    assert found["length"] == 4.0 and found["tokens_per_pass"] == 7 / 4


def test_phases_add_up():
    """Shares that are not those of the whole decoding time."""
    found = phases(pool([counts([1, 1])]), 20.0)
    assert found["per_round_ms"] == {"draft": 2.0, "verify": 3.0, "decide": 0.5}
    assert sum(found["share"].values()) == pytest.approx(1, abs=1e-12)
    assert found["share"]["rest"] == pytest.approx((20 - 11) / 20, abs=1e-12)


def test_bootstrap_is_seeded_and_scales():
    """Intervals that change from call to call, or that do not hold the value."""
    rows = [[x, 2.0] for x in np.random.default_rng(0).uniform(1, 2, 40)]

    def ratio(means):
        return means[:, 0] / means[:, 1]

    one = interval(rows, ratio)
    assert one == interval(rows, ratio) != interval(rows, ratio, seed=1)
    low, high = one
    assert low < sum(r[0] for r in rows) / 80 < high
    narrow, wide = interval(rows, ratio, level=0.5), interval(rows, ratio, level=0.99)
    assert wide[0] < low < narrow[0] < narrow[1] < high < wide[1]
    few = interval(rows[:5], ratio)
    assert few[1] - few[0] > high - low


def test_interval_needs_two_rows():
    """An interval of no width around one observation."""
    assert interval([[1.0]], lambda m: m[:, 0]) is None
    assert geometric_mean([2.0]) == (2.0, None)
    assert geometric_mean([]) == (None, None) == ratio_of_sums([])
    assert ratio_of_sums([(1, 0), (1, 0)]) == (None, None)


def test_geometric_mean_of_inverse_ratios_is_the_inverse():
    """An arithmetic mean of ratios: twice as fast and twice as slow would be 1.25 times as fast."""
    assert geometric_mean([2.0, 0.5])[0] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    "n, bounds, label",
    [(9, (1.1, 1.2), "measured"), (9, (0.7, 0.8), "measured"), (9, (0.9, 1.1), "insufficient"),
     (4, (1.1, 1.2), "insufficient"), (9, None, "insufficient")],
)  # fmt: skip
def test_verdict(n, bounds, label):
    """A direction that the interval does not show, or that a handful of prompts cannot."""
    assert verdict(n, bounds) == label


def test_cells_of_a_made_record():
    """Speeds and ratios of numbers known by hand: 10 tokens in 100 and in 50 ms."""
    plain, drafted = cells(simple_record()["runs"])
    assert plain["lane"] == "plain" and plain["tps"] == 100.0 and plain["speedup"] is None
    assert plain["acceptance"] is None and plain["exact"] is True
    assert drafted["tps"] == 200.0 and drafted["speedup"] == pytest.approx(2, abs=1e-12)
    assert drafted["speedup_interval"] == pytest.approx((2, 2), abs=1e-12)
    assert drafted["speedup_label"] == "measured" and drafted["prompts"] == 6
    assert drafted["acceptance"]["length"] == 2.5


def test_repetitions_give_a_deviation_and_medians():
    """A deviation over prompts, which differ by nature; a mean that one outlier moves."""
    runs = []
    for repetition, ms in enumerate((50.0, 51.0, 500.0)):
        for prompt in range(5):
            runs.append(run(prompt=prompt, repetition=repetition))
            runs.append(run("dflash2 k3", prompt, repetition, ms=ms, blocks=[3, 1, 2, 0]))
    plain, drafted = cells(runs)
    assert plain["tps_sd"] == 0.0 and drafted["tps_sd"] > 50
    assert drafted["speedup"] == pytest.approx(100 / 51, abs=1e-12)
    assert drafted["answers"] == 15 and drafted["prompts"] == 5


def test_answers_without_a_second_token_have_no_speed():
    """Zero-length and one-token answers: a division by zero, or a speed of nothing."""
    short = {"decode_tokens": 0, "decode_ms": 0.0}
    runs = [run(prompt=0, n_tokens=1, **short), run(prompt=1, n_tokens=0, **short)]
    (cell,) = cells(runs)
    assert cell["tps"] is None and cell["tps_sd"] is None and cell["timed_prompts"] == 0
    runs += [run("dflash2 k3", p, n_tokens=1, counts=counts([]) | {"proposed_at": []}, **short)
             for p in (0, 1)]  # fmt: skip
    drafted = cells(runs)[1]
    assert drafted["speedup"] is None and drafted["speedup_label"] == "insufficient"
    assert drafted["acceptance"]["length"] is None


def test_kinds_and_stop_modes_are_kept_apart():
    """Synthetic text or forced length averaged into a result."""
    runs = [run(), run(stop="forced"), run(set="periodic", kind="synthetic"), run(depth=512)]
    found = cells(record(runs)["runs"])
    assert [(c["set"], c["stop"], c["depth"], c["kind"]) for c in found] == [
        ("prose", "natural", 0, "natural"), ("periodic", "natural", 0, "synthetic"),
        ("prose", "natural", 512, "natural"), ("prose", "forced", 0, "natural"),
    ]  # fmt: skip


def test_order_of_cells_is_that_of_numbers():
    """k15 between k1 and k3; a plain lane at the end because an odd prompt came first."""
    lanes = ("dflash2 k15", "dflash2 k3", "plain", "dflash k7")
    made = [run(lane, blocks=None if lane == "plain" else [1]) for lane in lanes]
    assert [c["lane"] for c in cells(made)] == ["plain", "dflash k7", "dflash2 k3", "dflash2 k15"]
