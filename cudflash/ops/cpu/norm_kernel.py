"""Kernel of ``rms_norm``; the order is in ``norm.rms_norm``."""

import numpy as np

from cudflash.ops.cpu import simd as S

_MAX_LANES = 256


def build():
    """Python function of the kernel ``rms_norm``.

    ``args`` is ``[out, out_stride, x, x_stride, n_rows, d, lanes, weight or 0, eps]``.
    """
    from numba import njit

    f32 = np.float32
    slot = S.stack(4 * _MAX_LANES)

    @njit(inline="always")
    def sum_of_squares(x, d, lanes, acc):
        """Sum in the contract's order; ``acc`` holds one float per lane."""
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
