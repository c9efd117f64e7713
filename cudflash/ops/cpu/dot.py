"""IR emitters for the integer half of a packed matmul: unpack codes, take exact dot products.

One *unit* is one block of a tile: 16 weight rows (the lanes) times 32 or 256 elements, for R
activation rows at once. Everything up to the conversion to float is int32 arithmetic, so the
instruction set cannot change a bit:

avx512vnni   ``vpdpbusd``: four unsigned codes times four int8 per lane and instruction
avx2         ``vpmaddubsw`` + ``vpmaddwd``; codes wider than 7 bits are cut in two nibbles first,
             because the int16 step saturates
generic      sign- and zero-extended int32 products, plain LLVM vector code
"""

from llvmlite import ir

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu.formats import IQ4_VALUES

V64B = ir.VectorType(S.I8, 64)
V32H = ir.VectorType(S.I16, 32)
UNDEF = ir.Undefined


def _bytes(value):
    return S.const_splat(S.I8, value, 64)


def _shr8(b, v, n):
    """Logical right shift of every byte by a constant; callers mask what leaks in."""
    if n == 0:
        return v
    wide = b.lshr(b.bitcast(v, V32H), S.const_splat(S.I16, n, 32))
    return b.bitcast(wide, V64B)


def _part(b, v, lanes, index):
    """Contiguous part ``index`` of ``lanes`` elements."""
    mask = ir.Constant(ir.VectorType(S.I32, lanes), list(range(index * lanes, (index + 1) * lanes)))
    return b.shuffle_vector(v, ir.Constant(v.type, UNDEF), mask)


def _join(b, low, high):
    n = low.type.count
    mask = ir.Constant(ir.VectorType(S.I32, 2 * n), list(range(2 * n)))
    return b.shuffle_vector(low, high, mask)


