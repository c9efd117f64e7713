"""RMS norm; kernels in ``rms_norm.cu``."""

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_rows, check_shape
from cudflash.ops.cuda.launch import Long

_SHORT = 256  # up to here a warp takes a row: 32 lanes, by the contract
_ROWS_A_BLOCK = 8


def rms_norm(self, out, x, weight, eps):
    """``out[r] = (x[r] / sqrt(mean(x[r]^2) + eps)) * weight``; as ``ops.cpu.rms_norm``.

    Parameters
    ----------
    out, x : array of shape (R, D), float32
        Rows contiguous; may be the same array.
    weight : array of shape (D,), float32, or None
    eps : float
    """
    check_rows("rms_norm", "out", out)
    check_rows("rms_norm", "x", x)
    n_rows, d = out.shape
    check_shape("rms_norm", "x", x, (n_rows, d))
    if weight is not None:
        check_rows("rms_norm", "weight", weight)
        check_shape("rms_norm", "weight", weight, (d,))
    if not eps > 0.0:
        raise UsageError(f"rms_norm: eps is {eps!r}, expected a positive number")
    if n_rows == 0:
        return
    head = (out, Long(out.strides[0] // 4), x, Long(x.strides[0] // 4), weight)
    if d <= _SHORT:
        self.start("rms_norm", (), "rms_norm_short", (-(-n_rows // _ROWS_A_BLOCK),), (256,),
                   (*head, n_rows, d, float(eps)))
    else:
        self.start("rms_norm", (), "rms_norm_long", (n_rows,), (256,), (*head, d, float(eps)))
