"""SIMD building blocks of the CPU op set: 16-lane vectors as Numba values.

Numba has no vector type, and LLVM does not turn plain loops into ``vpdpbusd``. This module adds
the vector operations the kernels need as Numba intrinsics. Lanes are always 16 wide
(``<16 x float>``, ``<16 x i32>``): LLVM splits them where the machine is narrower, so one kernel
text serves every machine and the float order never changes.

Addresses are plain int64 values; loads and stores are unaligned. Float operations are IEEE and
never contracted: a fused multiply-add appears only where ``fma`` is written.
"""

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
V16F = ir.VectorType(F32, LANES)
V16I = ir.VectorType(I32, LANES)


class _Vector(types.Type):
    """Numba face of an LLVM vector; immutable, passed in registers."""

    def __init__(self, name, llvm_type):
        self.llvm_type = llvm_type
        super().__init__(name=name)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm_type)


f32x16 = _Vector("f32x16", V16F)
i32x16 = _Vector("i32x16", V16I)


def pointer(builder, address, llvm_type):
    """IR pointer to ``llvm_type`` at an int64 address value."""
    return builder.inttoptr(address, llvm_type.as_pointer())


def load(builder, address, llvm_type):
    """Unaligned load of ``llvm_type`` at an int64 address value."""
    instr = builder.load(pointer(builder, address, llvm_type))
    instr.align = 1
    return instr


def store(builder, value, address):
    """Unaligned store of ``value`` at an int64 address value."""
    instr = builder.store(value, pointer(builder, address, value.type))
    instr.align = 1
    return instr


def offset(builder, address, n_bytes):
    """``address + n_bytes`` for a Python int or an i64 value."""
    if isinstance(n_bytes, int):
        if n_bytes == 0:
            return address
        n_bytes = ir.Constant(I64, n_bytes)
    return builder.add(address, n_bytes)


def splat(builder, scalar, lanes=LANES):
    """Vector with every lane equal to ``scalar``."""
    vec_t = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vec_t, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vec_t, ir.Undefined), mask)


def const_splat(element_type, value, lanes):
    """Constant vector."""
    return ir.Constant(ir.VectorType(element_type, lanes), [value] * lanes)


def call_intrinsic(builder, name, result, args):
    """Call an LLVM intrinsic by its full name, declaring it on first use."""
    module = builder.module
    fnty = ir.FunctionType(result, [a.type for a in args])
    fn = module.globals.get(name)
    if fn is None:
        fn = ir.Function(module, fnty, name)
    return builder.call(fn, args)


def vector_fma(builder, x, y, z):
    """Lane-wise fused ``x * y + z``, one rounding."""
    return call_intrinsic(builder, "llvm.fma.v16f32", V16F, [x, y, z])


def _define(name, signature, emit):
    """Make a Numba intrinsic ``name`` from an IR emitter; keeps the definitions below one line."""

    def typed(typingctx, *args):
        def codegen(context, builder, sig, llargs):
            result = emit(builder, *llargs)
            return context.get_dummy_value() if result is None else result

        return signature, codegen

    n = len(signature.args)
    names = ", ".join(f"a{i}" for i in range(n))
    scope = {"typed": typed}
    exec(f"def {name}(typingctx{', ' if n else ''}{names}):\n    return typed(typingctx)", scope)
    fn = scope[name]
    fn.__module__ = __name__
    return intrinsic(fn)


_f, _i, _a = types.float32, types.int32, types.int64

# loads and stores of 16 lanes
load_f32 = _define("load_f32", f32x16(_a), lambda b, a: load(b, a, V16F))
load_i32 = _define("load_i32", i32x16(_a), lambda b, a: load(b, a, V16I))
store_f32 = _define("store_f32", types.none(_a, f32x16), lambda b, a, v: store(b, v, a) and None)
store_i32 = _define("store_i32", types.none(_a, i32x16), lambda b, a, v: store(b, v, a) and None)


def _load_f16(b, a):
    return b.fpext(b.bitcast(load(b, a, ir.VectorType(I16, LANES)),
                             ir.VectorType(ir.HalfType(), LANES)), V16F)


