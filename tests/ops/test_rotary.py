"""RoPE: both pairings against the formula, partial rotation, bad positions."""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from tests.helpers import exact_f32 as F
from tests.helpers.ops_checks import assert_same_bits, check_row_independence, check_writes_only

STYLES = ["interleaved", "split_half"]


def case(m, n_heads, d, n_dims, n_pos=50):
    rng = np.random.default_rng([m, n_heads, d, n_dims])
    angle = rng.uniform(0, 7, (n_pos, n_dims // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    return (ops.upload(rng.standard_normal((m, n_heads, d)).astype(np.float32)),
            ops.upload(rng.integers(0, n_pos, m).astype(np.int32)), ops.upload(table))


def model(x, positions, table, style, n_dims):
    out = x.copy()
    index = np.arange(n_dims // 2)
    low, high = ((2 * index, 2 * index + 1) if style == "interleaved"
                 else (index, index + n_dims // 2))
    c, s = table[positions, None, :, 0], table[positions, None, :, 1]
    x0, x1 = x[..., low], x[..., high]
    out[..., low] = F.fma(x0, c, -F.mul(x1, s))
    out[..., high] = F.fma(x1, c, F.mul(x0, s))
    return out


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("d,n_dims", [(64, 64), (128, 128), (256, 64), (32, 32), (80, 80), (16, 8)])
def test_rope_equals_the_formula(style, d, n_dims):
    """Catches a wrong pairing, sign, contraction or a touched element beyond n_dims."""
    x, positions, table = case(5, 3, d, n_dims)
    expected = model(x, positions, table, style, n_dims)
    ops.rope(x, positions, table, style, n_dims)
    assert_same_bits(x, expected)


@pytest.mark.parametrize("style", STYLES)
def test_rope_row_is_alone(style):
    """Catches a row that depends on its neighbours or the threads."""
    x, positions, table = case(33, 3, 64, 64)

    def run(rows):
        y = x[rows].copy()
        ops.rope(y, positions[rows], table, style, 64)
        return y

    check_row_independence(run)


def test_rope_of_strided_rows_leaves_the_rest():
    """Catches a store outside the rows."""
    x, positions, table = case(5, 3, 64, 64)

    def call(view):
        view[...] = x
        ops.rope(view, positions, table, "split_half", 64)

    assert_same_bits(check_writes_only(call, x.shape),
                     model(x, positions, table, "split_half", 64))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("position", [-1, 50, 2**31 - 1, -(2**31)])
def test_rope_outside_the_table_fails_closed(style, position):
    """Catches a read past the table: the row's rotated values become NaN, other rows are right."""
    x, positions, table = case(3, 2, 64, 32)
    positions[1] = position
    rest = [0, 2]
    expected = model(x[rest], positions[rest], table, style, 32)
    tail = x[1, :, 32:].copy()
    ops.rope(x, positions, table, style, 32)
    assert np.isnan(x[1, :, :32]).all()
    assert_same_bits(x[1, :, 32:], tail)
    assert_same_bits(x[rest], expected)


def test_rope_refuses_wrong_arguments():
    """Catches a table of another width and an unknown pairing."""
    x, positions, table = case(2, 2, 64, 64)
    with pytest.raises(UsageError, match="table has shape"):
        ops.rope(x, positions, table, "split_half", 32)
    with pytest.raises(UsageError, match="style"):
        ops.rope(x, positions, table, "neox", 64)
    with pytest.raises(UsageError, match="n_dims"):
        ops.rope(x, positions, table, "split_half", 66)
