"""Memory of draft passes: scratch, logits, and the two small buffers that meet the host.

Owns sizes; ``draft_memory`` states what a draft allocates without allocating it.
"""

from itertools import accumulate, pairwise

import numpy as np

from cudflash.model.buffers import QUANTIZED_LAYOUTS
from cudflash.model.draft_context import SLACK, context_bytes
from cudflash.model.draft_weights import draft_refs, draft_tables, draft_vectors
from cudflash.model.outcome import DraftSource
from cudflash.model.rope import table_bytes

CONTEXT_ROWS = SLACK  # context rows computed at once; sizes scratch, never changes a result
_LAYOUT_OF_BLOCK = {1: "f32", 32: "q32", 256: "q256"}


class DraftWorkspace:
    """Scratch of one draft pass at a time; shared by the sessions of an engine.

    Parameters
    ----------
    allocator : Allocator
    ops : module
    model : DraftModel
    activations : {"int8", "int8x2"}
    """

    def __init__(self, allocator, ops, model, activations):
        config = model.config
        self.activations = activations
        self._flat = {
            name: allocator.empty("scratch", (rows * width,), np.float32)
            for name, (rows, width) in scratch_sizes(config).items()
        }
        needs = quantized_needs(
            config, [(m.k, m.layout) for m in model.context_matrices()],
            [(m.k, m.layout) for m in model.block_matrices()],
        )  # fmt: skip
        self._quantized = {
            (k, layout): allocator.count(
                "scratch", ops.quantized_rows(rows, k, layout, activations)
            )
            for (k, layout), rows in needs.items()
        }
        self.logits = allocator.empty("logits", (config.block_size, model.vocab_size), np.float32)

    def view(self, name, n_rows, width):
        """Return the contiguous (n_rows, width) start of a scratch buffer."""
        return self._flat[name][: n_rows * width].reshape(n_rows, width)

    def quantized(self, k, layout, n_rows):
        """Return the quantised-rows scratch for inputs of width ``k``."""
        return self._quantized[k, layout].rows(n_rows)


def scratch_sizes(config):
    """(rows, floats per row) of every scratch buffer, by name."""
    block, hidden = config.block_size, config.hidden_dim
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    sizes = {
        "taps": (CONTEXT_ROWS, len(config.taps) * hidden),
        "fused": (CONTEXT_ROWS, hidden),
        "c": (CONTEXT_ROWS, hidden),  # fused and normed: what keys and values are made from
        "context_k": (CONTEXT_ROWS, n_kv),
        "context_v": (CONTEXT_ROWS, n_kv),
        "x": (block, hidden),  # residual stream
        "h": (block, hidden),  # normed input of a branch
        "y": (block, hidden),  # output of a branch
        "hidden": (block, hidden),  # after the final norm
        "q": (block, n_q),
        "k": (block, n_kv),
        "v": (block, n_kv),
        "a": (block, n_q),  # attention output
        "ffn_gate": (block, config.ffn_dim),
        "ffn_up": (block, config.ffn_dim),
    }
    if config.kind == "dflash2":
        rows, k, rank = block - 1, config.selector_top_k, config.selector_rank
        n_groups = hidden // config.conv_group
        sizes |= {
            "convolved": (block, hidden),
            "kernels": (block, 2 * config.conv_kernel * n_groups),
            "unary": (rows, k),
            "gate": (rows, rank),
            "predecessors": (rows, k * rank),
            "successors": (rows, k * rank),
            "lattice": (rows, k * k),
        }
    return sizes


def quantized_needs(config, context_inputs, block_inputs):
    """Rows of quantised scratch by (input width, layout)."""
    needs = {}
    rows = [(key, CONTEXT_ROWS) for key in context_inputs]
    rows += [(key, config.block_size) for key in block_inputs]
    for (k, layout), n in rows:
        if layout in QUANTIZED_LAYOUTS:
            needs[k, layout] = max(n, needs.get((k, layout), 0))
    return needs


class InBox:
    """What a block needs to know, in one int32 buffer that is filled by one copy.

    Attributes
    ----------
    ids, positions : buffers of shape (block_size,)
    n_sink : buffer of shape (1,)
    spans : dict of (window, causal) -> buffer of shape (block_size, 2)
    candidates : buffer of shape (block_size, top_k), or None
        Row 0 holds the anchor, top_k times; the others are filled by the pass.
    """

    def __init__(self, allocator, ops, config):
        block = config.block_size
        self._ops = ops
        self._block = block
        self.kinds = tuple(dict.fromkeys((la.window, la.causal) for la in config.layers))
        top_k = config.selector_top_k or 0
        filled = 2 * block + 1 + 2 * block * len(self.kinds) + top_k
        all_of_it = allocator.empty("io", (filled + (block - 1) * top_k,), np.int32)
        self._buffer = all_of_it[:filled]
        self._host = np.zeros(filled, np.int32)
        self._top_k = top_k
        self._templates = {}  # number of rows -> (values at length 0, what a longer context adds)
        self.ids, self.positions = all_of_it[:block], all_of_it[block : 2 * block]
        self.n_sink = all_of_it[2 * block : 2 * block + 1]
        start = 2 * block + 1
        self.spans = {
            kind: all_of_it[start + 2 * block * i : start + 2 * block * (i + 1)].reshape(block, 2)
            for i, kind in enumerate(self.kinds)
        }
        self.candidates = None
        if top_k:
            self.candidates = all_of_it[filled - top_k :].reshape(block, top_k)

    def fill(self, context, anchor, mask, n_rows):
        """Write the block [anchor, mask, ...] of ``n_rows`` rows at the end of the context."""
        host, block = self._host, self._block
        template = self._templates.get(n_rows)
        if template is None:
            template = self._templates[n_rows] = self._template(context, mask, n_rows)
        at_start, slope = template
        np.multiply(slope, context.length, out=host)
        np.add(host, at_start, out=host)
        np.maximum(host, 0, out=host)  # a window reaches no further back than position 0
        host[0], host[2 * block] = anchor, context.n_pinned
        if self._top_k:
            host[-self._top_k :] = anchor
        self._ops.copy_in(self._buffer, host)

    def _template(self, context, mask, n_rows):
        """What ``fill`` makes values of: all of them are linear in the length, 0 at the least."""
        block = self._block
        at_start, slope = np.zeros((2, len(self._host)), np.int32)
        at_start[1:block] = mask
        at_start[block : 2 * block], slope[block : 2 * block] = np.arange(block), 1
        at = 2 * block + 1
        for window, causal in self.kinds:
            first, per_position = context.span_terms(window, causal, n_rows)
            at_start[at : at + 2 * n_rows] = first.reshape(-1)
            slope[at : at + 2 * n_rows] = per_position.reshape(-1)
            at += 2 * block
        return at_start, slope


