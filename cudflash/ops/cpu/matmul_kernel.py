"""The packed matmul kernel: 16 weight rows as lanes, R activation rows at a time.

Order of the contract (docs/NUMERICS.md): per super-block exact int32, then one float multiply-add
(two with a minimum term); super-blocks of a slice in ascending order from zero; slices added in
ascending order from zero. Nothing here depends on M, R, the thread count or the instruction set.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu.dot import Unpacker, dot4, pack_pair, pair_dot
from cudflash.ops.cpu.formats import FORMATS

# Argument block of every matmul kernel, in order (int64 each; strides in bytes).
ARGS = ("out", "out_stride", "m", "n", "w", "tile_stride", "units", "slices",
        "q", "q_stride", "q_plane", "d", "d_stride", "a", "a_stride",
        "b", "b_stride", "b_plane", "c", "c_stride", "c_plane", "row_shares")


class TileType(types.Type):
    """R float vectors: the accumulators of R activation rows times 16 weight rows."""

    def __init__(self, rows):
        self.rows = rows
        super().__init__(name=f"tile{rows}")


@register_model(TileType)
class _TileModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(S.V16F, fe_type.rows))


def _unpack_tile(b, tile, rows):
    return [b.extract_value(tile, r) for r in range(rows)]


def _pack_tile(b, vectors):
    tile = ir.Constant(ir.ArrayType(S.V16F, len(vectors)), ir.Undefined)
    for r, v in enumerate(vectors):
        tile = b.insert_value(tile, v, r)
    return tile


def _intrinsic(n_args, signature, emit):
    names = ", ".join(f"a{i}" for i in range(n_args))

    def typed():
        def codegen(context, builder, sig, args):
            result = emit(builder, *args)
            return context.get_dummy_value() if result is None else result

        return signature, codegen

    scope = {"typed": typed}
    exec(f"def f(typingctx, {names}):\n    return typed()" if n_args else
         "def f(typingctx):\n    return typed()", scope)
    return intrinsic(scope["f"])


def tile_ops(rows):
    """``(zero, add, store, store_rows)`` intrinsics of an R-row tile."""
    tile = TileType(rows)
    zero_vector = S.const_splat(S.F32, 0.0, 16)
    zero = _intrinsic(0, tile(), lambda b: _pack_tile(b, [zero_vector] * rows))
    add = _intrinsic(2, tile(tile, tile), lambda b, x, y: _pack_tile(
        b, [b.fadd(p, q) for p, q in zip(_unpack_tile(b, x, rows), _unpack_tile(b, y, rows))]))

    def spill(b, x, address):
        for r, v in enumerate(_unpack_tile(b, x, rows)):
            S.store(b, v, S.offset(b, address, 64 * r))

    def rows_out(b, x, address, stride):
        for r, v in enumerate(_unpack_tile(b, x, rows)):
            S.store(b, v, _row(b, address, stride, r))

    store = _intrinsic(2, types.none(tile, types.int64), spill)
    store_rows = _intrinsic(3, types.none(tile, types.int64, types.int64), rows_out)
    return zero, add, store, store_rows


def _row(b, base, stride, r):
    return base if r == 0 else b.add(base, b.mul(stride, ir.Constant(S.I64, r)))


def _fence(b, unpacker, values):
    """Keep loads on their side of this place, and have ``values`` computed at it; returns them.

    The optimiser would load and unpack the codes of many sub-blocks first, and put off what can
    wait, far more of both than there are registers for.
    """
    unpacker.forget()
    nothing = ir.FunctionType(ir.VoidType(), [])
    b.call(ir.InlineAsm(nothing, "", "~{memory}", side_effect=True), [])
    if unpacker.isa != "avx512vnni":
        return values
    here = ir.InlineAsm(ir.FunctionType(S.V16I, [S.V16I]), "", "=v,0", side_effect=True)
    return [b.call(here, [value]) for value in values]


def _dots(b, isa, unpacker, fmt, x_rows, starts, finish):
    """Accumulate code-times-activation sums; call ``finish(sub, dots)`` as each sub-block ends.

    ``x_rows`` are addresses of int8 rows; ``starts(sub, i)`` is the first value of row i's sum.
    """
    wide = fmt.bias == 128
    steps_per_sub = fmt.sub // 4
    open_subs = {}
    for element, codes in unpacker.steps():
        sub = element // fmt.sub
        if sub not in open_subs:
            open_subs[sub] = [starts(sub, i) for i in range(len(x_rows))], 0
        sums, done = open_subs[sub]
        for i, row in enumerate(x_rows):
            x_word = S.load(b, S.offset(b, row, element), S.I32)
            sums[i] = dot4(b, isa, sums[i], codes, x_word, wide)
        if done + 1 == steps_per_sub:
            finish(sub, sums)
            del open_subs[sub]
        else:
            open_subs[sub] = sums, done + 1


def _x_rows(b, q, q_stride, rows):
    return [_row(b, q, q_stride, r) for r in range(rows)]


def _zero_i(*_):
    return S.const_splat(S.I32, 0, 16)


def q32_unit(name, rows, planes, isa):
    """Intrinsic: one 32-element block of a tile, R activation rows, into the accumulators.

    ``a`` holds -8 * sum(x) as int32 (start value of the dot product), ``b`` holds d * sum(x).
    """
    fmt = FORMATS[name]
    tile = TileType(rows)

    def emit(b, acc, w, q, q_stride, q_plane, d, d_stride, a, a_stride, xs, xs_stride,
             xs_plane, c, c_stride, c_plane):
        acc = _unpack_tile(b, acc, rows)
        unpacker = Unpacker(b, fmt, w, isa)

        def start(sub, r):
            if fmt.bias == 0 or r >= rows:  # the low term carries the bias
                return _zero_i()
            v = S.splat(b, S.load(b, _row(b, a, a_stride, r), S.I32))
            shift = (fmt.bias // 8).bit_length() - 1
            return b.shl(v, S.const_splat(S.I32, shift, 16)) if shift else v

        x_rows = _x_rows(b, q, q_stride, rows)
        if planes == 2:  # x = 256 * high + low; codes are unpacked once for both terms
            x_rows += _x_rows(b, b.add(q, q_plane), q_stride, rows)
        total = []
        _dots(b, isa, unpacker, fmt, x_rows, start, lambda sub, sums: total.extend(sums))
        if planes == 2:
            total = [b.add(b.shl(high, S.const_splat(S.I32, 8, 16)), low)
                     for low, high in zip(total[:rows], total[rows:])]
        scale = unpacker.f16("d")
        minimum = unpacker.f16("m") if fmt.has_min else None
        for r in range(rows):
            xd = S.splat(b, S.load(b, _row(b, d, d_stride, r), S.F32))
            acc[r] = S.vector_fma(b, b.sitofp(total[r], S.V16F), b.fmul(scale, xd), acc[r])
            if minimum is not None:
                x_sum = S.splat(b, S.load(b, _row(b, xs, xs_stride, r), S.F32))
                acc[r] = S.vector_fma(b, minimum, x_sum, acc[r])
        return _pack_tile(b, acc)

    return _intrinsic(15, tile(tile, *[types.int64] * 14), emit)


def q256_unit(name, rows, planes, isa):
    """Intrinsic: one super-block of a tile, R activation rows, into the accumulators.

    ``a`` holds the exponent of every 32 elements (int32), ``b`` and ``c`` the sums of x over
    every 16 and 32 elements, already shifted by the exponent (int16).
    """
    fmt = FORMATS[name]
    tile = TileType(rows)
    # One row has registers to spare, but for sixteen sub-blocks under AVX-512.
    crowded = rows > 1 or (fmt.sub == 16 and isa == "avx512vnni")
    by_word = not crowded or (isa == "avx512vnni" and rows <= 4)
    def row_sums(b, unpacker, starts, bases, q_stride, a, a_stride):
        """``start + sum of scale * (dot << exponent)`` per row of each plane in ``bases``, int32."""
        x_rows = [row for base in bases for row in _x_rows(b, base, q_stride, rows)]
        sums = list(starts)

        def finish(sub, dots):
            scale = unpacker.scale(sub)
            for i, dot in enumerate(dots):
                if planes == 1:
                    at = S.offset(b, _row(b, a, a_stride, i), 4 * (sub * fmt.sub // 32))
                    dot = b.shl(dot, S.splat(b, S.load(b, at, S.I32)))
                sums[i] = b.add(sums[i], b.mul(dot, scale))
            if crowded:
                sums[:] = _fence(b, unpacker, sums)

        _dots(b, isa, unpacker, fmt, x_rows, _zero_i, finish)
        return sums

    def weighted(b, weight, bases, stride):
        """Sum over sub-blocks of weight * sum(x) per row of each plane, int32; two at a time."""
        n = 256 // fmt.sub
        pairs = [pack_pair(b, weight(j), weight(j + 1)) for j in range(0, n, 2)]
        out = []
        for base in bases:
            for r in range(rows):
                total, row = None, _row(b, base, stride, r)
                for j, pair in enumerate(pairs):
                    term = pair_dot(b, isa, pair, S.load(b, S.offset(b, row, 4 * j), S.I32))
                    total = term if total is None else b.add(total, term)
                out.append(total)
        return out

    def to_float(b, values, r):
        """float(low), or float(high) * 256 + float(low) in one rounding after the conversions."""
        value = b.sitofp(values[r], S.V16F)
        if planes == 1:
            return value
        high = b.sitofp(values[rows + r], S.V16F)
        return S.vector_fma(b, high, S.const_splat(S.F32, 256.0, 16), value)

    def emit(b, acc, w, q, q_stride, q_plane, d, d_stride, a, a_stride, s16, s16_stride,
             s16_plane, s32, s32_stride, s32_plane):
        acc = _unpack_tile(b, acc, rows)
        unpacker = Unpacker(b, fmt, w, isa, by_word)
        base, stride, plane = (
            (s16, s16_stride, s16_plane) if fmt.sub == 16 else (s32, s32_stride, s32_plane))
        sums_at = [base] if planes == 1 else [base, b.add(base, plane)]
        bases = [q] if planes == 1 else [q, b.add(q, q_plane)]  # plane 0 is the low term
        starts = [_zero_i()] * (rows * planes)
        if fmt.bias:
            bias = S.const_splat(S.I32, -fmt.bias, 16)
            starts = [b.mul(off, bias) for off in weighted(b, unpacker.scale, sums_at, stride)]
            if crowded:
                starts = _fence(b, unpacker, starts)
        main = row_sums(b, unpacker, starts, bases, q_stride, a, a_stride)
        scale = unpacker.f16("d")
        factors = [S.splat(b, S.load(b, _row(b, d, d_stride, r), S.F32)) for r in range(rows)]
        for r, xd in enumerate(factors):
            acc[r] = S.vector_fma(b, to_float(b, main, r), b.fmul(scale, xd), acc[r])
        if fmt.has_min:
            low = weighted(b, unpacker.minimum, sums_at, stride)
            scale = unpacker.f16("dmin")
            for r, xd in enumerate(factors):
                value = b.fneg(to_float(b, low, r))
                acc[r] = S.vector_fma(b, value, b.fmul(scale, xd), acc[r])
        return _pack_tile(b, acc)

    return _intrinsic(15, tile(tile, *[types.int64] * 14), emit)


def f32_unit(name, rows, planes, isa):
    """Intrinsic: one element of a tile of float weights times R float activations."""
    tile = TileType(rows)

    def weights(b, w):
        if name == "F32":
            return S.load(b, w, S.V16F)
        raw = S.load(b, w, ir.VectorType(S.I16, 16))
        if name == "F16":
            return b.fpext(b.bitcast(raw, ir.VectorType(ir.HalfType(), 16)), S.V16F)
        wide = b.shl(b.zext(raw, S.V16I), S.const_splat(S.I32, 16, 16))
        return b.bitcast(wide, S.V16F)

    def emit(b, acc, w, q, q_stride, *unused):
        acc = _unpack_tile(b, acc, rows)
        v = weights(b, w)
        for r in range(rows):
            x = S.splat(b, S.load(b, _row(b, q, q_stride, r), S.F32))
            acc[r] = S.vector_fma(b, v, x, acc[r])
        return _pack_tile(b, acc)

    return _intrinsic(15, tile(tile, *[types.int64] * 14), emit)


# Tiles of at most this size are asked for one ahead: a draft's matrices are too short for the
# processor to notice where they lead.
_PREFETCHED_BYTES = 8 << 10
_UNITS = {"q32": q32_unit, "q256": q256_unit, "f32": f32_unit}
# Bytes that q, a, b and c advance per unit.
_STEPS = {"q32": (32, 4, 4, 0), "q256": (256, 32, 32, 16), "f32": (4, 0, 0, 0)}


def build(name, rows, planes, isa):
    """Python function of the matmul kernel of one format, row count, precision and ISA."""
    fmt = FORMATS[name]
    unit = _UNITS[fmt.layout](name, rows, planes, isa)
    zero, add, store, store_rows = tile_ops(rows)
    spill = _spill_address(rows)
    block_bytes = fmt.tile_block_bytes
    q_step, a_step, b_step, c_step = _STEPS[fmt.layout]
    d_step = 0 if fmt.layout == "f32" else 4

    def matmul(args, tid, n_threads):
        out, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        m, n = S.peek_i64(args + 16), S.peek_i64(args + 24)
        w, tile_stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        units, slices = S.peek_i64(args + 48), S.peek_i64(args + 56)
        q, q_stride, q_plane = (S.peek_i64(args + 64), S.peek_i64(args + 72),
                                S.peek_i64(args + 80))
        d, d_stride = S.peek_i64(args + 88), S.peek_i64(args + 96)
        a, a_stride = S.peek_i64(args + 104), S.peek_i64(args + 112)
        b, b_stride, b_plane = (S.peek_i64(args + 120), S.peek_i64(args + 128),
                                S.peek_i64(args + 136))
        c, c_stride, c_plane = (S.peek_i64(args + 144), S.peek_i64(args + 152),
                                S.peek_i64(args + 160))
        row_shares = S.peek_i64(args + 168)
        tiles = (n + 15) // 16
        first_tile, last_tile = tiles * tid // n_threads, tiles * (tid + 1) // n_threads
        first_row, last_row = np.int64(0), m
        if row_shares > 0 and row_shares % n_threads == 0:  # as ``program.Op.placed`` decides
            first_tile, last_tile = np.int64(0), tiles
            first_row, last_row = m * tid // n_threads, m * (tid + 1) // n_threads
        scratch = spill()
        for t in range(first_tile, last_tile):
            w_tile = w + t * tile_stride
            lanes = min(16, n - 16 * t)
            if rows > 1 and tile_stride <= _PREFETCHED_BYTES:
                for j in range(0, tile_stride, 64):
                    S.prefetch(w_tile + tile_stride + j)
            for m0 in range(first_row, last_row, rows):
                qr, dr = q + m0 * q_stride, d + m0 * d_stride
                ar, br, cr = a + m0 * a_stride, b + m0 * b_stride, c + m0 * c_stride
                total = zero()
                for s in range(slices):
                    acc = zero()
                    for u in range(units * s // slices, units * (s + 1) // slices):
                        acc = unit(acc, w_tile + u * block_bytes,
                                   qr + u * q_step, q_stride, q_plane, dr + u * d_step, d_stride,
                                   ar + u * a_step, a_stride, br + u * b_step, b_stride, b_plane,
                                   cr + u * c_step, c_stride, c_plane)
                    total = add(total, acc)
                if lanes == 16 and m - m0 >= rows:
                    store_rows(total, out + m0 * out_stride + 64 * t, out_stride)
                    continue
                store(total, scratch)
                for r in range(min(rows, m - m0)):
                    row = out + (m0 + r) * out_stride + 64 * t
                    if lanes == 16:
                        S.store_f32(row, S.load_f32(scratch + 64 * r))
                    else:
                        for i in range(lanes):
                            S.poke_f32(row + 4 * i, S.peek_f32(scratch + 64 * r + 4 * i))

    return matmul


def _spill_address(rows):
    """Intrinsic: address of a stack slot for one tile."""
    from numba.core import cgutils

    def emit(b):
        slot = cgutils.alloca_once(b, ir.ArrayType(S.V16F, rows))
        return b.ptrtoint(slot, S.I64)

    return _intrinsic(0, types.int64(), emit)
