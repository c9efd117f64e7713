"""Kernel of ``dynamic_conv``; the order is in ``convolve.dynamic_conv``."""

import numpy as np

from cudflash.ops.cpu import simd as S


def build():
    """Python function of the kernel ``dynamic_conv``.

    ``args`` is ``[out, out_stride, x, x_stride, dyn, dyn_stride, base, n_rows, width, n_taps,
    first, group]``; ``first`` is the index of the side's first tap. One unit of work is one group
    of channels of one row.
    """
    from numba import njit

    @njit(inline="always")
    def convolve_16(out, x, x_stride, base, dyn, width, n_groups, last):
        """16 channels that share the dynamic coefficients."""
        k = S.vadd(S.load_f32(base), S.splat_f32(S.peek_f32(dyn)))
        acc = S.vmul(k, S.load_f32(x))
        for o in range(1, last):
            k = S.vadd(S.load_f32(base + 4 * o * width),
                       S.splat_f32(S.peek_f32(dyn + 4 * o * n_groups)))
            acc = S.vfma(k, S.load_f32(x - o * x_stride), acc)
        S.store_f32(out, acc)

    @njit(inline="always")
    def convolve_1(out, x, x_stride, base, dyn, width, n_groups, last):
        acc = (S.peek_f32(base) + S.peek_f32(dyn)) * S.peek_f32(x)
        for o in range(1, last):
            k = S.peek_f32(base + 4 * o * width) + S.peek_f32(dyn + 4 * o * n_groups)
            acc = S.fma(k, S.peek_f32(x - o * x_stride), acc)
        S.poke_f32(out, acc)

    def dynamic_conv(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        x0, x_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        dyn0, dyn_stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        base0, n_rows, width = S.peek_i64(args + 48), S.peek_i64(args + 56), S.peek_i64(args + 64)
        n_taps, first, group = S.peek_i64(args + 72), S.peek_i64(args + 80), S.peek_i64(args + 88)
        n_groups = width // group
        base = base0 + 4 * first * width
        whole = group - group % 16
        units = n_rows * n_groups
        first_unit = units * tid // n_threads
        t, g = first_unit // n_groups, first_unit % n_groups - 1
        for _ in range(first_unit, units * (tid + 1) // n_threads):
            g += 1
            if g == n_groups:
                t, g = t + 1, np.int64(0)
            last = min(n_taps, t + 1)
            dyn = dyn0 + t * dyn_stride + 4 * (first * n_groups + g)
            out, x = out0 + t * out_stride, x0 + t * x_stride
            begin = g * group
            for c in range(begin, begin + whole, 16):
                convolve_16(out + 4 * c, x + 4 * c, x_stride, base + 4 * c, dyn, width, n_groups,
                            last)
            for c in range(begin + whole, begin + group):
                convolve_1(out + 4 * c, x + 4 * c, x_stride, base + 4 * c, dyn, width, n_groups,
                           last)

    return dynamic_conv
