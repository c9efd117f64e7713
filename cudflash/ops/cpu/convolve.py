"""Dynamic convolution of a draft block: the op-level function."""

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit


def _build():
    from cudflash.ops.cpu.convolve_kernel import build

    return build()


_DYNAMIC_CONV = jit.register("dynamic_conv", _build)


def dynamic_conv(out, x, dyn, base, side, group):
    """Causal convolution along the rows of one block, with coefficients of every row's own.

    ``out[t, c] = sum over o of (base[side, o, c] + dyn[t, side, o, c // group]) * x[t - o, c]``,
    with nothing before row 0.

    Parameters
    ----------
    out, x : ndarray of shape (B, C), float32
        Different memory: row t reads the rows before it.
    dyn : ndarray of shape (B, 2 * taps * C / group), float32
        Columns in the order side, tap, group.
    base : ndarray of shape (2, taps, C), float32
    side : {0, 1}
        0 before a sublayer, 1 after it.
    group : int
        Channels that share a dynamic coefficient; divides C.

    Notes
    -----
    Tap 0 first: acc = (base + dyn) * x[t]; then acc = fma(base + dyn, x[t - o], acc) for
    o = 1 .. taps - 1, each sum base + dyn rounded; taps before row 0 are left out.
    """
    op = "dynamic_conv"
    for name, array in (("out", out), ("x", x), ("dyn", dyn), ("base", base)):
        check_rows(op, name, array)
    n_rows, width = out.shape
    check_shape(op, "x", x, out.shape)
    n_taps = base.shape[1]
    check_shape(op, "base", base, (2, n_taps, width))
    if side not in (0, 1):
        raise UsageError(f"{op}: side is {side!r}, expected 0 or 1")
    if group < 1 or width % group:
        raise UsageError(f"{op}: group is {group}, expected a divisor of {width}")
    n_groups = width // group
    check_shape(op, "dyn", dyn, (n_rows, 2 * n_taps * n_groups))
    if n_rows == 0:
        return
    first = side * n_taps
    submit(_DYNAMIC_CONV,
           [out, stride(out), x, stride(x), dyn, stride(dyn), base, n_rows, width, n_taps, first,
            group],
           reads=[extent(x), extent(dyn), base], writes=[extent(out)],
           rows=n_rows, by_rows=[dyn, out])