class Unpacker:
    """Codes of one block of a tile, as vectors of 64 unsigned bytes (16 rows x 4 elements).

    ``by_word`` unpacks all of a word while it is in a register, which keeps the sums of two
    sub-blocks open.
    """

    def __init__(self, builder, fmt, address, isa, by_word=False):
        self.b, self.fmt, self.address, self.isa = builder, fmt, address, isa
        self.by_word = by_word
        self._cache = {}

    def word(self, field, index):
        """Word ``index`` of a 4-byte field for the 16 rows, as i32x16."""
        key = field, index
        if key not in self._cache:
            at = self.fmt.field_offset(field) + 64 * index
            self._cache[key] = S.load(self.b, S.offset(self.b, self.address, at), S.V16I)
        return self._cache[key]

    def bytes_of(self, field, index):
        """The same word as 64 bytes."""
        return self.b.bitcast(self.word(field, index), V64B)

    def half(self, field):
        """A 2-byte field for the 16 rows, as u16x16."""
        at = self.fmt.field_offset(field)
        return S.load(self.b, S.offset(self.b, self.address, at), ir.VectorType(S.I16, 16))

    def f16(self, field):
        """A half-precision field for the 16 rows, as f32x16."""
        v = self.b.bitcast(self.half(field), ir.VectorType(ir.HalfType(), 16))
        return self.b.fpext(v, S.V16F)

    def _nibble(self, field, index, high):
        v = self.bytes_of(field, index)
        return self.b.and_(_shr8(self.b, v, 4 if high else 0), _bytes(15))

    def _bits(self, field, index, shift, mask, up):
        """``((byte >> shift) & mask) << up`` for every byte."""
        b = self.b
        v = self.bytes_of(field, index)
        if shift > up:
            v = _shr8(b, v, shift - up)
        elif up > shift:
            wide = b.shl(b.bitcast(v, V32H), S.const_splat(S.I16, up - shift, 32))
            v = b.bitcast(wide, V64B)
        return b.and_(v, _bytes(mask << up))

    def _iq4(self, codes):
        """Values of non-linear codes plus 128."""
        b, table = self.b, [v + 128 for v in IQ4_VALUES]
        if self.isa == "generic":
            out = _bytes(table[0])
            for i, value in enumerate(table[1:], 1):
                hit = b.icmp_unsigned("==", codes, _bytes(i))
                out = b.select(hit, _bytes(value), out)
            return out
        lookup = ir.Constant(V64B, table * 4)
        if self.isa == "avx512vnni":
            return S.call_intrinsic(b, "llvm.x86.avx512.pshuf.b.512", V64B, [lookup, codes])
        halves = [
            S.call_intrinsic(b, "llvm.x86.avx2.pshuf.b", ir.VectorType(S.I8, 32),
                             [_part(b, lookup, 32, i), _part(b, codes, 32, i)]) for i in (0, 1)]
        return _join(b, *halves)

    def steps(self):
        """Yield ``(first element, codes)``: 64 / 4 or 256 / 4 steps in a register-friendly order."""
        yield from getattr(self, "_steps_" + self.fmt.name.lower())()

    def _halves(self, n):
        """``(high, index)`` of n words of two nibbles: sub-block by sub-block, or word by word."""
        if self.by_word:
            return [(high, j) for j in range(n) for high in (0, 1)]
        return [(high, j) for high in (0, 1) for j in range(n)]

    def _steps_q4_0(self):
        for j in range(4):
            yield 4 * j, self._nibble("qs", j, False)
            yield 16 + 4 * j, self._nibble("qs", j, True)

    _steps_q4_1 = _steps_q4_0

    def _steps_q5_0(self):
        for j in range(4):
            for high in (0, 1):
                fifth = self._bits("qh", 0, j + 4 * high, 1, 4)
                yield 16 * high + 4 * j, self.b.or_(self._nibble("qs", j, high), fifth)

    _steps_q5_1 = _steps_q5_0

    def _steps_q8_0(self):
        for j in range(8):
            yield 4 * j, self.b.xor(self.bytes_of("qs", j), _bytes(128))

    def _steps_iq4_nl(self):
        for j in range(4):
            yield 4 * j, self._iq4(self._nibble("qs", j, False))
            yield 16 + 4 * j, self._iq4(self._nibble("qs", j, True))

    def _steps_q4_k(self):
        for c in range(4):
            for high, j in self._halves(8):
                yield 64 * c + 32 * high + 4 * j, self._nibble("qs", 8 * c + j, high)

    def _steps_q5_k(self):
        for c in range(4):
            for high, j in self._halves(8):
                fifth = self._bits("qh", j, 2 * c + high, 1, 4)
                yield (64 * c + 32 * high + 4 * j,
                       self.b.or_(self._nibble("qs", 8 * c + j, high), fifth))

    def _steps_q6_k(self):
        for h in range(2):
            for t in range(4):
                for j in range(8):
                    low = self._nibble("ql", 16 * h + 8 * (t & 1) + j, t >= 2)
                    top = self._bits("qh", 8 * h + j, 2 * t, 3, 4)
                    yield 128 * h + 32 * t + 4 * j, self.b.or_(low, top)

    def _steps_q2_k(self):
        for h in range(2):
            for s in range(4):
                for j in range(8):
                    yield 128 * h + 32 * s + 4 * j, self._bits("qs", 8 * h + j, 2 * s, 3, 0)

    def _steps_q3_k(self):
        for h in range(2):
            for s in range(4):
                for j in range(8):
                    low = self._bits("qs", 8 * h + j, 2 * s, 3, 0)
                    top = self._bits("hmask", j, 4 * h + s, 1, 2)
                    yield 128 * h + 32 * s + 4 * j, self.b.or_(low, top)

    def _steps_iq4_xs(self):
        for ib in range(8):
            for high, j in self._halves(4):
                yield (32 * ib + 16 * high + 4 * j,
                       self._iq4(self._nibble("qs", 4 * ib + j, high)))

    # Integer scales of a super-block, as i32x16, made where they are used: a list of them would
    # not stay in registers.

    def forget(self):
        """Load words anew from here on: none of them stays in a register for a later use."""
        self._cache.clear()

    def _byte(self, field, j, shift=0, mask=255):
        """``(byte j of the field >> shift) & mask`` as i32x16."""
        b = self.b
        v = self.word(field, j // 4)
        n = 8 * (j % 4) + shift
        if n:
            v = b.lshr(v, S.const_splat(S.I32, n, 16))
        return b.and_(v, S.const_splat(S.I32, mask, 16))

    def _up(self, v, n):
        return self.b.shl(v, S.const_splat(S.I32, n, 16))

    def _minus_32(self, v):
        return self.b.sub(v, S.const_splat(S.I32, 32, 16))

    def scale(self, j):
        """Factor of sub-block ``j`` of a q256 block."""
        return getattr(self, "_scale_" + self.fmt.name.lower())(j)

    def minimum(self, j):
        """Minimum of sub-block ``j``, of a format that has one."""
        return getattr(self, "_minimum_" + self.fmt.name.lower())(j)

    def _scale_q4_k(self, j):
        if j < 4:
            return self._byte("scales", j, 0, 63)
        return self.b.or_(self._byte("scales", j + 4, 0, 15),
                          self._up(self._byte("scales", j - 4, 6, 3), 4))

    def _minimum_q4_k(self, j):
        if j < 4:
            return self._byte("scales", j + 4, 0, 63)
        return self.b.or_(self._byte("scales", j + 4, 4, 15),
                          self._up(self._byte("scales", j, 6, 3), 4))

    _scale_q5_k, _minimum_q5_k = _scale_q4_k, _minimum_q4_k

    def _scale_q6_k(self, j):
        v = self._up(self.word("scales", j // 4), 24 - 8 * (j % 4))
        return self.b.ashr(v, S.const_splat(S.I32, 24, 16))

    def _scale_q2_k(self, j):
        return self._byte("scales", j, 0, 15)

    def _minimum_q2_k(self, j):
        return self._byte("scales", j, 4, 15)

    def _scale_q3_k(self, j):
        low = self._byte("scales", j % 8, 0 if j < 8 else 4, 15)
        high = self._byte("scales", 8 + j % 4, 2 * (j // 4), 3)
        return self._minus_32(self.b.or_(low, self._up(high, 4)))

    def _scale_iq4_xs(self, j):
        b = self.b
        low = self._byte("scales_l", j // 2, 4 * (j % 2), 15)
        high = b.lshr(b.zext(self.half("scales_h"), S.V16I), S.const_splat(S.I32, 2 * j, 16))
        return self._minus_32(b.or_(low, self._up(b.and_(high, S.const_splat(S.I32, 3, 16)), 4)))


def dot4(b, isa, acc, codes, x_word, wide):
    """``acc[lane] += sum_i codes[4 lane + i] * x[i]`` with unsigned codes and four int8 of x.

    ``x_word`` is the i32 that holds the four activations; ``wide`` tells that codes use 8 bits.
    """
    if isa == "avx512vnni":
        return _vpdpbusd(b, acc, codes, S.splat(b, x_word))
    if isa == "avx2":
        return _dot4_avx2(b, acc, codes, S.splat(b, x_word, 8), wide)
    x4 = b.bitcast(x_word, ir.VectorType(S.I8, 4))
    for i in range(4):
        lane = ir.Constant(ir.VectorType(S.I32, 16), list(range(i, 64, 4)))
        w = b.zext(b.shuffle_vector(codes, ir.Constant(V64B, UNDEF), lane), S.V16I)
        x = b.sext(b.extract_element(x4, ir.Constant(S.I32, i)), S.I32)
        acc = b.add(acc, b.mul(w, S.splat(b, x)))
    return acc


def _vpdpbusd(b, acc, codes, x):
    return S.call_intrinsic(b, "llvm.x86.avx512.vpdpbusd.512", S.V16I,
                            [acc, codes, b.bitcast(x, V64B)])


def _dot4_avx2(b, acc, codes, x, wide):
    x = b.bitcast(x, ir.VectorType(S.I8, 32))
    halves = []
    for i in (0, 1):
        w = _part(b, codes, 32, i)
        if wide:
            nibble = S.const_splat(S.I8, 15, 32)
            low = _madd(b, b.and_(w, nibble), x)
            shifted = b.bitcast(b.lshr(b.bitcast(w, ir.VectorType(S.I16, 16)),
                                       S.const_splat(S.I16, 4, 16)), w.type)
            high = _madd(b, b.and_(shifted, nibble), x)
            halves.append(b.add(low, b.shl(high, S.const_splat(S.I32, 4, 8))))
        else:
            halves.append(_madd(b, w, x))
    return b.add(acc, _join(b, *halves))


def _madd(b, codes, x):
    pairs = S.call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(S.I16, 16), [codes, x])
    ones = S.const_splat(S.I16, 1, 16)
    return S.call_intrinsic(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(S.I32, 8), [pairs, ones])


def pair_dot(b, isa, pair, x_pair):
    """The same with the weights already packed two to a lane."""
    x = S.splat(b, x_pair)
    if isa == "avx512vnni":
        return S.call_intrinsic(b, "llvm.x86.avx512.pmaddw.d.512", S.V16I,
                                [b.bitcast(pair, V32H), b.bitcast(x, V32H)])
    sixteen = S.const_splat(S.I32, 16, 16)
    terms = []
    for shift_first in (True, False):
        w = b.ashr(b.shl(pair, sixteen), sixteen) if shift_first else b.ashr(pair, sixteen)
        v = b.ashr(b.shl(x, sixteen), sixteen) if shift_first else b.ashr(x, sixteen)
        terms.append(b.mul(w, v))
    return b.add(*terms)


def pack_pair(b, low, high):
    """Two int16 values per lane in one i32."""
    return b.or_(b.and_(low, S.const_splat(S.I32, 0xFFFF, 16)),
                 b.shl(high, S.const_splat(S.I32, 16, 16)))
