"""Kernels of ``rope``; the formula is in ``rotary.rope``."""

import numpy as np

from cudflash.ops.cpu import simd as S


def build(style):
    """Python function of the kernel ``rope_<style>``.

    ``args`` is ``[x, x_stride, positions, table, n_pos, m, n_heads, d, n_dims]``.
    """
    from numba import njit

    f32 = np.float32
    split = style == "split_half"
    nan = f32(np.nan)

    @njit(inline="always")
    def rotate_one(low, high, table):
        x0, x1 = S.peek_f32(low), S.peek_f32(high)
        c, s = S.peek_f32(table), S.peek_f32(table + 4)
        S.poke_f32(low, S.fma(x0, c, -(x1 * s)))
        S.poke_f32(high, S.fma(x1, c, x0 * s))

    @njit(inline="always")
    def rotate_head(x, table, n_pairs):
        """One head; 16 pairs at a time, then the rest."""
        whole = n_pairs - n_pairs % 16
        for i in range(0, whole, 16):
            t0, t1 = S.load_f32(table + 8 * i), S.load_f32(table + 8 * i + 64)
            c, s = S.veven(t0, t1), S.vodd(t0, t1)
            if split:
                low, high = x + 4 * i, x + 4 * (n_pairs + i)
                x0, x1 = S.load_f32(low), S.load_f32(high)
            else:
                low, high = x + 8 * i, x + 8 * i + 64
                v0, v1 = S.load_f32(low), S.load_f32(high)
                x0, x1 = S.veven(v0, v1), S.vodd(v0, v1)
            y0 = S.vfma(x0, c, S.vneg(S.vmul(x1, s)))
            y1 = S.vfma(x1, c, S.vmul(x0, s))
            if split:
                S.store_f32(low, y0)
                S.store_f32(high, y1)
            else:
                S.store_f32(low, S.vzip_low(y0, y1))
                S.store_f32(high, S.vzip_high(y0, y1))
        for i in range(whole, n_pairs):
            if split:
                rotate_one(x + 4 * i, x + 4 * (n_pairs + i), table + 8 * i)
            else:
                rotate_one(x + 8 * i, x + 8 * i + 4, table + 8 * i)

    def rope(args, tid, n_threads):
        x0, x_stride = S.peek_i64(args), S.peek_i64(args + 8)
        positions, table = S.peek_i64(args + 16), S.peek_i64(args + 24)
        n_pos, m = S.peek_i64(args + 32), S.peek_i64(args + 40)
        n_heads, d, n_dims = (S.peek_i64(args + 48), S.peek_i64(args + 56), S.peek_i64(args + 64))
        for i in range(m * n_heads * tid // n_threads, m * n_heads * (tid + 1) // n_threads):
            r = i // n_heads
            x = x0 + r * x_stride + 4 * d * (i % n_heads)
            p = np.int64(S.peek_i32(positions + 4 * r))
            if p < 0 or p >= n_pos:
                for j in range(n_dims):
                    S.poke_f32(x + 4 * j, nan)
            else:
                rotate_head(x, table + p * 4 * n_dims, n_dims // 2)

    return rope
