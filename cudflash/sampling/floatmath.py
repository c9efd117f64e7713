"""The C library's float functions, bit for bit and on every platform.

llama.cpp's samplers call ``expf``, ``logf``, ``log2f`` and ``powf``; a draw or a cut can flip on the
last bit of one of them, and no standard fixes that bit. The results followed here are those of the
GNU C library (2.28 and later, x86-64 with fused multiply-add, which every CPU since 2013 has).

``expf`` and ``logf``, needed for whole arrays, are computed here with the GNU C library's published
method in float64, vectorised. That gives the same bits as libm for **every** float32 argument in
use: compared exhaustively, all 1,120,927,745 arguments from -104 to -0 of ``expf`` and all
2,139,095,039 positive finite ones of ``logf``, without one difference. A float64 ``exp`` or ``log``
rounded to float32 would not do: it differs for 416,909 arguments of ``logf``. NumPy's own float32
``exp`` is up to 2 units off and depends on the CPU.

``powf`` and ``log2f`` are needed for a few scalars per token and only by dynamic temperature and
mirostat: libm is called where the platform has one under a known name; elsewhere the float64
function is rounded to float32, which differs in about one result per million by one unit.

Source: the algorithms and the sixteen logf table entries are those of ARM's optimized-routines
(``math/expf.c``, ``math/logf_data.c``, MIT licence), which the GNU C library uses since 2.27.
"""

import math
import sys

import numpy as np

_INV_LN2_32 = float.fromhex("0x1.71547652b82fep+0") * 32
# note: libm forms r = fma(x, 32/ln2, -k). x has 24 bits, so a split of the constant into 29 + 24
# bits makes both partial products exact, and the sum below rounds once, as the fused form does.
_INV_HI = np.array([_INV_LN2_32]).view(np.uint64) & np.uint64(0xFFFFFFFFFF000000)
_INV_HI = float(_INV_HI.view(np.float64)[0])
_INV_LO = _INV_LN2_32 - _INV_HI
_SHIFT = float.fromhex("0x1.8p+52")
_EXP_C0 = float.fromhex("0x1.c6af84b912394p-5") / 32768
_EXP_C1 = float.fromhex("0x1.ebfce50fac4f3p-3") / 1024
_EXP_C2 = float.fromhex("0x1.62e42ff0c52d6p-1") / 32
_EXP_ZERO_BELOW = np.float32(float.fromhex("-0x1.9fe368p6"))  # ln(2**-150): the result rounds to 0
_CHUNK = 8192


def _exp_table() -> np.ndarray:
    """Bits of the double nearest to 2**(i/32), less i << 47, so that k << 47 can be added."""
    bits = []
    for i in range(32):
        root = 1 << (i + 32 * 60)
        for _ in range(5):
            root = math.isqrt(root)  # nested floors of square roots are the floor of the 32nd root
        exact = np.float64(root) * 2.0**-60
        bits.append(int(exact.view(np.uint64)) - (i << 47))
    return np.array(bits, np.int64)


_EXP_TABLE = _exp_table()


def _doubles(text) -> np.ndarray:
    return np.array([float.fromhex(word) for word in text.split()])


_LOG_INVC = _doubles("""
    0x1.661ec79f8f3bep+0 0x1.571ed4aaf883dp+0 0x1.49539f0f010bp+0  0x1.3c995b0b80385p+0
    0x1.30d190c8864a5p+0 0x1.25e227b0b8eap+0  0x1.1bb4a4a1a343fp+0 0x1.12358f08ae5bap+0
    0x1.0953f419900a7p+0 0x1p+0               0x1.e608cfd9a47acp-1 0x1.ca4b31f026aap-1
    0x1.b2036576afce6p-1 0x1.9c2d163a1aa2dp-1 0x1.886e6037841edp-1 0x1.767dcf5534862p-1
""")
_LOG_LOGC = _doubles("""
    -0x1.57bf7808caadep-2 -0x1.2bef0a7c06ddbp-2 -0x1.01eae7f513a67p-2 -0x1.b31d8a68224e9p-3
    -0x1.6574f0ac07758p-3 -0x1.1aa2bc79c81p-3   -0x1.a4e76ce8c0e5ep-4 -0x1.1973c5a611cccp-4
    -0x1.252f438e10c1ep-5  0x0p+0                0x1.aa5aa5df25984p-5  0x1.c5e53aa362eb4p-4
     0x1.526e57720db08p-3  0x1.bc2860d22477p-3   0x1.1058bc8a07ee1p-2  0x1.4043057b6ee09p-2
""")
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_LOG_A0 = float.fromhex("-0x1.00ea348b88334p-2")
_LOG_A1 = float.fromhex("0x1.5575b0be00b6ap-2")
_LOG_A2 = float.fromhex("-0x1.ffffef20a4123p-2")


