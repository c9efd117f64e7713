"""Kernels of the elementwise ops: one loop, 16 lanes and then single floats, the same bits."""

import numpy as np

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu import special_kernel as F

# Columns of one unit of work.
_SPAN = 256


def _pairs():
    """name -> (float function, vector function) of (x, y, number)."""
    from numba import njit

    def inline(function):
        return njit(inline="always")(function)

    return {
        "copy": (lambda x, y, s: x, lambda x, y, s: x),
        "add": (lambda x, y, s: x + y, lambda x, y, s: S.vadd(x, y)),
        "add_bias": (lambda x, y, s: x + y, lambda x, y, s: S.vadd(x, y)),
        "scale": (lambda x, y, s: x * s, lambda x, y, s: S.vmul(x, S.splat_f32(s))),
        "softcap": (lambda x, y, s: F.softcap(x, s),
                    lambda x, y, s: F.vsoftcap(x, S.splat_f32(s))),
        "swiglu": (lambda x, y, s: F.silu(x) * y, lambda x, y, s: S.vmul(F.vsilu(x), y)),
        "geglu": (lambda x, y, s: F.gelu_tanh(x) * y,
                  lambda x, y, s: S.vmul(F.vgelu_tanh(x), y)),
        "sigmoid_gate": (lambda x, y, s: x * F.sigmoid(y),
                         lambda x, y, s: S.vmul(x, F.vsigmoid(y))),
    }, inline


def build(name):
    """Python function of the kernel ``name``.

    ``args`` is ``[out, out_stride, x, x_stride, y or 0, y_stride, m, n, number]``.
    """
    table, inline = _pairs()
    one, sixteen = (inline(function) for function in table[name])
    f32 = np.float32

    def elementwise(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        x0, x_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        y0, y_stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        m, n = S.peek_i64(args + 48), S.peek_i64(args + 56)
        number = f32(S.peek_f64(args + 64))
        if y0 == 0:
            y0, y_stride = x0, x_stride
        spans = (n + _SPAN - 1) // _SPAN
        for i in range(m * spans * tid // n_threads, m * spans * (tid + 1) // n_threads):
            r, first = i // spans, i % spans * _SPAN
            last = min(n, first + _SPAN)
            out, x, y = out0 + r * out_stride, x0 + r * x_stride, y0 + r * y_stride
            whole = last - (last - first) % 16
            for j in range(4 * first, 4 * whole, 64):
                S.store_f32(out + j, sixteen(S.load_f32(x + j), S.load_f32(y + j), number))
            for j in range(4 * whole, 4 * last, 4):
                S.poke_f32(out + j, one(S.peek_f32(x + j), S.peek_f32(y + j), number))

    return elementwise
