"""Kernels of ``rms_norm``, ``l2_norm`` and ``gated_rms_norm``; the orders are in ``norm.py``."""

import numpy as np

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu import special_kernel as F

_MAX_LANES = 256


def _sum_of_squares_function():
    """Compiled helper: sum over d floats in the contract's order; ``acc`` holds the lanes."""
    from numba import njit

    f32 = np.float32

    @njit(inline="always")
    def sum_of_squares(x, d, lanes, acc):
        if lanes == 32 and d % 32 == 0:  # the same sums, in registers
            low = high = S.splat_f32(f32(0.0))
            for i in range(0, 4 * d, 128):
                v, w = S.load_f32(x + i), S.load_f32(x + i + 64)
                low, high = S.vfma(v, v, low), S.vfma(w, w, high)
            return S.vsum_tree(S.vadd(low, high))
        for i in range(0, lanes, 16):
            S.store_f32(acc + 4 * i, S.splat_f32(f32(0.0)))
        whole = d - d % 16
        at = 0
        for i in range(0, whole, 16):
            v = S.load_f32(x + 4 * i)
            S.store_f32(acc + at, S.vfma(v, v, S.load_f32(acc + at)))
            at += 64
            if at == 4 * lanes:
                at = 0
        for i in range(whole, d):
            v = S.peek_f32(x + 4 * i)
            S.poke_f32(acc + at, S.fma(v, v, S.peek_f32(acc + at)))
            at += 4
        half = lanes // 2
        while half >= 16:
            for i in range(0, half, 16):
                S.store_f32(acc + 4 * i, S.vadd(S.load_f32(acc + 4 * i),
                                                S.load_f32(acc + 4 * (i + half))))
            half //= 2
        return S.vsum_tree(S.load_f32(acc))

    return sum_of_squares


def build():
    """Python function of the kernel ``rms_norm``.

    ``args`` is ``[out, out_stride, x, x_stride, n_rows, d, lanes, weight or 0, eps]``.
    """
    f32 = np.float32
    slot = S.stack(4 * _MAX_LANES)
    sum_of_squares = _sum_of_squares_function()

    def rms_norm(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        x0, x_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        n_rows, d, lanes = (S.peek_i64(args + 32), S.peek_i64(args + 40), S.peek_i64(args + 48))
        weight = S.peek_i64(args + 56)
        eps = f32(S.peek_f64(args + 64))
        acc = slot()
        for r in range(n_rows * tid // n_threads, n_rows * (tid + 1) // n_threads):
            x, out = x0 + r * x_stride, out0 + r * out_stride
            mean = S.div(sum_of_squares(x, d, lanes, acc), f32(d))
            factor = S.div(f32(1.0), S.sqrt(mean + eps))
            wide = S.splat_f32(factor)
            whole = d - d % 16
            for i in range(0, 4 * whole, 64):
                v = S.vmul(S.load_f32(x + i), wide)
                if weight != 0:
                    v = S.vmul(v, S.load_f32(weight + i))
                S.store_f32(out + i, v)
            for i in range(4 * whole, 4 * d, 4):
                s = S.peek_f32(x + i) * factor
                if weight != 0:
                    s = s * S.peek_f32(weight + i)
                S.poke_f32(out + i, s)

    return rms_norm


def build_l2():
    """Python function of the kernel ``l2_norm``.

    ``args`` is ``[out, out_stride, x, x_stride, n_rows, n_heads, d, lanes, eps]``; the heads of a
    row lie side by side.
    """
    f32 = np.float32
    slot = S.stack(4 * _MAX_LANES)
    sum_of_squares = _sum_of_squares_function()

    def l2_norm(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        x0, x_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        n_rows, n_heads = S.peek_i64(args + 32), S.peek_i64(args + 40)
        d, lanes = S.peek_i64(args + 48), S.peek_i64(args + 56)
        eps = f32(S.peek_f64(args + 64))
        acc = slot()
        n_units = n_rows * n_heads
        for unit in range(n_units * tid // n_threads, n_units * (tid + 1) // n_threads):
            r, shift = unit // n_heads, 4 * d * (unit % n_heads)
            x, out = x0 + r * x_stride + shift, out0 + r * out_stride + shift
            factor = S.div(f32(1.0), S.sqrt(sum_of_squares(x, d, lanes, acc) + eps))
            wide = S.splat_f32(factor)
            whole = d - d % 16
            for i in range(0, 4 * whole, 64):
                S.store_f32(out + i, S.vmul(S.load_f32(x + i), wide))
            for i in range(4 * whole, 4 * d, 4):
                S.poke_f32(out + i, S.peek_f32(x + i) * factor)

    return l2_norm


def build_gated():
    """Python function of the kernel ``gated_rms_norm``.

    ``args`` is ``[out, out_stride, x, x_stride, z, z_stride, n_rows, d, lanes, weight, eps]``.
    """
    f32 = np.float32
    slot = S.stack(4 * _MAX_LANES)
    sum_of_squares = _sum_of_squares_function()

    def gated_rms_norm(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        x0, x_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        z0, z_stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        n_rows, d, lanes = S.peek_i64(args + 48), S.peek_i64(args + 56), S.peek_i64(args + 64)
        weight = S.peek_i64(args + 72)
        eps = f32(S.peek_f64(args + 80))
        acc = slot()
        for r in range(n_rows * tid // n_threads, n_rows * (tid + 1) // n_threads):
            x, z, out = x0 + r * x_stride, z0 + r * z_stride, out0 + r * out_stride
            mean = S.div(sum_of_squares(x, d, lanes, acc), f32(d))
            factor = S.div(f32(1.0), S.sqrt(mean + eps))
            wide = S.splat_f32(factor)
            whole = d - d % 16
            for i in range(0, 4 * whole, 64):
                v = S.vmul(S.vmul(S.load_f32(x + i), wide), S.load_f32(weight + i))
                S.store_f32(out + i, S.vmul(v, F.vsilu(S.load_f32(z + i))))
            for i in range(4 * whole, 4 * d, 4):
                s = S.peek_f32(x + i) * factor * S.peek_f32(weight + i)
                S.poke_f32(out + i, s * F.silu(S.peek_f32(z + i)))

    return gated_rms_norm
