"""Two ops in one: what the GPU does in one launch is one op after the other here, the same bits."""

from cudflash.ops.cpu.elementwise import geglu, sigmoid_gate, swiglu
from cudflash.ops.cpu.norm import rms_norm
from cudflash.ops.cpu.packed import quantize_rows


def norm_quantize(xq, h, x, weight, eps, keep):
    """Quantise ``rms_norm(x)``.

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    h : ndarray of shape (xq.m, k), float32
        Scratch; holds the normed rows afterwards if ``keep``, else anything.
    x : ndarray of shape (xq.m, k), float32
    weight : ndarray of shape (k,), float32, or None
    eps : float
    keep : bool
    """
    rms_norm(h, x, weight, eps)
    quantize_rows(xq, h)


def swiglu_quantize(xq, h, gate, up):
    """Quantise ``swiglu(gate, up)``.

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    h : ndarray of shape (xq.m, k), float32
        Scratch, which may be ``gate`` or ``up``; holds anything afterwards.
    gate, up : ndarray of shape (xq.m, k), float32
    """
    swiglu(h, gate, up)
    quantize_rows(xq, h)


def geglu_quantize(xq, h, gate, up):
    """Quantise ``geglu(gate, up)``; as :func:`swiglu_quantize`."""
    geglu(h, gate, up)
    quantize_rows(xq, h)


def sigmoid_gate_quantize(xq, h, x, gate):
    """Quantise ``sigmoid_gate(x, gate)``.

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    h : ndarray of shape (xq.m, k), float32
        Scratch, which may be ``x``; holds anything afterwards.
    x, gate : ndarray of shape (xq.m, k), float32
    """
    sigmoid_gate(h, x, gate)
    quantize_rows(xq, h)
