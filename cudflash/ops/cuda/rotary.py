"""Rotary position encoding; kernel in ``rope.cu``."""

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_rows, check_shape
from cudflash.ops.cuda.launch import Long

STYLES = ("interleaved", "split_half")
_BLOCK = 128


def rope(self, x, positions, table, style, n_dims):
    """Rotate the first ``n_dims`` values of every head, in place; as ``ops.cpu.rope``.

    Parameters
    ----------
    x : array of shape (M, H, D), float32
        Overwritten. ``x[r]`` contiguous.
    positions : array of shape (M,), int32
    table : array of shape (n_pos, n_dims / 2, 2), float32
    style : {"interleaved", "split_half"}
    n_dims : int, even, at most D
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
    self.start("rope", (f"SPLIT_HALF={int(style == 'split_half')}",), "rope",
               (-(-n_heads * n_dims // 2 // _BLOCK), m), (_BLOCK,),
               (x, Long(x.strides[0] // 4), positions, table, len(table), n_heads, d, n_dims))
