"""Ops that compute every element alone: the op-level functions.

All take float32 arrays of shape (M, N) with contiguous rows; ``out`` may be one of the inputs.
Every operation is rounded once; the special functions are those of ``special.py``.
"""

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit


def _kernel(name):
    def build():
        from cudflash.ops.cpu.elementwise_kernel import build

        return build(name)

    return jit.register(name, build)


_KERNELS = {name: _kernel(name) for name in (
    "copy", "add", "add_bias", "scale", "softcap", "swiglu", "geglu", "sigmoid_gate")}


def _submit(op, out, x, y=None, number=0.0):
    check_rows(op, "out", out)
    if out.ndim != 2:
        raise UsageError(f"{op}: out has shape {out.shape}, expected (rows, columns)")
    inputs = [x] if y is None else [x, y]
    for array in inputs:
        check_rows(op, "an input", array)
        per_column = op == "add_bias" and array is y
        check_shape(op, "an input", array, out.shape[1:] if per_column else out.shape)
    if out.size == 0:
        return
    y_stride = 0 if y is None or y.ndim == 1 else stride(y)
    submit(_KERNELS[op], [out, stride(out), x, stride(x), 0 if y is None else y, y_stride,
                          out.shape[0], out.shape[1], float(number)],
           reads=[extent(array) for array in inputs], writes=[extent(out)],
           rows=out.shape[0], by_rows=[array for array in (x, y, out)
                                       if array is not None and array.ndim == 2])


def copy(out, x):
    """out = x, bit for bit."""
    _submit("copy", out, x)


def add(out, a, b):
    """out = a + b."""
    _submit("add", out, a, b)


def add_bias(out, x, bias):
    """out[r] = x[r] + bias, with bias of shape (N,)."""
    _submit("add_bias", out, x, bias)


def scale(out, x, s):
    """out = x * s, with s rounded to float32."""
    _submit("scale", out, x, number=s)


def softcap(out, x, cap):
    """out = cap * tanh(x / cap)."""
    if not cap > 0.0:
        raise UsageError(f"softcap: cap is {cap!r}, expected a positive number")
    _submit("softcap", out, x, number=cap)


def swiglu(out, gate, up):
    """out = (gate / (1 + exp(-gate))) * up."""
    _submit("swiglu", out, gate, up)


def geglu(out, gate, up):
    """out = gelu_tanh(gate) * up."""
    _submit("geglu", out, gate, up)


def sigmoid_gate(out, x, gate):
    """out = x * (1 / (1 + exp(-gate)))."""
    _submit("sigmoid_gate", out, x, gate)
