"""Float32 arithmetic of the numerics contract on NumPy arrays: the tests' model of a kernel.

Every operation rounds once and flushes subnormal arguments and results to zero. ``fma`` is exact:
the product of two floats is exact in float64, the sum is rounded to odd there, and rounding that to
float32 equals one rounding of the true value (53 >= 24 + 2 bits).
"""

import numpy as np

F = np.float32
_SMALLEST_NORMAL = F(2.0**-126)


def flush(x):
    """Subnormals become zeros of the same sign."""
    x = np.asarray(x, F)
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(F(0), x), x).astype(F)


def _round_to_odd_sum(p, z):
    with np.errstate(all="ignore"):
        s = p + z
        t = s - p
        error = (p - (s - t)) + (z - t)  # exact (Knuth's two-sum)
    bits = s.view(np.int64).copy()
    inexact = np.isfinite(s) & (error != 0) & (bits & 1 == 0)
    step = np.where(np.signbit(error) == np.signbit(s), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64)


def fma(x, y, z):
    """x * y + z with one rounding."""
    x, y, z = (flush(v).astype(np.float64) for v in np.broadcast_arrays(x, y, z))
    with np.errstate(all="ignore"):
        return flush(np.atleast_1d(_round_to_odd_sum(np.atleast_1d(x * y), np.atleast_1d(z)))
                     .astype(F).reshape(np.shape(x)))


def _binary(operation):
    def apply(x, y):
        with np.errstate(all="ignore"):
            return flush(operation(flush(x), flush(y)))

    return apply


add, sub, mul, div = map(_binary, (np.add, np.subtract, np.multiply, np.divide))


def sqrt(x):
    """Square root, rounded once."""
    with np.errstate(all="ignore"):
        return flush(np.sqrt(flush(x)))


def halving_tree(lanes):
    """Sum over the last axis: (l, l + n/2), ..., (0, 1)."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = add(lanes[..., :half], lanes[..., half:])
    return lanes[..., 0]


class Arithmetic:
    """What ``cudflash.ops.cpu.special`` computes on, as NumPy arrays."""

    add, sub, mul, div, fma = map(staticmethod, (add, sub, mul, div, fma))
    const = staticmethod(F)
    neg = staticmethod(np.negative)
    abs = staticmethod(np.abs)
    is_nan = staticmethod(np.isnan)
    copy_sign = staticmethod(np.copysign)

    @staticmethod
    def lt(x, y):
        """x < y, subnormals counting as zero."""
        return flush(x) < flush(y)

    @staticmethod
    def select(mask, x, y):
        """mask ? x : y."""
        return np.where(mask, x, y).astype(F)

    @staticmethod
    def add_exponent(p, t):
        """p times 2 to the integer in the low bits of t."""
        p, t = np.asarray(p, F), np.asarray(t, F)
        with np.errstate(all="ignore"):
            return (p.view(np.uint32) + (t.view(np.uint32) << np.uint32(23))).view(F)
