"""Rotary position encoding: the op-level function."""

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit

STYLES = ("interleaved", "split_half")


def _builder(style):
    def build():
        from cudflash.ops.cpu.rotary_kernel import build

        return build(style)

    return build


_KERNELS = {style: jit.register(f"rope_{style}", _builder(style)) for style in STYLES}


def rope(x, positions, table, style, n_dims):
    """Rotate the first ``n_dims`` values of every head, in place; the others stay as they are.

    Parameters
    ----------
    x : ndarray of shape (M, H, D), float32
        Overwritten. ``x[r]`` contiguous.
    positions : ndarray of shape (M,), int32
    table : ndarray of shape (n_pos, n_dims / 2, 2), float32
        Cosine and sine of every position and pair, times any magnitude factor.
    style : {"interleaved", "split_half"}
        Pair i is (2 i, 2 i + 1), or (i, i + n_dims / 2).
    n_dims : int, even, at most D

    Notes
    -----
    y0 = fma(x0, c, -(x1 * s)); y1 = fma(x1, c, x0 * s). A position outside the table makes the
    row's rotated values NaN, which ``check_finite`` then reports; a recorded op cannot raise.
    """
    check_rows("rope", "x", x)
    check_rows("rope", "table", table)
    if x.ndim != 3:
        raise UsageError(f"rope: x has shape {x.shape}, expected (rows, heads, head_dim)")
    m, n_heads, d = x.shape
    check_rows("rope", "positions", positions, "int32")
    check_shape("rope", "positions", positions, (m,))
    if style not in STYLES:
        raise UsageError(f"rope: style is {style!r}, expected one of {', '.join(STYLES)}")
    if n_dims % 2 or not 0 < n_dims <= d:
        raise UsageError(f"rope: n_dims is {n_dims}, expected an even number up to {d}")
    check_shape("rope", "table", table, (table.shape[0], n_dims // 2, 2))
    if m == 0:
        return
    submit(_KERNELS[style], [x, stride(x), positions, table, len(table), m, n_heads, d, n_dims],
           reads=[positions, table], writes=[extent(x)], touched=3 * x.nbytes,
           rows=m * n_heads, by_rows=[x])
