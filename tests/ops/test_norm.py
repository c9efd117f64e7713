"""RMS norm against a model of its order, and alone in every row."""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from tests.helpers import exact_f32 as F
from tests.helpers.ops_checks import (
    assert_close,
    assert_same_bits,
    check_row_independence,
    check_writes_only,
    poisoned,
)

EPS = 1e-5
WIDTHS = [16, 32, 64, 128, 256, 272, 576, 640, 1000, 2560, 5376]


def model(x, weight, eps=EPS):
    """The contract's order: L lanes, halving tree, one rounding per operation."""
    n_rows, d = x.shape
    lanes = 32 if d <= 256 else 256
    acc = np.zeros((n_rows, lanes), np.float32)
    for start in range(0, d, lanes):
        part = x[:, start:start + lanes]
        acc[:, :part.shape[1]] = F.fma(part, part, acc[:, :part.shape[1]])
    mean = F.div(F.halving_tree(acc), np.float32(d))
    factor = F.div(np.float32(1), F.sqrt(F.add(mean, np.float32(eps))))
    out = F.mul(x, factor[:, None])
    return out if weight is None else F.mul(out, weight)


def case(n_rows, d, seed=0):
    rng = np.random.default_rng([seed, n_rows, d])
    x = rng.standard_normal((n_rows, d)) * np.exp(rng.standard_normal((n_rows, 1)) * 3)
    return ops.upload(x.astype(np.float32)), ops.upload(rng.standard_normal(d).astype(np.float32))


@pytest.mark.parametrize("d", WIDTHS)
def test_rms_norm_equals_the_model(d):
    """Catches a changed lane count, tail, tree or rounding, with and without a weight."""
    x, weight = case(5, d)
    for w in (weight, None):
        out = poisoned(x.shape)
        ops.rms_norm(out, x, w, EPS)
        assert_same_bits(out, model(x, w))


@pytest.mark.parametrize("d", [64, 576])
def test_rms_norm_is_close_to_float64(d):
    """Catches a wrong formula. Bound: D/L + 8 sums of squares, then 4 roundings, of 2^-24 each."""
    x, weight = case(9, d)
    out = poisoned(x.shape)
    ops.rms_norm(out, x, weight, EPS)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * weight
    assert_close(out, exact, np.abs(exact) * (d / 32 + 12) * 2.0**-24)


@pytest.mark.parametrize("d", [64, 576])
def test_rms_norm_row_is_alone(d):
    """Catches a reduction that depends on M or on the threads."""
    x, weight = case(33, d)

    def run(rows):
        out = poisoned(x[rows].shape)
        ops.rms_norm(out, x[rows], weight, EPS)
        return out

    check_row_independence(run)


def test_rms_norm_in_place_and_strided():
    """Catches a read after the write, and a store outside the rows."""
    x, weight = case(7, 100)
    expected = model(x, weight)
    found = check_writes_only(lambda out: ops.rms_norm(out, x, weight, EPS), x.shape)
    assert_same_bits(found, expected)
    ops.rms_norm(x, x, weight, EPS)
    assert_same_bits(x, expected)


def test_rms_norm_of_tiny_and_zero_rows():
    """Catches a lost flush-to-zero mode: squares of 1e-20 are subnormal and count as zero."""
    x = ops.upload(np.array([[0.0] * 64, [1e-20] * 64, [1e-40] * 64], np.float32))
    out = poisoned(x.shape)
    ops.rms_norm(out, x, None, EPS)
    assert_same_bits(out, model(x, None))
    assert (out[0] == 0).all() and (out[2] == 0).all()


def test_rms_norm_refuses_wrong_shapes():
    """Catches reading past a short weight."""
    x, weight = case(2, 64)
    with pytest.raises(UsageError, match="weight has shape"):
        ops.rms_norm(poisoned(x.shape), x, weight[:32], EPS)
    with pytest.raises(UsageError, match="eps"):
        ops.rms_norm(poisoned(x.shape), x, weight, 0.0)
