"""Norms of rows and heads; kernels in ``rms_norm.cu``, ``l2_norm.cu``, ``gated_rms_norm.cu``."""

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
    _check_eps("rms_norm", eps)
    if n_rows == 0:
        return
    head = (out, Long(out.strides[0] // 4), x, Long(x.strides[0] // 4), weight)
    if d <= _SHORT:
        self.start("rms_norm", (), "rms_norm_short", (-(-n_rows // _ROWS_A_BLOCK),), (256,),
                   (*head, n_rows, d, float(eps)))
    else:
        self.start("rms_norm", (), "rms_norm_long", (n_rows,), (256,), (*head, d, float(eps)))


def l2_norm(self, out, x, eps):
    """``out[r, h] = x[r, h] / sqrt(sum(x[r, h]^2) + eps)``; as ``ops.cpu.l2_norm``.

    Parameters
    ----------
    out, x : array of shape (M, H, D), float32
        ``x[r]`` contiguous; may be the same array.
    eps : float
    """
    op = "l2_norm"
    check_rows(op, "out", out)
    check_rows(op, "x", x)
    if out.ndim != 3:
        raise UsageError(f"{op}: out has shape {out.shape}, expected (rows, heads, head_dim)")
    check_shape(op, "x", x, out.shape)
    _check_eps(op, eps)
    if out.size == 0:
        return
    n_rows, n_heads, d = out.shape
    head = (out, Long(out.strides[0] // 4), x, Long(x.strides[0] // 4))
    if d <= _SHORT:
        self.start("l2_norm", (), "l2_norm_short", (-(-n_heads // _ROWS_A_BLOCK), n_rows), (256,),
                   (*head, n_heads, d, float(eps)))
    else:
        self.start("l2_norm", (), "l2_norm_long", (n_heads, n_rows), (256,), (*head, d, float(eps)))


def gated_rms_norm(self, out, x, z, weight, eps):
    """``out[r] = rms_norm(x[r]) * weight * silu(z[r])``; as ``ops.cpu.gated_rms_norm``.

    Parameters
    ----------
    out, x, z : array of shape (R, D), float32
        Rows contiguous; out may be x or z.
    weight : array of shape (D,), float32
    eps : float
    """
    op = "gated_rms_norm"
    for name, array in (("out", out), ("x", x), ("z", z), ("weight", weight)):
        check_rows(op, name, array)
    n_rows, d = out.shape
    for name, array in (("x", x), ("z", z)):
        check_shape(op, name, array, (n_rows, d))
    check_shape(op, "weight", weight, (d,))
    _check_eps(op, eps)
    if n_rows == 0:
        return
    head = (out, Long(out.strides[0] // 4), x, Long(x.strides[0] // 4), z, Long(z.strides[0] // 4),
            weight)
    if d <= _SHORT:
        self.start("gated_rms_norm", (), "gated_rms_norm_short", (-(-n_rows // _ROWS_A_BLOCK),),
                   (256,), (*head, n_rows, d, float(eps)))
    else:
        self.start("gated_rms_norm", (), "gated_rms_norm_long", (n_rows,), (256,),
                   (*head, d, float(eps)))


def _check_eps(op, eps):
    if not eps > 0.0:
        raise UsageError(f"{op}: eps is {eps!r}, expected a positive number")