def _store_f16(b, a, v):
    half = b.fptrunc(v, ir.VectorType(ir.HalfType(), LANES))
    store(b, half, a)


load_f16 = _define("load_f16", f32x16(_a), _load_f16)
store_f16 = _define("store_f16", types.none(_a, f32x16), _store_f16)
load_bf16 = _define(
    "load_bf16", f32x16(_a),
    lambda b, a: b.bitcast(b.shl(b.zext(load(b, a, ir.VectorType(I16, LANES)), V16I),
                                 const_splat(I32, 16, LANES)), V16F))

# scalar memory access by address
peek_f32 = _define("peek_f32", _f(_a), lambda b, a: load(b, a, F32))
peek_i32 = _define("peek_i32", _i(_a), lambda b, a: load(b, a, I32))
peek_i64 = _define("peek_i64", _a(_a), lambda b, a: load(b, a, I64))
peek_u8 = _define("peek_u8", _i(_a), lambda b, a: b.zext(load(b, a, I8), I32))
peek_i8 = _define("peek_i8", _i(_a), lambda b, a: b.sext(load(b, a, I8), I32))
peek_u16 = _define("peek_u16", _i(_a), lambda b, a: b.zext(load(b, a, I16), I32))
peek_i16 = _define("peek_i16", _i(_a), lambda b, a: b.sext(load(b, a, I16), I32))
peek_f16 = _define("peek_f16", _f(_a),
                   lambda b, a: b.fpext(b.bitcast(load(b, a, I16), ir.HalfType()), F32))
peek_f64 = _define("peek_f64", types.float64(_a), lambda b, a: load(b, a, ir.DoubleType()))
# ask for a cache line; any address will do
prefetch = _define("prefetch", types.none(_a), lambda b, a: call_intrinsic(
    b, "llvm.prefetch.p0i8", ir.VoidType(),
    [b.inttoptr(a, ir.PointerType(I8)), *(ir.Constant(I32, n) for n in (0, 3, 1))]) and None)
poke_f32 = _define("poke_f32", types.none(_a, _f), lambda b, a, v: store(b, v, a) and None)
poke_i32 = _define("poke_i32", types.none(_a, _i), lambda b, a, v: store(b, v, a) and None)
poke_i64 = _define("poke_i64", types.none(_a, _a), lambda b, a, v: store(b, v, a) and None)
poke_i16 = _define("poke_i16", types.none(_a, _i),
                   lambda b, a, v: store(b, b.trunc(v, I16), a) and None)
poke_u8 = _define("poke_u8", types.none(_a, _i),
                  lambda b, a, v: store(b, b.trunc(v, I8), a) and None)
poke_f16 = _define("poke_f16", types.none(_a, _f),
                   lambda b, a, v: store(b, b.fptrunc(v, ir.HalfType()), a) and None)

# scalar arithmetic with stated rounding
fma = _define("fma", _f(_f, _f, _f), lambda b, x, y, z: b.fma(x, y, z))
bits_f32 = _define("bits_f32", _i(_f), lambda b, x: b.bitcast(x, I32))
f32_bits = _define("f32_bits", _f(_i), lambda b, x: b.bitcast(x, F32))
f32_from_i32 = _define("f32_from_i32", _f(_i), lambda b, x: b.sitofp(x, F32))
sqrt = _define("sqrt", _f(_f), lambda b, x: call_intrinsic(b, "llvm.sqrt.f32", F32, [x]))
rint = _define("rint", _f(_f), lambda b, x: call_intrinsic(b, "llvm.rint.f32", F32, [x]))
div = _define("div", _f(_f, _f), lambda b, x, y: b.fdiv(x, y))
i32_from_f32 = _define("i32_from_f32", _i(_f), lambda b, x: b.fptosi(x, I32))

