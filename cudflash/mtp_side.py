"""The loaded MTP block of an engine: weights and scratch shared by its sessions.

Owns the block's device memory. Must not know how an answer proceeds.
"""

from cudflash.errors import UnsupportedError
from cudflash.model.buffers import Allocator, scratch_widths
from cudflash.model.cache import KV_ITEM_BYTES, layer_capacity
from cudflash.model.mtp import (
    CONTEXT_ROWS,
    MAX_DEPTH,
    MTPRunner,
    block_config,
    load_mtp,
    mtp_refs,
    mtp_vectors,
    mtp_workspace,
)
from cudflash.model.outcome import outcome_words
from cudflash.spec.mtp import DEFAULT_K, MTPDrafter


def require_mtp(target, path):
    """Raise UnsupportedError unless the target's file has an MTP block."""
    if target.weights.mtp is None:
        raise UnsupportedError(
            f"{path}: the file has no MTP block ({target.config.arch}.nextn_predict_layers is 0 or "
            "absent), expected one; convert the model with it, or use a DFlash draft"
        )


def load_side(engine, target):
    """Return the MTPSide of an engine; ``target`` is what it was loaded from.

    Raises
    ------
    UnsupportedError
        If the file has no MTP block.
    """
    require_mtp(target, engine.gguf.path)
    return MTPSide(
        engine.ops, target, engine.model, engine.n_ctx, engine.kv_type, engine.activations,
        engine.work.max_rows,
    )  # fmt: skip


class MTPSide:
    """The MTP block on the device of its target.

    Parameters
    ----------
    ops : module
    target : loader.bind.Target
        With an MTP block.
    model : TargetModel
    n_ctx : int
    kv_type, activations : str
    max_rows : int
        Rows of the target's largest pass.
    """

    def __init__(self, ops, target, model, n_ctx, kv_type, activations, max_rows):
        self._ops, self._n_ctx, self._kv_type, self._max_rows = ops, n_ctx, kv_type, max_rows
        self._tap = target.config.n_layers - 1
        self.allocator = Allocator(ops)
        self.model = load_mtp(ops, target, model, self.allocator)
        self.work = mtp_workspace(ops, self.model, self.allocator, activations)

    def drafter(self, k=DEFAULT_K):
        """Return a drafter for one conversation."""
        runner = MTPRunner(
            self._ops, self.model, self.work, self._n_ctx, self._kv_type, self._max_rows
        )
        return MTPDrafter(runner, self._tap, k)


def mtp_memory(ops, target, n_ctx, kv_type, activations, max_rows):
    """Bytes that an ``MTPSide`` and one drafter allocate, by kind as in ``Allocator.n_bytes``."""
    config, weights = block_config(target.config), target.weights.mtp
    refs = list(mtp_refs(weights))
    head = target.weights.output if weights.head is None else weights.head
    layouts = {1: "f32", 32: "q32", 256: "q256"}
    inputs = {(r.shape[1], layouts[r.type.block_size]) for r in [*refs, head]}
    c, rows = config.hidden_dim, CONTEXT_ROWS
    scratch = 4 * rows * (sum(scratch_widths(config).values()) + 2 * c)
    scratch += sum(
        ops.quantized_rows(rows, k, layout, activations).nbytes
        for k, layout in inputs if layout != "f32"
    )  # fmt: skip
    scratch += 4 * c * (1 + max_rows + 1 + MAX_DEPTH + 2)
    capacity = layer_capacity(None, n_ctx, max_rows, ops.CHUNK)
    own = weights.token_embd
    return {
        "weights": sum(ops.packed_nbytes(ref.type.name, *ref.shape) for ref in refs),
        "norms": sum(vector.nbytes for vector in mtp_vectors(weights)),
        "embedding": 0 if own is None else ops.embedding_nbytes(own.type, *own.shape),
        "kv": 2 * capacity * config.mtp.n_kv_heads * config.head_dim * KV_ITEM_BYTES[kv_type],
        "scratch": scratch,
        "logits": 4 * config.vocab_size,
        "io": 4 * (2 * max_rows + MAX_DEPTH + 2 * (1 + MAX_DEPTH) + outcome_words(1)),
    }
