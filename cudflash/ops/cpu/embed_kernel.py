"""Kernels that expand rows of a packed table, one per format.

Block layouts and float order: ggml ``ggml-common.h`` and ``ggml-quants.c``, written out in
``cudflash.quant``. A row is short against a forward pass, so these are plain scalar loops.
"""

import numpy as np

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu.formats import FORMATS, IQ4_VALUES

# IQ4 codes as bytes of two words, so that a kernel needs no table in memory.
_IQ4_WORDS = tuple(
    int.from_bytes(bytes(v & 255 for v in IQ4_VALUES[8 * i:8 * i + 8]), "little", signed=True)
    for i in (0, 1))


def _helpers():
    """Scalar helpers: integer code to float, IQ4 value, 6-bit scale and minimum."""
    from numba import njit

    low_word, high_word = (np.int64(word) for word in _IQ4_WORDS)

    @njit(inline="always")
    def iq4(code):
        word = low_word if code < 8 else high_word
        return S.f32_from_i32(np.int32((word << (56 - 8 * (np.int64(code) & 7))) >> 56))

    @njit(inline="always")
    def number(value):
        return S.f32_from_i32(np.int32(value))

    @njit(inline="always")
    def scale_min(b, j):
        """Sub-block j of the 12 packed bytes of Q4_K and Q5_K."""
        if j < 4:
            return S.peek_u8(b + j) & 63, S.peek_u8(b + j + 4) & 63
        top = S.peek_u8(b + j + 4)
        return ((top & 15) | (S.peek_u8(b + j - 4) >> 6 << 4),
                (top >> 4) | (S.peek_u8(b + j) >> 6 << 4))

    return iq4, number, scale_min


