"""The special functions as Numba intrinsics: ``exp`` on a float, ``vexp`` on 16 lanes, and so on.

Both come from the one formula in ``special.py``, so a lane and a float have the same bits.
"""

from llvmlite import ir

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu import special


class Arithmetic:
    """The operations of ``special.py`` as LLVM instructions on ``float`` or ``<16 x float>``."""

    def __init__(self, builder, llvm_type):
        self._b = builder
        self._float = llvm_type
        vector = isinstance(llvm_type, ir.VectorType)
        self._int = S.V16I if vector else S.I32
        self._suffix = "v16f32" if vector else "f32"

    def const(self, value):
        """A float32 constant in every lane."""
        return self._splat(self._float, ir.Constant(S.F32, float(value)))

    def _splat(self, type_, constant):
        if not isinstance(type_, ir.VectorType):
            return constant
        return ir.Constant(type_, [constant] * type_.count)

    def _int_const(self, value):
        return self._splat(self._int, ir.Constant(S.I32, value))

    def _bits(self, x):
        return self._b.bitcast(x, self._int)

    def add(self, x, y):
        """x + y, rounded."""
        return self._b.fadd(x, y)

    def sub(self, x, y):
        """x - y, rounded."""
        return self._b.fsub(x, y)

    def mul(self, x, y):
        """x * y, rounded."""
        return self._b.fmul(x, y)

    def div(self, x, y):
        """x / y, rounded."""
        return self._b.fdiv(x, y)

    def neg(self, x):
        """-x."""
        return self._b.fneg(x)

    def fma(self, x, y, z):
        """x * y + z, rounded once."""
        return S.call_intrinsic(self._b, f"llvm.fma.{self._suffix}", self._float, [x, y, z])

    def abs(self, x):
        """Magnitude."""
        return S.call_intrinsic(self._b, f"llvm.fabs.{self._suffix}", self._float, [x])

    def copy_sign(self, x, y):
        """x >= 0 with the sign bit of y."""
        sign = self._b.and_(self._bits(y), self._int_const(-0x80000000))
        return self._b.bitcast(self._b.or_(self._bits(x), sign), self._float)

    def lt(self, x, y):
        """Mask of x < y; false for a NaN."""
        return self._b.fcmp_ordered("<", x, y)

    def is_nan(self, x):
        """Mask of NaNs."""
        return self._b.fcmp_unordered("uno", x, x)

    def select(self, mask, x, y):
        """mask ? x : y."""
        return self._b.select(mask, x, y)

    def add_exponent(self, p, t):
        """p times 2 to the integer in the low bits of t, for a normal result."""
        n = self._b.shl(self._bits(t), self._int_const(23))
        return self._b.bitcast(self._b.add(self._bits(p), n), self._float)


def _scalar(name, formula):
    return S._define(name, S._f(S._f), lambda b, x: formula(Arithmetic(b, S.F32), x))


def _vector(name, formula):
    return S._define(name, S.f32x16(S.f32x16), lambda b, x: formula(Arithmetic(b, S.V16F), x))


exp, vexp = _scalar("exp", special.exp), _vector("vexp", special.exp)
sigmoid, vsigmoid = _scalar("sigmoid", special.sigmoid), _vector("vsigmoid", special.sigmoid)
silu, vsilu = _scalar("silu", special.silu), _vector("vsilu", special.silu)
tanh, vtanh = _scalar("tanh", special.tanh), _vector("vtanh", special.tanh)
softplus, vsoftplus = _scalar("softplus", special.softplus), _vector("vsoftplus", special.softplus)
gelu_tanh = _scalar("gelu_tanh", special.gelu_tanh)
vgelu_tanh = _vector("vgelu_tanh", special.gelu_tanh)
softcap = S._define("softcap", S._f(S._f, S._f),
                    lambda b, x, cap: special.softcap(Arithmetic(b, S.F32), x, cap))
vsoftcap = S._define("vsoftcap", S.f32x16(S.f32x16, S.f32x16),
                     lambda b, x, cap: special.softcap(Arithmetic(b, S.V16F), x, cap))