# vector arithmetic
splat_f32 = _define("splat_f32", f32x16(_f), splat)
splat_i32 = _define("splat_i32", i32x16(_i), splat)
vadd = _define("vadd", f32x16(f32x16, f32x16), lambda b, x, y: b.fadd(x, y))
vsub = _define("vsub", f32x16(f32x16, f32x16), lambda b, x, y: b.fsub(x, y))
vmul = _define("vmul", f32x16(f32x16, f32x16), lambda b, x, y: b.fmul(x, y))
vdiv = _define("vdiv", f32x16(f32x16, f32x16), lambda b, x, y: b.fdiv(x, y))
vfma = _define("vfma", f32x16(f32x16, f32x16, f32x16), lambda b, x, y, z: vector_fma(b, x, y, z))
vneg = _define("vneg", f32x16(f32x16), lambda b, x: b.fneg(x))
vrint = _define("vrint", f32x16(f32x16),
                lambda b, x: call_intrinsic(b, "llvm.rint.v16f32", V16F, [x]))
viadd = _define("viadd", i32x16(i32x16, i32x16), lambda b, x, y: b.add(x, y))
visub = _define("visub", i32x16(i32x16, i32x16), lambda b, x, y: b.sub(x, y))
vimul = _define("vimul", i32x16(i32x16, i32x16), lambda b, x, y: b.mul(x, y))
viand = _define("viand", i32x16(i32x16, i32x16), lambda b, x, y: b.and_(x, y))
vior = _define("vior", i32x16(i32x16, i32x16), lambda b, x, y: b.or_(x, y))
vishl = _define("vishl", i32x16(i32x16, i32x16), lambda b, x, y: b.shl(x, y))
vishr = _define("vishr", i32x16(i32x16, i32x16), lambda b, x, y: b.lshr(x, y))
viashr = _define("viashr", i32x16(i32x16, i32x16), lambda b, x, y: b.ashr(x, y))
store_i8 = _define(
    "store_i8", types.none(_a, i32x16),
    lambda b, a, v: store(b, b.trunc(v, ir.VectorType(I8, LANES)), a) and None)
vf32_i32 = _define("vf32_i32", f32x16(i32x16), lambda b, x: b.sitofp(x, V16F))
vi32_f32 = _define("vi32_f32", i32x16(f32x16), lambda b, x: b.fptosi(x, V16I))
vbits_f32 = _define("vbits_f32", i32x16(f32x16), lambda b, x: b.bitcast(x, V16I))
vf32_bits = _define("vf32_bits", f32x16(i32x16), lambda b, x: b.bitcast(x, V16F))
vabs = _define("vabs", f32x16(f32x16),
               lambda b, x: call_intrinsic(b, "llvm.fabs.v16f32", V16F, [x]))