def expf(x: np.ndarray) -> np.ndarray:
    """Return ``exp(x)`` as libm's ``expf`` rounds it, for x <= 0.

    Parameters
    ----------
    x : ndarray of shape (n,), float32
        Arguments <= 0, -inf included. (A softmax never has others.)

    Returns
    -------
    ndarray of shape (n,), float32
    """
    if len(x) > _CHUNK:  # temporaries that stay in the cache: four times faster
        return np.concatenate([expf(x[i : i + _CHUNK]) for i in range(0, len(x), _CHUNK)])
    tiny = x < _EXP_ZERO_BELOW
    wide = np.maximum(x, _EXP_ZERO_BELOW).astype(np.float64)
    k = wide * _INV_LN2_32
    k += _SHIFT
    index = k.view(np.int64)
    scale = _EXP_TABLE.take(index & 31)
    scale += index << 47
    k -= _SHIFT
    r = wide * _INV_HI
    r -= k
    wide *= _INV_LO
    r += wide
    high = r * _EXP_C0
    high += _EXP_C1
    high *= r * r
    r *= _EXP_C2
    r += 1.0
    r += high
    r *= scale.view(np.float64)
    out = r.astype(np.float32)
    out[tiny] = 0
    return out


def logf(x: np.ndarray) -> np.ndarray:
    """Return ``log(x)`` as libm's ``logf`` rounds it, for x >= 0; log(0) is -inf.

    Parameters
    ----------
    x : ndarray of shape (n,), float32
        Finite, not negative.

    Returns
    -------
    ndarray of shape (n,), float32
    """
    if len(x) > _CHUNK:
        return np.concatenate([logf(x[i : i + _CHUNK]) for i in range(0, len(x), _CHUNK)])
    bits = x.view(np.int32)
    small = bits < 0x00800000  # zero or subnormal
    if small.any():
        scaled = np.where(small, x, np.float32(0)) * np.float32(2.0**23)
        scaled = scaled.view(np.int32) - (23 << 23)
        bits = np.where(small, scaled, bits)
    offset = bits - 0x3F330000
    index = (offset >> 19) & 15
    k = (offset >> 23).astype(np.float64)
    z = (bits - (offset & -0x800000)).view(np.float32).astype(np.float64)
    r = z * _LOG_INVC.take(index) - 1
    y0 = _LOG_LOGC.take(index) + k * _LN2
    r2 = r * r
    y = _LOG_A0 * r2 + (_LOG_A1 * r + _LOG_A2)
    y = y * r2 + (y0 + r)
    out = y.astype(np.float32)
    out[x == 0] = -np.inf
    return out


def _load_libm():
    if not sys.platform.startswith("linux"):
        return None
    import ctypes  # here: few chains need it, and every start of the program pays for imports
    import ctypes.util

    try:
        library = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
        functions = library.powf, library.log2f
    except (OSError, AttributeError):
        return None
    functions[0].argtypes = [ctypes.c_float, ctypes.c_float]
    functions[1].argtypes = [ctypes.c_float]
    for function in functions:
        function.restype = ctypes.c_float
    return functions


_libm = None  # (powf, log2f) or False; looked up on first use, only two samplers need it


def _scalar(which: int):
    global _libm
    if _libm is None:
        _libm = _load_libm() or False
    return _libm[which] if _libm else None


def powf(base: np.float32, exponent: np.float32) -> np.float32:
    """Return ``powf(base, exponent)``."""
    function = _scalar(0)
    if function is not None:
        return np.float32(function(float(base), float(exponent)))
    with np.errstate(all="ignore"):
        return np.float32(np.float64(base) ** np.float64(exponent))


def log2f(x: np.float32) -> np.float32:
    """Return ``log2f(x)`` for x >= 0."""
    function = _scalar(1)
    if function is not None:
        return np.float32(function(float(x)))
    return np.float32(math.log2(x)) if x > 0 else np.float32(-np.inf)
