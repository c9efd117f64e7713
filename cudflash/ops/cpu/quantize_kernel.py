"""Kernel that turns float rows into int8 rows with scales, exponents and sums."""

import numpy as np

from cudflash.ops.cpu import simd as S

# Below this a group counts as zero: 127 / amax would leave the float range.
TINY = np.float32(1e-30)


def build(layout, planes):
    """Python function of the kernel ``quantize_<layout>_<activations>``.

    ``args`` is ``[x, x_stride, m, k, q, q_stride, q_plane, d, d_stride, a, a_stride,
    b, b_stride, b_plane, c, c_stride, c_plane]``.
    """
    return (_build_q32 if layout == "q32" else _build_q256)(planes == 2)


def _limit(two_terms):
    """The largest magnitude: 127, or 127 * 256 so that the high term stays in int8."""
    return np.float32(32512.0 if two_terms else 127.0)


def _scale_functions():
    """Compiled helpers: largest magnitude of some floats; scale of codes from it."""
    from numba import njit

    f32 = np.float32

    @njit(inline="always")
    def largest(x, n):
        """Largest magnitude of ``n`` floats, n a multiple of 16; a NaN beats infinity."""
        top = S.splat_i32(0)
        for i in range(0, n, 16):
            top = S.vimax(S.vbits_f32(S.vabs(S.load_f32(x + 4 * i))), top)
        return S.f32_bits(S.vimax_all(top))

    @njit(inline="always")
    def scale_of(top, finest):
        """Scale and its inverse; an inverse of 0 makes all codes 0, a scale of NaN the result."""
        if top < TINY:
            return f32(0.0), f32(0.0)
        if top < f32(np.inf):
            return S.div(top, finest), S.div(finest, top)
        return f32(np.nan), f32(0.0)

    return largest, scale_of


def _codes_function(two_terms):
    """Compiled helper: codes of 16 values."""
    from numba import njit

    f32 = np.float32

    @njit(inline="always")
    def put16(x, inverse, q, q_plane):
        """Store the codes of 16 values; returns plane 0, and plane 1 or zeros, as int32."""
        codes = high = S.splat_i32(0)
        if inverse > f32(0.0):
            codes = S.vi32_f32(S.vrint(S.vmul(S.load_f32(x), S.splat_f32(inverse))))
        if two_terms:
            high = S.viashr(S.viadd(codes, S.splat_i32(128)), S.splat_i32(8))
            codes = S.visub(codes, S.vishl(high, S.splat_i32(8)))
            S.store_i8(q + q_plane, high)
        S.store_i8(q, codes)
        return codes, high

    return put16


