"""Ops that compute every element alone.

All take float32 arrays of shape (M, N) with contiguous rows; ``out`` may be one of the inputs.
Every operation is rounded once. Kernels: ``elementwise.cu``.
"""

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_rows, check_shape
from cudflash.ops.cuda.launch import Long

_BLOCK = 256


def _start(ops, op, out, x, y=None, number=0.0):
    check_rows(op, "out", out)
    if out.ndim != 2:
        raise UsageError(f"{op}: out has shape {out.shape}, expected (rows, columns)")
    for array in (x,) if y is None else (x, y):
        check_rows(op, "an input", array)
        per_column = op == "add_bias" and array is y
        check_shape(op, "an input", array, out.shape[1:] if per_column else out.shape)
    m, n = out.shape
    if out.size == 0:
        return
    y_stride = 0 if y is None or y.ndim == 1 else y.strides[0] // 4
    ops.start("elementwise", (), f"{op}_rows", (-(-n // _BLOCK), m), (_BLOCK,),
              (out, Long(out.strides[0] // 4), x, Long(x.strides[0] // 4), y, Long(y_stride), n,
               float(number)))


def copy(self, out, x):
    """out = x, bit for bit."""
    _start(self, "copy", out, x)


def add(self, out, a, b):
    """out = a + b."""
    _start(self, "add", out, a, b)


def add_bias(self, out, x, bias):
    """out[r] = x[r] + bias, with bias of shape (N,)."""
    _start(self, "add_bias", out, x, bias)


def scale(self, out, x, s):
    """out = x * s, with s rounded to float32."""
    _start(self, "scale", out, x, number=s)


def softcap(self, out, x, cap):
    """out = cap * tanh(x / cap)."""
    if not cap > 0.0:
        raise UsageError(f"softcap: cap is {cap!r}, expected a positive number")
    _start(self, "softcap", out, x, number=cap)


def swiglu(self, out, gate, up):
    """out = (gate / (1 + exp(-gate))) * up."""
    _start(self, "swiglu", out, gate, up)


def geglu(self, out, gate, up):
    """out = gelu_tanh(gate) * up."""
    _start(self, "geglu", out, gate, up)


def sigmoid_gate(self, out, x, gate):
    """out = x * (1 / (1 + exp(-gate)))."""
    _start(self, "sigmoid_gate", out, x, gate)