def _blocks32(name, scaled_store):
    """Block expanders of the 32-element formats: ``(block address, out, factor)``."""
    iq4, number, _ = _helpers()
    has_min = FORMATS[name].has_min
    five, iq = name.startswith("Q5"), name == "IQ4_NL"
    at_high = 4 if has_min else 2
    at_codes = at_high + (4 if five else 0)
    bias = 0 if has_min else 16 if five else 8

    def q8_0(w, out, factor):
        d = S.peek_f16(w)
        for e in range(32):
            scaled_store(out + 4 * e, number(S.peek_i8(w + 2 + e)) * d, factor)

    def nibbles(w, out, factor):
        d = S.peek_f16(w)
        for e in range(32):
            code = (S.peek_u8(w + at_codes + e % 16) >> (4 * (e // 16))) & 15
            if five:
                code |= ((S.peek_u8(w + at_high + e // 8) >> (e % 8)) & 1) << 4
            value = d * iq4(code) if iq else number(code - bias) * d
            if has_min:
                value = value + S.peek_f16(w + 2)
            scaled_store(out + 4 * e, value, factor)

    return q8_0 if name == "Q8_0" else nibbles


def _blocks256(name, scaled_store):
    """Block expanders of the 256-element formats: ``(block address, out, factor)``."""
    iq4, number, scale_min = _helpers()
    five = name == "Q5_K"
    at_codes = 48 if five else 16

    def q2_k(w, out, factor):
        d, dmin = S.peek_f16(w + 80), S.peek_f16(w + 82)
        for e in range(256):
            scales = S.peek_u8(w + e // 16)
            code = (S.peek_u8(w + 16 + e // 128 * 32 + e % 32) >> (2 * (e % 128 // 32))) & 3
            value = (d * number(scales & 15)) * number(code) - dmin * number(scales >> 4)
            scaled_store(out + 4 * e, value, factor)

    def q3_k(w, out, factor):
        d = S.peek_f16(w + 108)
        for g in range(16):
            low = (S.peek_u8(w + 96 + g % 8) >> (4 * (g // 8))) & 15
            high = (S.peek_u8(w + 104 + g % 4) >> (2 * (g // 4))) & 3
            dl = d * number((low | (high << 4)) - 32)
            h, s = g // 8, g % 8 // 2
            for i in range(16):
                at = g % 2 * 16 + i
                code = (S.peek_u8(w + 32 + 32 * h + at) >> (2 * s)) & 3
                if (S.peek_u8(w + at) >> (4 * h + s)) & 1 == 0:
                    code -= 4
                scaled_store(out + 4 * (16 * g + i), dl * number(code), factor)

    def q45_k(w, out, factor):
        d, dmin = S.peek_f16(w), S.peek_f16(w + 2)
        for j in range(8):
            scale, minimum = scale_min(w + 4, j)
            d1, m1 = d * number(scale), dmin * number(minimum)
            for i in range(32):
                code = (S.peek_u8(w + at_codes + 32 * (j // 2) + i) >> (4 * (j % 2))) & 15
                if five:
                    code |= ((S.peek_u8(w + 16 + i) >> j) & 1) << 4
                scaled_store(out + 4 * (32 * j + i), d1 * number(code) - m1, factor)

    def q6_k(w, out, factor):
        d = S.peek_f16(w + 208)
        for e in range(256):
            h, t, i = e // 128, e % 128 // 32, e % 32
            low = (S.peek_u8(w + 64 * h + i + 32 * (t & 1)) >> (4 * (t // 2))) & 15
            high = (S.peek_u8(w + 128 + 32 * h + i) >> (2 * t)) & 3
            value = (d * number(S.peek_i8(w + 192 + e // 16))) * number((low | (high << 4)) - 32)
            scaled_store(out + 4 * e, value, factor)

    def iq4_xs(w, out, factor):
        d, highs = S.peek_f16(w), S.peek_u16(w + 2)
        for j in range(8):
            low = (S.peek_u8(w + 4 + j // 2) >> (4 * (j % 2))) & 15
            dl = d * number((low | (((highs >> (2 * j)) & 3) << 4)) - 32)
            for i in range(32):
                code = (S.peek_u8(w + 8 + 16 * j + i % 16) >> (4 * (i // 16))) & 15
                scaled_store(out + 4 * (32 * j + i), dl * iq4(code), factor)

    return {"Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q45_k, "Q5_K": q45_k, "Q6_K": q6_k,
            "IQ4_XS": iq4_xs}[name]


def _floats(name, scaled_store):
    """Block expanders of the float formats, where a block is one element."""

    def f32(w, out, factor):
        scaled_store(out, S.peek_f32(w), factor)

    def f16(w, out, factor):
        scaled_store(out, S.peek_f16(w), factor)

    def bf16(w, out, factor):
        scaled_store(out, S.f32_bits(S.peek_u16(w) << 16), factor)

    return {"F32": f32, "F16": f16, "BF16": bf16}[name]


def build(name):
    """Python function of the kernel ``embed_<name>``.

    ``args`` is ``[out, out_stride, raw, raw_stride, n, blocks, ids, m, scale]``.
    """
    from numba import njit

    fmt = FORMATS[name]
    makers = {1: _floats, 32: _blocks32, 256: _blocks256}

    @njit(inline="always")
    def scaled_store(address, value, factor):
        S.poke_f32(address, value * factor)

    expand = njit(inline="always")(makers[fmt.block](name, scaled_store))
    block, block_bytes = fmt.block, fmt.block_bytes
    nan = np.float32(np.nan)

    def embed(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        raw, raw_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        n, blocks = S.peek_i64(args + 32), S.peek_i64(args + 40)
        ids, m = S.peek_i64(args + 48), S.peek_i64(args + 56)
        factor = np.float32(S.peek_f64(args + 64))
        for i in range(m * blocks * tid // n_threads, m * blocks * (tid + 1) // n_threads):
            r, u = i // blocks, i % blocks
            out = out0 + r * out_stride + 4 * block * u
            row = np.int64(S.peek_i32(ids + 4 * r))
            if row < 0 or row >= n:
                for e in range(block):
                    S.poke_f32(out + 4 * e, nan)
            else:
                expand(raw + row * raw_stride + block_bytes * u, out, factor)

    return embed