# x > y ? x : y per lane (a NaN in x gives y)
vmax = _define("vmax", f32x16(f32x16, f32x16),
               lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
vmin = _define("vmin", f32x16(f32x16, f32x16),
               lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
# lane-wise c > 0 ? x : y on a comparison x < y
vselect_lt = _define("vselect_lt", f32x16(f32x16, f32x16, f32x16, f32x16),
                     lambda b, p, q, x, y: b.select(b.fcmp_ordered("<", p, q), x, y))


def _lane(b, v, i):
    return b.extract_element(v, i)


vget = _define("vget", _f(f32x16, _i), _lane)
viget = _define("viget", _i(i32x16, _i), _lane)


def _tree(b, v, combine):
    """Halving tree over lanes: (l, l+8), (l, l+4), (l, l+2), (l, l+1)."""
    lanes = LANES
    while lanes > 1:
        half = lanes // 2
        undef = ir.Constant(v.type, ir.Undefined)
        low = b.shuffle_vector(v, undef, ir.Constant(ir.VectorType(I32, half), list(range(half))))
        high = b.shuffle_vector(
            v, undef, ir.Constant(ir.VectorType(I32, half), list(range(half, lanes))))
        v = combine(low, high)
        lanes = half
    return b.extract_element(v, ir.Constant(I32, 0))


vsum_tree = _define("vsum_tree", _f(f32x16), lambda b, v: _tree(b, v, b.fadd))
visum = _define("visum", _i(i32x16), lambda b, v: _tree(b, v, b.add))
vmax_tree = _define(
    "vmax_tree", _f(f32x16),
    lambda b, v: _tree(b, v, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y)))


def _fold(b, address, combine):
    """Lane i: all lanes of vector i of the 16 at ``address``, combined in any order."""
    vectors = [load(b, offset(b, address, 64 * i), V16I) for i in range(LANES)]
    even, odd = (ir.Constant(V16I, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    while len(vectors) > 1:  # neighbours of a pair of vectors side by side, in half as many
        vectors = [combine(b.shuffle_vector(x, y, even), b.shuffle_vector(x, y, odd))
                   for x, y in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def _larger(b):
    return lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)


def _even(b, v):
    undef = ir.Constant(v.type, ir.Undefined)
    return b.shuffle_vector(v, undef, ir.Constant(ir.VectorType(I32, 8), list(range(0, LANES, 2))))


# integer reductions of 16 vectors in memory at once, and what becomes of neighbouring lanes
vifold_sum = _define("vifold_sum", i32x16(_a), lambda b, a: _fold(b, a, b.add))
vifold_max = _define("vifold_max", i32x16(_a), lambda b, a: _fold(b, a, _larger(b)))
viswap = _define("viswap", i32x16(i32x16), lambda b, v: b.shuffle_vector(
    v, v, ir.Constant(V16I, [lane ^ 1 for lane in range(LANES)])))
store_i16 = _define(
    "store_i16", types.none(_a, i32x16),
    lambda b, a, v: store(b, b.trunc(v, ir.VectorType(I16, LANES)), a) and None)
store_even_i16 = _define(
    "store_even_i16", types.none(_a, i32x16),
    lambda b, a, v: store(b, b.trunc(_even(b, v), ir.VectorType(I16, 8)), a) and None)
store_even_i32 = _define(
    "store_even_i32", types.none(_a, i32x16), lambda b, a, v: store(b, _even(b, v), a) and None)

# comparisons and lane choice
vimax = _define("vimax", i32x16(i32x16, i32x16),
                lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y))
vimax_all = _define(
    "vimax_all", _i(i32x16),
    lambda b, v: _tree(b, v, lambda x, y: b.select(b.icmp_signed(">", x, y), x, y)))
# x > y ? i : j per lane (a NaN gives j)
vipick_gt = _define("vipick_gt", i32x16(f32x16, f32x16, i32x16, i32x16),
                    lambda b, x, y, i, j: b.select(b.fcmp_ordered(">", x, y), i, j))
# bit l is set where x > y in lane l
vmask_gt = _define(
    "vmask_gt", _i(f32x16, f32x16),
    lambda b, x, y: b.zext(b.bitcast(b.fcmp_ordered(">", x, y), I16), I32))
vlane_ids = _define("vlane_ids", i32x16(), lambda b: ir.Constant(V16I, list(range(LANES))))


def _keep_range(b, v, other, first, last):
    """Lanes first..last-1 of v, the other lanes of ``other``."""
    lane = ir.Constant(V16I, list(range(LANES)))
    inside = b.and_(b.icmp_signed(">=", lane, splat(b, first)),
                    b.icmp_signed("<", lane, splat(b, last)))
    return b.select(inside, v, other)


vkeep_range = _define("vkeep_range", f32x16(f32x16, f32x16, _i, _i), _keep_range)


def _shuffle(indices):
    mask = ir.Constant(ir.VectorType(I32, LANES), indices)
    return lambda b, x, y: b.shuffle_vector(x, y, mask)


_pairs = f32x16(f32x16, f32x16)
# elements 0, 2, .. and 1, 3, .. of 32 consecutive floats, and back
veven = _define("veven", _pairs, _shuffle(list(range(0, 32, 2))))
vodd = _define("vodd", _pairs, _shuffle(list(range(1, 32, 2))))
vzip_low = _define("vzip_low", _pairs, _shuffle([i // 2 + 16 * (i % 2) for i in range(16)]))
vzip_high = _define("vzip_high", _pairs, _shuffle([8 + i // 2 + 16 * (i % 2) for i in range(16)]))


def stack(n_bytes):
    """Intrinsic ``slot() -> address`` of ``n_bytes`` on the kernel's stack, 64-byte aligned."""

    def emit(b):
        from numba.core import cgutils

        slot = cgutils.alloca_once(b, I8, size=n_bytes)
        slot.align = 64
        return b.ptrtoint(slot, I64)

    return _define("slot", types.int64(), emit)
