"""Memory of a target's forward pass: who allocates, how much, and views for smaller blocks.

Owns every byte the engine allocates on the backend: one ``Allocator`` counts them by kind, so that
``plan`` can be held against it. Invariant: nothing is allocated between load and unload but here,
and nothing inside a step.
"""

from collections import Counter

import numpy as np

from cudflash.model.outcome import Outcome

QUANTIZED_LAYOUTS = ("q32", "q256")


class Allocator:
    """Counts what is allocated through it.

    Attributes
    ----------
    n_bytes : Counter
        Bytes by kind: "weights", "embedding", "norms", "rope", "kv", "state", "scratch",
        "logits", "io".
    """

    def __init__(self, ops):
        self._ops = ops
        self.n_bytes = Counter()

    def empty(self, kind, shape, dtype):
        """Allocate an uninitialised buffer."""
        return self.count(kind, self._ops.empty(shape, dtype))

    def upload(self, kind, array):
        """Copy a host array into a new buffer."""
        return self.count(kind, self._ops.upload(array))

    def count(self, kind, buffer):
        """Book a buffer that an op allocated."""
        self.n_bytes[kind] += int(buffer.nbytes)
        return buffer

    @property
    def total(self):
        """Bytes of all kinds."""
        return sum(self.n_bytes.values())


def input_layouts(matrices):
    """Yield (input width, layout) of every distinct quantised input of the matrices."""
    seen = dict.fromkeys((m.k, m.layout) for m in matrices if m.layout in QUANTIZED_LAYOUTS)
    yield from seen


class Workspace:
    """Scratch of one forward at a time, sized for ``max_rows`` rows and ``logit_rows`` logits.

    Flat buffers; ``view(name, M, width)`` is the contiguous (M, width) start of one. Nothing in it
    outlives a step, so all sessions of an engine share it.

    Parameters
    ----------
    allocator : Allocator
    ops : module
    config : TargetConfig
    matrices : iterable
        The packed matrices (anything with ``.k`` and ``.layout``) whose inputs are quantised.
    max_rows, logit_rows : int
    activations : {"int8", "int8x2"}
    more : dict of str to int
        Further scratch buffers: floats per row by name.
    """

    def __init__(
        self, allocator, ops, config, matrices, max_rows, logit_rows, activations, more=None
    ):
        self.max_rows, self.logit_rows = max_rows, logit_rows
        widths = scratch_widths(config) | (more or {})
        self._flat = {
            name: allocator.empty("scratch", (max_rows * width,), np.float32)
            for name, width in widths.items()
        }
        self._quantized = {
            (k, layout): allocator.count(
                "scratch", ops.quantized_rows(max_rows, k, layout, activations)
            )
            for k, layout in input_layouts(matrices)
        }
        self.logits = allocator.empty("logits", (logit_rows, config.vocab_size), np.float32)
        self.outcome = Outcome(allocator, logit_rows)

    def release(self):
        """Let go of all memory; nothing can be evaluated afterwards."""
        self._flat.clear()
        self._quantized.clear()
        self.logits = self.outcome = None

    def view(self, name, n_rows, width):
        """Return the (n_rows, width) start of a scratch buffer."""
        return self._flat[name][: n_rows * width].reshape(n_rows, width)

    def quantized(self, k, layout, n_rows):
        """Return the quantised-rows scratch for inputs of width ``k``."""
        return self._quantized[k, layout].rows(n_rows)


def scratch_widths(config):
    """Floats per row of every scratch buffer, by name."""
    heads = max(layer.n_heads for layer in config.layers) * config.head_dim
    kv_heads = max(layer.n_kv_heads for layer in config.layers) * config.head_dim
    ffn = max(layer.ffn_dim for layer in config.layers)
    widths = {
        "x": config.hidden_dim,  # residual stream
        "h": config.hidden_dim,  # normed input of a branch, normed output of a branch
        "y": config.hidden_dim,  # output of a branch
        "q": heads,
        "k": kv_heads,
        "v": kv_heads,
        "a": heads,  # attention output
        "ffn_gate": ffn,
        "ffn_up": ffn,
    }
    if config.attn_gate:
        widths["attn_gate"] = heads
    if config.fused_q_gate:
        widths["q_gate"] = 2 * heads
    deltas = [layer.delta for layer in config.layers if layer.delta is not None]
    if deltas:
        conv, values = max(d.conv_width for d in deltas), max(d.v_width for d in deltas)
        n_heads = max(d.n_v_heads for d in deltas)
        widths |= {"conv_in": conv, "conv_out": conv, "delta_gate": values, "delta_out": values}
        widths |= {"decay": n_heads, "beta": n_heads}
    return widths