def _build_q32(two_terms):
    largest, scale_of = _scale_functions()
    put16, limit = _codes_function(two_terms), _limit(two_terms)

    def quantize_q32(args, tid, n_threads):
        x0, x_stride, m, k = (S.peek_i64(args), S.peek_i64(args + 8), S.peek_i64(args + 16),
                              S.peek_i64(args + 24))
        q0, q_stride, q_plane = (S.peek_i64(args + 32), S.peek_i64(args + 40),
                                 S.peek_i64(args + 48))
        d0, d_stride = S.peek_i64(args + 56), S.peek_i64(args + 64)
        a0, a_stride = S.peek_i64(args + 72), S.peek_i64(args + 80)
        b0, b_stride = S.peek_i64(args + 88), S.peek_i64(args + 96)
        units = k // 32
        for i in range(m * units * tid // n_threads, m * units * (tid + 1) // n_threads):
            r, u = i // units, i % units
            x = x0 + r * x_stride + 128 * u
            q = q0 + r * q_stride + 32 * u
            d, inverse = scale_of(largest(x, 32), limit)
            low0, high0 = put16(x, inverse, q, q_plane)
            low1, high1 = put16(x + 64, inverse, q + 16, q_plane)
            total = S.visum(S.viadd(low0, low1)) + 256 * S.visum(S.viadd(high0, high1))
            S.poke_f32(d0 + r * d_stride + 4 * u, d)
            S.poke_i32(a0 + r * a_stride + 4 * u, -8 * total)
            S.poke_f32(b0 + r * b_stride + 4 * u, d * S.f32_from_i32(total))

    return quantize_q32


def _q256_functions(two_terms):
    """Compiled helpers: exponents of the parts of 256 values; sums of their codes."""
    from numba import njit

    f32 = np.float32
    largest, _ = _scale_functions()

    @njit(inline="always")
    def scale_256(x, scratch):
        """(largest magnitude, exponent and factor 2^-exponent of every 16 values, in pairs)."""
        if two_terms:
            return largest(x, 256), S.splat_i32(0), S.splat_f32(f32(1.0))
        for i in range(16):
            S.store_i32(scratch + 64 * i, S.vbits_f32(S.vabs(S.load_f32(x + 64 * i))))
        parts = S.vifold_max(scratch)
        parts = S.vimax(parts, S.viswap(parts))
        top = S.f32_bits(S.vimax_all(parts))
        part, zero, one = S.vf32_bits(parts), S.splat_i32(0), S.splat_i32(1)
        exponents = S.vipick_gt(part, S.splat_f32(top * f32(0.5)), one, zero)
        exponents = S.viadd(exponents, S.vipick_gt(part, S.splat_f32(top * f32(0.25)), one, zero))
        exponents = S.viadd(exponents, S.vipick_gt(part, S.splat_f32(top * f32(0.125)), one, zero))
        # 2^-e by its bits
        steps = S.vf32_bits(S.vishl(S.visub(S.splat_i32(127), exponents), S.splat_i32(23)))
        return top, exponents, steps

    @njit(inline="always")
    def put_sums(b, c, codes, exponents):
        """Sums over 16 and 32 codes, shifted by the exponents."""
        sums = S.vifold_sum(codes)
        S.store_i16(b, S.vishl(sums, exponents))
        S.store_even_i16(c, S.vishl(S.viadd(sums, S.viswap(sums)), exponents))

    return scale_256, put_sums


def _build_q256(two_terms):
    _, scale_of = _scale_functions()
    scale_256, put_sums = _q256_functions(two_terms)
    put16 = _codes_function(two_terms)
    finest = _limit(two_terms) if two_terms else np.float32(1016.0)  # 127 * 2^3
    slot, high_slot, factor_slot = S.stack(1024), S.stack(1024), S.stack(64)

    def quantize_q256(args, tid, n_threads):
        x0, x_stride, m, k = (S.peek_i64(args), S.peek_i64(args + 8), S.peek_i64(args + 16),
                              S.peek_i64(args + 24))
        q0, q_stride, q_plane = (S.peek_i64(args + 32), S.peek_i64(args + 40),
                                 S.peek_i64(args + 48))
        d0, d_stride = S.peek_i64(args + 56), S.peek_i64(args + 64)
        a0, a_stride = S.peek_i64(args + 72), S.peek_i64(args + 80)
        b0, b_stride, b_plane = (S.peek_i64(args + 88), S.peek_i64(args + 96),
                                 S.peek_i64(args + 104))
        c0, c_stride, c_plane = (S.peek_i64(args + 112), S.peek_i64(args + 120),
                                 S.peek_i64(args + 128))
        units = k // 256
        lows, highs, factors = slot(), high_slot(), factor_slot()
        for i in range(m * units * tid // n_threads, m * units * (tid + 1) // n_threads):
            r, u = i // units, i % units
            x, q = x0 + r * x_stride + 1024 * u, q0 + r * q_stride + 256 * u
            top, exponents, steps = scale_256(x, lows)
            d, inverse = scale_of(top, finest)
            S.poke_f32(d0 + r * d_stride + 4 * u, d)
            S.store_f32(factors, S.vmul(S.splat_f32(inverse), steps))
            for j in range(16):
                low, high = put16(x + 64 * j, S.peek_f32(factors + 4 * j), q + 16 * j, q_plane)
                S.store_i32(lows + 64 * j, low)
                if two_terms:
                    S.store_i32(highs + 64 * j, high)
            S.store_even_i32(a0 + r * a_stride + 32 * u, exponents)
            b, c = b0 + r * b_stride + 32 * u, c0 + r * c_stride + 16 * u
            put_sums(b, c, lows, exponents)
            if two_terms:
                put_sums(b + b_plane, c + c_plane, highs, exponents)

    return quantize_q256
