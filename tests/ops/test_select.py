"""Argmax, top-k, finiteness: exact, lowest id on ties, at a vocabulary that spans all parts."""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from tests.helpers.ops_checks import (
    assert_same_bits,
    check_row_independence,
    poisoned,
    replay,
)

WIDTHS = [1, 15, 16, 17, 8192, 8193, 70001]


def logits(m, n, seed=0, coarse=True):
    """Random rows; rounded ones are full of ties."""
    x = np.random.default_rng([seed, m, n]).standard_normal((m, n)) * 3
    return ops.upload((np.round(x) if coarse else x).astype(np.float32))


def best(x, k):
    """Reference: stable sort by descending value."""
    ids = np.argsort(-x.astype(np.float64), axis=1, kind="stable")[:, :k].astype(np.int32)
    return ids, np.take_along_axis(x, ids, 1)


def run_top_k(x, k):
    ids, values = poisoned((len(x), k), np.int32), poisoned((len(x), k))
    replay(lambda: ops.top_k(ids, values, x))
    return ids, values


@pytest.mark.parametrize("n", WIDTHS)
def test_argmax_prefers_the_lowest_id(n):
    """Catches a tie that depends on lanes, spans or threads."""
    x = logits(9, n)
    ids = poisoned((9,), np.int32)
    replay(lambda: ops.argmax(ids, x))
    assert_same_bits(ids, x.argmax(1).astype(np.int32))


def test_argmax_in_every_place():
    """Catches a lane, tail or span that is not searched, and a tie across spans."""
    x = ops.upload(np.full((60, 20000), -2.0, np.float32))
    places = np.random.default_rng(0).integers(0, 20000, 60)
    places[:6] = [0, 19999, 8191, 8192, 15, 16]
    x[np.arange(60), places] = -1.0
    x[30:, 19990:] = -1.0
    ids = poisoned((60,), np.int32)
    ops.argmax(ids, x)
    assert_same_bits(ids, x.argmax(1).astype(np.int32))


def test_argmax_of_special_rows():
    """Catches an id out of range when nothing exceeds -infinity, and -0 counted below 0."""
    x = ops.upload(np.full((4, 40), -np.inf, np.float32))
    x[1] = np.nan
    x[2, 3:] = [-0.0] * 20 + [0.0] * 17
    x[3, 7], x[3, 3] = np.inf, np.nan
    ids = poisoned((4,), np.int32)
    ops.argmax(ids, x)
    assert ids.tolist() == [0, 0, 3, 7]


@pytest.mark.parametrize("k", [1, 5, 40, 300])
@pytest.mark.parametrize("coarse", [True, False])
def test_top_k_equals_a_stable_sort(k, coarse):
    """Catches wrong ties and candidates lost between spans."""
    for n in (k, k + 1, 5000, 140000):
        x = logits(3, n, coarse=coarse)
        ids, values = run_top_k(x, k)
        expected_ids, expected_values = best(x, k)
        assert_same_bits(ids, expected_ids)
        assert_same_bits(values, expected_values)


def test_top_k_of_sorted_and_special_rows():
    """Catches the worst case of insertion, masked logits, and NaNs that count as large."""
    x = np.stack([np.arange(3000), -np.arange(3000), np.full(3000, -np.inf),
                  np.full(3000, np.nan)]).astype(np.float32)
    x[2, [7, 2999]], x[3, [5, 1500]] = 1.0, [-3.0, -np.inf]
    ids, values = run_top_k(ops.upload(x), 4)
    assert ids[:3].tolist() == [[2999, 2998, 2997, 2996], [0, 1, 2, 3], [7, 2999, 0, 1]]
    assert ids[3].tolist() == [5, 1500, -1, -1]
    assert values[3].tolist() == [-3.0, -np.inf, -np.inf, -np.inf]


def test_selection_row_is_alone():
    """Catches a row that changes with M or the threads."""
    x = logits(33, 9000)

    def run(rows):
        ids, values = poisoned((len(x[rows]), 9), np.int32), poisoned((len(x[rows]), 9))
        first = poisoned((len(x[rows]),), np.int32)
        ops.top_k(ids, values, x[rows])
        ops.argmax(first, x[rows])
        return np.concatenate([ids, values.view(np.int32), first[:, None]], 1)

    check_row_independence(run)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_check_finite_finds_one_bad_value_anywhere(bad):
    """Catches a place that is not looked at; the flag is poisoned and must be set both ways."""
    x = logits(3, 9001)
    flag = poisoned((1,), np.int32)
    replay(lambda: ops.check_finite(flag, x))
    assert flag[0] == 1
    for place in ((0, 0), (2, 9000), (1, 8191), (1, 8192), (2, 8999), (0, 17)):
        keep, x[place] = x[place], bad
        ops.check_finite(flag, x)
        assert flag[0] == 0, place
        x[place] = keep
    x[1, 5], x[2, 7] = 3.4e38, 1e-45
    ops.check_finite(flag, x)
    assert flag[0] == 1


def test_wrong_arguments_are_refused():
    """Catches k beyond the vocabulary and an id buffer of another width."""
    x = logits(2, 10)
    with pytest.raises(UsageError, match="k is 11"):
        ops.top_k(poisoned((2, 11), np.int32), poisoned((2, 11)), x)
    with pytest.raises(UsageError, match="out_ids is int64"):
        ops.argmax(np.zeros(2, np.int64), x)
