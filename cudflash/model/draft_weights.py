"""A draft's weights on a backend, together with what it borrows from its target.

Owns the way from bound tensors to device buffers. Must not know the order of the forward pass.
"""

from dataclasses import dataclass

from cudflash.model.rope import rope_table
from cudflash.model.weights import MappedPages

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
            "attn_conv_proj", "ffn_conv_proj")  # fmt: skip
VECTORS = ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm", "attn_conv_base",
           "ffn_conv_base")  # fmt: skip


@dataclass(frozen=True)
class DeviceDraftLayer:
    """One layer; fields are named and shaped as in ``loader.draft_bind.DraftLayerWeights``."""

    attn_norm: object
    attn_q: object  # PackedMatrix, as the other projections
    attn_k: object
    attn_v: object
    attn_output: object
    attn_q_norm: object
    attn_k_norm: object
    ffn_norm: object
    ffn_gate: object
    ffn_up: object
    ffn_down: object
    attn_conv_base: object | None  # (2, conv_kernel, hidden_dim) float32
    attn_conv_proj: object | None
    ffn_conv_base: object | None
    ffn_conv_proj: object | None


@dataclass(frozen=True)
class DraftModel:
    """Everything a draft pass reads but its context and scratch."""

    config: object  # DraftConfig, bound to its target
    n_ctx: int
    fc: object  # PackedMatrix (hidden_dim, n_taps * hidden_dim)
    hidden_norm: object  # (hidden_dim,) float32
    output_norm: object  # (hidden_dim,) float32
    layers: tuple[DeviceDraftLayer, ...]
    rope_table: object  # (n_ctx + block_size, n_dims / 2, 2) float32
    embedding: object  # EmbeddingTable, the target's unless the draft has its own
    head: object  # PackedMatrix (vocab_size, hidden_dim), as embedding
    predecessor: object | None  # EmbeddingTable (vocab_size, selector_rank)
    successor: object | None  # as predecessor
    selector_hidden: object | None  # PackedMatrix (selector_rank, hidden_dim)

    @property
    def vocab_size(self):
        """Rows of the head."""
        return self.head.n

    def context_matrices(self):
        """Yield what context rows are multiplied with."""
        yield self.fc
        for layer in self.layers:
            yield layer.attn_k
            yield layer.attn_v

    def block_matrices(self):
        """Yield what block rows are multiplied with."""
        for layer in self.layers:
            for name in MATRICES:
                if getattr(layer, name) is not None:
                    yield getattr(layer, name)
        yield self.head
        if self.selector_hidden is not None:
            yield self.selector_hidden


def load_draft(ops, draft, target, n_ctx, allocator, progress=None):
    """Pack and upload a bound draft.

    Parameters
    ----------
    ops : module
    draft : loader.draft_bind.Draft
        From ``bind_draft``.
    target : TargetModel
        ``embedding`` and ``output`` are shared, not copied.
    n_ctx : int
        Positions of the target's context.
    allocator : Allocator
    progress : callable, optional
        Called with (bytes read, bytes of all projections) after each one.

    Returns
    -------
    DraftModel
    """
    config, weights = draft.config, draft.weights
    total = sum(ref.raw.nbytes for ref in draft_refs(weights))
    done = 0
    pages = MappedPages()

    def matrix(ref):
        nonlocal done
        if ref is None:
            return None
        packed = ops.pack(ref.raw, ref.type, ref.shape[1])
        pages.release(ref.raw)
        done += ref.raw.nbytes
        if progress is not None:
            progress(done, total)
        return allocator.count("weights", packed)

    def vector(array):
        return None if array is None else allocator.upload("norms", array)

    def table(ref):
        if ref is None:
            return None
        return allocator.count("embedding", ops.embedding_table(ref.raw, ref.type, ref.shape[1]))

    angles = rope_table(config.rope, n_ctx + config.block_size)
    return DraftModel(
        config=config,
        n_ctx=n_ctx,
        fc=matrix(weights.fc),
        hidden_norm=vector(weights.hidden_norm),
        output_norm=vector(weights.output_norm),
        layers=tuple(
            DeviceDraftLayer(
                **{name: matrix(getattr(layer, name)) for name in MATRICES},
                **{name: vector(getattr(layer, name)) for name in VECTORS},
            )
            for layer in weights.layers
        ),
        rope_table=allocator.upload("rope", angles),
        embedding=target.embedding if weights.token_embd is None else table(weights.token_embd),
        head=target.output if weights.output is None else matrix(weights.output),
        predecessor=table(weights.selector_predecessor),
        successor=table(weights.selector_successor),
        selector_hidden=matrix(weights.selector_hidden),
    )


def draft_refs(weights):
    """Yield every projection of a draft that is packed; codebooks and embedding rows are not."""
    yield weights.fc
    for layer in weights.layers:
        for name in MATRICES:
            if getattr(layer, name) is not None:
                yield getattr(layer, name)
    for ref in (weights.output, weights.selector_hidden):
        if ref is not None:
            yield ref


def draft_vectors(weights):
    """Yield every norm and base kernel of a draft."""
    yield weights.hidden_norm
    yield weights.output_norm
    for layer in weights.layers:
        for name in VECTORS:
            if getattr(layer, name) is not None:
                yield getattr(layer, name)


def draft_tables(weights):
    """Yield every table of a draft of which single rows are read."""
    for ref in (weights.token_embd, weights.selector_predecessor, weights.selector_successor):
        if ref is not None:
            yield ref