class OutBox:
    """What a block tells the host, in one int32 buffer that is read by one copy.

    Attributes
    ----------
    finite : two buffers of shape (1,), int32
        Of the logits and of the lattice.
    ids : buffer of shape (block_size,), int32
        Row 0: the anchor as the draft sees it. Rows 1 ..: the draft tokens.
    index : buffer of shape (block_size - 1,), int32
    scores, confidence : buffers of shape (block_size - 1,), float32
    """

    def __init__(self, allocator, ops, config):
        block = config.block_size
        self._ops, self._block, self._scored = ops, block, config.kind == "dflash2"
        edges = list(accumulate([0, 2, block, block - 1, block - 1, block - 1]))
        self._buffer = allocator.empty("io", (edges[-1],), np.int32)
        self.finite = self._buffer[:1], self._buffer[1:2]
        self.ids, self.index, scores, confidence = (
            self._buffer[a:b] for a, b in pairwise(edges[1:])
        )
        self.scores, self.confidence = scores.view(np.float32), confidence.view(np.float32)
        ops.copy_in(self._buffer, np.ones(self._buffer.shape, np.int32))

    @property
    def source(self):
        """The DraftSource of the draft tokens, with the whole box."""
        return DraftSource(self.ids[1:], self._buffer)

    def read(self):
        """Copy the box: see ``parts``."""
        return self.parts(self._ops.download(self._buffer))

    def parts(self, words):
        """What words say that begin with a host copy of the box.

        Returns
        -------
        finite : bool
            Of the logits and of the lattice.
        ids : list of int
        scores, confidence : list of float
            Empty where the draft has none.
        """
        block, scores, confidence = self._block, [], []
        whole = words[: 2 + block].tolist()
        if self._scored:
            floats = words[1 + 2 * block : 4 * block - 1].view(np.float32).tolist()
            scores, confidence = floats[: block - 1], floats[block - 1 :]
        return bool(whole[0] and whole[1]), whole[2:], scores, confidence


def draft_memory(ops, draft, target, n_ctx, activations):
    """Bytes that ``load_draft``, one workspace and one runner allocate, by kind.

    Parameters
    ----------
    ops : module
    draft : loader.draft_bind.Draft
        From ``bind_draft``.
    target : loader.bind.Target
        Its head, unless the draft has its own.
    n_ctx : int
    activations : {"int8", "int8x2"}

    Returns
    -------
    dict of str to int
        Kinds as in ``Allocator.n_bytes``.
    """
    config, weights = draft.config, draft.weights
    block, refs = config.block_size, list(draft_refs(weights))
    on_context = {id(ref) for ref in (weights.fc, *(
        ref for layer in weights.layers for ref in (layer.attn_k, layer.attn_v)
    ))}  # fmt: skip
    inputs = [(ref.shape[1], _LAYOUT_OF_BLOCK[ref.type.block_size]) for ref in refs]
    context_inputs = [key for key, ref in zip(inputs, refs) if id(ref) in on_context]
    if weights.output is None:
        head = target.weights.output
        inputs.append((head.shape[1], _LAYOUT_OF_BLOCK[head.type.block_size]))
    needs = quantized_needs(config, context_inputs, inputs[1:])
    scratch = sum(4 * rows * width for rows, width in scratch_sizes(config).values())
    scratch += sum(
        ops.quantized_rows(rows, k, layout, activations).nbytes
        for (k, layout), rows in needs.items()
    )
    kinds = len({(la.window, la.causal) for la in config.layers})
    io = 3 * CONTEXT_ROWS + 2 * block + 1 + 2 * block * kinds
    io += block * (config.selector_top_k or 0) + 2 + block + 3 * (block - 1)
    return {
        "weights": sum(ops.packed_nbytes(ref.type.name, *ref.shape) for ref in refs),
        "norms": sum(vector.nbytes for vector in draft_vectors(weights)),
        "embedding": sum(
            ops.embedding_nbytes(ref.type, *ref.shape) for ref in draft_tables(weights)
        ),
        "rope": table_bytes(config.rope, n_ctx + block),
        "kv": context_bytes(config, n_ctx, ops.CHUNK),
        "scratch": scratch,
        "logits": 4 * block * config.vocab_size,
        "io": 4 * io,
    }
