"""Special functions of the numerics contract, as formulas over an arithmetic ``m``.

Each function is written once. ``m`` decides what it computes on: LLVM floats or 16-lane vectors
(``special_kernel.py``), NumPy arrays (the tests), and the CUDA header repeats the same steps. Only
IEEE additions, multiplications, fused multiply-adds, divisions, comparisons and bit moves occur,
there is no branch, and nothing is contracted: every form gives the same bits.

Largest error against float64, in ulp of the result, measured on a million arguments of each
function's normal range (``tests/ops/test_special.py``):

==========  ==================================================================  ===========
function    form                                                                largest
==========  ==================================================================  ===========
exp         2^n * (1 + r + r^2 q(r)), n = rint(x / ln 2), r = x - n ln 2        1.05
sigmoid     1 / (1 + exp(-x))                                                   2.3
tanh        |x| < 0.625: x + x^3 p(x^2); else 1 - 2 / (exp(2 |x|) + 1)          1.3
softplus    max(x, 0) + log1p(exp(-|x|)), log1p(t) = 2 atanh(t / (2 + t))       2.5
silu        x / (1 + exp(-x))                                                   2.3
gelu_tanh   x / (1 + exp(-2 u)), u = sqrt(2 / pi) x (1 + 0.044715 x^2)          see below
==========  ==================================================================  ===========

gelu_tanh is 0.5 x (1 + tanh(u)) without its cancellation; relative to the argument of the
exponential it amplifies rounding by 2 |u|, so the bound is 3 + 6 |u| ulp.

Range: exp(x) is 0 for x < -87 (exp(-87) is 1.4 times the smallest normal number; nothing subnormal
is ever produced), infinity for x > 88.72283, 0 at -infinity, and the quiet NaN 0x7FC00000 for NaN.
All others give a NaN for a NaN. silu and gelu_tanh give a NaN at -infinity. Subnormal arguments
and results are flushed to zero like everywhere in a kernel.
"""

import numpy as np

_F = np.float32

LOG2E = _F(1.44269504)
# 1.5 * 2^23: adding it leaves the rounded integer in the low bits of the sum.
ROUND = _F(12582912.0)
LN2_HIGH = _F(0.6931471824645996)
LN2_LOW = _F(-1.904654299957768e-09)
# (exp(r) - 1 - r) / r^2 on |r| <= ln 2 / 2
EXP_Q = tuple(map(_F, (0.5, 0.16666576266288757, 0.041666463017463684, 0.008363235741853714,
                       0.0013933733571320772)))
EXP_LOW = _F(-87.0)
EXP_HIGH = _F(88.72283172607422)
# (tanh(x) - x) / x^3 in z = x^2 <= 0.625^2
TANH_P = tuple(map(_F, (-0.333333283662796, 0.13332782685756683, -0.05385249853134155,
                        0.021003641188144684, -0.006104947999119759)))
TANH_SPLIT = _F(0.625)
# (2 atanh(s) - 2 s) / s^3 in z = s^2 <= 1 / 9
LOG1P_P = tuple(map(_F, (0.6666663885116577, 0.4000767171382904, 0.28233957290649414,
                         0.26867547631263733)))
GELU_CUBIC = _F(0.044715)
GELU_SCALE = _F(1.5957691216057308)  # 2 sqrt(2 / pi)

ZERO, ONE, TWO = _F(0.0), _F(1.0), _F(2.0)
INFINITY = _F(np.inf)
QUIET_NAN = np.uint32(0x7FC00000).view(_F)


def _horner(m, x, coefficients):
    """Polynomial, highest coefficient first, one fused multiply-add per step."""
    value = m.const(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = m.fma(value, x, m.const(c))
    return value


def exp(m, x):
    """Exponential function; see the module's table."""
    t = m.fma(x, m.const(LOG2E), m.const(ROUND))
    n = m.sub(t, m.const(ROUND))
    r = m.fma(n, m.const(-LN2_HIGH), x)
    r = m.fma(n, m.const(-LN2_LOW), r)
    p = m.add(m.fma(m.mul(r, r), _horner(m, r, EXP_Q), r), m.const(ONE))
    y = m.add_exponent(p, t)
    y = m.select(m.lt(x, m.const(EXP_LOW)), m.const(ZERO), y)
    y = m.select(m.lt(m.const(EXP_HIGH), x), m.const(INFINITY), y)
    return m.select(m.is_nan(x), m.const(QUIET_NAN), y)


def sigmoid(m, x):
    """1 / (1 + exp(-x))."""
    return m.div(m.const(ONE), m.add(m.const(ONE), exp(m, m.neg(x))))


def silu(m, x):
    """x / (1 + exp(-x))."""
    return m.div(x, m.add(m.const(ONE), exp(m, m.neg(x))))


def tanh(m, x):
    """Hyperbolic tangent, odd bit for bit."""
    a = m.abs(x)
    z = m.mul(x, x)
    small = m.fma(m.mul(a, z), _horner(m, z, TANH_P), a)
    e = exp(m, m.add(a, a))
    large = m.sub(m.const(ONE), m.div(m.const(TWO), m.add(e, m.const(ONE))))
    return m.copy_sign(m.select(m.lt(a, m.const(TANH_SPLIT)), small, large), x)


def softplus(m, x):
    """log(1 + exp(x))."""
    t = exp(m, m.neg(m.abs(x)))
    s = m.div(t, m.add(m.const(TWO), t))
    z = m.mul(s, s)
    log1p = m.fma(m.mul(s, z), _horner(m, z, LOG1P_P), m.add(s, s))
    return m.add(m.select(m.lt(m.const(ZERO), x), x, m.const(ZERO)), log1p)


def gelu_tanh(m, x):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the approximate GELU."""
    inner = m.fma(m.mul(x, x), m.const(GELU_CUBIC), m.const(ONE))
    doubled = m.mul(m.mul(x, m.const(GELU_SCALE)), inner)
    return m.div(x, m.add(m.const(ONE), exp(m, m.neg(doubled))))


def softcap(m, x, cap):
    """cap tanh(x / cap)."""
    return m.mul(cap, tanh(m, m.div(x, cap)))


FUNCTIONS = {f.__name__: f for f in (exp, sigmoid, silu, tanh, softplus, gelu_tanh)}
