"""Quantisation of rows that are computed in the same launch; the bits of one op after the other.

Kernels: ``norm_quantize.cu``, ``glu_quantize.cu``. They save a launch and a round trip of the float
rows through memory.
"""

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_rows, check_shape
from cudflash.ops.cuda.launch import Long
from cudflash.ops.cuda.packed import check_aligned


def norm_quantize(self, xq, h, x, weight, eps, keep):
    """Quantise ``rms_norm(x)``; as ``ops.cpu.norm_quantize``.

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    h : array of shape (xq.m, k), float32
        Scratch; holds the normed rows afterwards if ``keep``, else anything.
    x : array of shape (xq.m, k), float32
    weight : array of shape (k,), float32, or None
    eps : float
    keep : bool
    """
    op = "norm_quantize"
    _check_inputs(op, xq, h=h, x=x)
    if weight is not None:
        check_rows(op, "weight", weight)
        check_shape(op, "weight", weight, (xq.k,))
        check_aligned(op, weight.reshape(1, -1))
    if not eps > 0.0:
        raise UsageError(f"{op}: eps is {eps!r}, expected a positive number")
    self.start("norm_quantize", _defines(xq), "norm_quantize", (xq.padded,), (256,),
               (*xq.arrays, h if keep else None, Long(h.strides[0] // 4), x,
                Long(x.strides[0] // 4), weight, xq.m, xq.k, float(eps)))


def swiglu_quantize(self, xq, h, gate, up):
    """Quantise ``swiglu(gate, up)``; as ``ops.cpu.swiglu_quantize``.

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    h : array of shape (xq.m, k), float32
        Scratch, not used here.
    gate, up : array of shape (xq.m, k), float32
    """
    _start_glu(self, "swiglu_quantize", xq, h, gate, up)


def geglu_quantize(self, xq, h, gate, up):
    """Quantise ``geglu(gate, up)``; as :func:`swiglu_quantize`."""
    _start_glu(self, "geglu_quantize", xq, h, gate, up)


def sigmoid_gate_quantize(self, xq, h, x, gate):
    """Quantise ``sigmoid_gate(x, gate)``; as ``ops.cpu.sigmoid_gate_quantize``.

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    h : array of shape (xq.m, k), float32
        Scratch, not used here.
    x, gate : array of shape (xq.m, k), float32
    """
    _start_glu(self, "sigmoid_gate_quantize", xq, h, gate, x)


def _start_glu(self, op, xq, h, gate, up):
    _check_inputs(op, xq, h=h, gate=gate, up=up)
    self.start("glu_quantize", _defines(xq), op, (-(-xq.k // 1024), xq.padded), (128,),
               (*xq.arrays, gate, Long(gate.strides[0] // 4), up, Long(up.strides[0] // 4), xq.m,
                xq.k))


def _check_inputs(op, xq, **arrays):
    for name, array in arrays.items():
        check_rows(op, name, array)
        check_shape(op, name, array, (xq.m, xq.k))
        check_aligned(op, array)


def _defines(xq):
    return (f"LAYOUT={xq.layout[1:]}", f"PLANES={xq.planes}", f"TOKEN_TILES={xq.token_tiles}")
