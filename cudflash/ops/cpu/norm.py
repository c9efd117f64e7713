"""RMS norm: the op-level function."""

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit


def norm_lanes(d):
    """Number of partial sums of a row of ``d`` values; a function of ``d`` alone."""
    return 32 if d <= 256 else 256


def _build():
    from cudflash.ops.cpu.norm_kernel import build

    return build()


_RMS_NORM = jit.register("rms_norm", _build)


def rms_norm(out, x, weight, eps):
    """``out[r] = (x[r] / sqrt(mean(x[r]^2) + eps)) * weight``.

    Parameters
    ----------
    out, x : ndarray of shape (R, D), float32
        Rows contiguous; may be the same array.
    weight : ndarray of shape (D,), float32, or None
        None leaves the multiplication out.
    eps : float

    Notes
    -----
    Order: L = 32 lanes if D <= 256, else 256. Lane l: acc = fma(x[i], x[i], acc) for i = l,
    l + L, ... from 0. Lanes are added by a halving tree: (l, l + L/2), ..., (0, 1). Then mean =
    sum / D; r = 1 / sqrt(mean + eps), one rounding per operation; out = (x * r) * weight.
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
    submit(_RMS_NORM, [out, stride(out), x, stride(x), n_rows, d, norm_lanes(d),
                       0 if weight is None else weight, float(eps)],
           reads=[extent(x)] + ([] if weight is None else [weight]), writes=[extent(out)])
