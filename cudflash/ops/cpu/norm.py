"""Norms of rows and heads: the op-level functions."""

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit


def norm_lanes(d):
    """Number of partial sums of a row of ``d`` values; a function of ``d`` alone."""
    return 32 if d <= 256 else 256


def _builder(name):
    def build():
        from cudflash.ops.cpu import norm_kernel

        return getattr(norm_kernel, name)()

    return build


_RMS_NORM = jit.register("rms_norm", _builder("build"))
_L2_NORM = jit.register("l2_norm", _builder("build_l2"))
_GATED_RMS_NORM = jit.register("gated_rms_norm", _builder("build_gated"))


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
    _check_eps("rms_norm", eps)
    if n_rows == 0:
        return
    submit(_RMS_NORM, [out, stride(out), x, stride(x), n_rows, d, norm_lanes(d),
                       0 if weight is None else weight, float(eps)],
           reads=[extent(x)] + ([] if weight is None else [weight]), writes=[extent(out)],
           rows=n_rows, by_rows=[x, out])


def l2_norm(out, x, eps):
    """``out[r, h] = x[r, h] / sqrt(sum(x[r, h]^2) + eps)``.

    Parameters
    ----------
    out, x : ndarray of shape (M, H, D), float32
        ``x[r]`` contiguous; may be the same array.
    eps : float

    Notes
    -----
    The sum in the order of :func:`rms_norm`; r = 1 / sqrt(sum + eps); out = x * r.
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
    submit(_L2_NORM, [out, stride(out), x, stride(x), n_rows, n_heads, d, norm_lanes(d),
                      float(eps)],
           reads=[extent(x)], writes=[extent(out)], touched=x.nbytes + out.nbytes,
           rows=n_rows, by_rows=[x, out])


def gated_rms_norm(out, x, z, weight, eps):
    """``out[r] = rms_norm(x[r]) * weight * silu(z[r])``.

    Parameters
    ----------
    out, x, z : ndarray of shape (R, D), float32
        Rows contiguous; out may be x or z.
    weight : ndarray of shape (D,), float32
    eps : float

    Notes
    -----
    ``((x * r) * weight) * silu(z)`` with r of :func:`rms_norm`, one rounding per operation.
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
    submit(_GATED_RMS_NORM, [out, stride(out), x, stride(x), z, stride(z), n_rows, d,
                             norm_lanes(d), weight, float(eps)],
           reads=[extent(x), extent(z), weight], writes=[extent(out)],
           rows=n_rows, by_rows=[x, z, out])


def _check_eps(op, eps):
    if not eps > 0.0:
        raise UsageError(f"{op}: eps is {eps!r}, expected a positive number")
