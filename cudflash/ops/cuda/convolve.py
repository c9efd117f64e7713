"""Dynamic convolution of a draft block; kernel in ``dynamic_conv.cu``."""

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_contiguous, check_rows, check_shape
from cudflash.ops.cuda.launch import Long

_BLOCK = 256


def dynamic_conv(self, out, x, dyn, base, side, group):
    """Causal convolution along the rows of one block; as ``ops.cpu.dynamic_conv``.

    Parameters
    ----------
    out, x : array of shape (B, C), float32
        Different memory: row t reads the rows before it.
    dyn : array of shape (B, 2 * taps * C / group), float32
        Columns in the order side, tap, group.
    base : array of shape (2, taps, C), float32
    side : {0, 1}
        0 before a sublayer, 1 after it.
    group : int
        Channels that share a dynamic coefficient; divides C.
    """
    op = "dynamic_conv"
    for name, array in (("out", out), ("x", x), ("dyn", dyn)):
        check_rows(op, name, array)
    check_contiguous(op, "base", base)
    n_rows, width = out.shape
    check_shape(op, "x", x, out.shape)
    n_taps = base.shape[1]
    check_shape(op, "base", base, (2, n_taps, width))
    if side not in (0, 1):
        raise UsageError(f"{op}: side is {side!r}, expected 0 or 1")
    if group < 1 or width % group:
        raise UsageError(f"{op}: group is {group}, expected a divisor of {width}")
    check_shape(op, "dyn", dyn, (n_rows, 2 * n_taps * (width // group)))
    if n_rows == 0:
        return
    self.start("dynamic_conv", (), "dynamic_conv", (-(-width // _BLOCK), n_rows), (_BLOCK,),
               (out, Long(out.strides[0] // 4), x, Long(x.strides[0] // 4), dyn,
                Long(dyn.strides[0] // 4), base, width, n_taps, side * n_taps, group))
