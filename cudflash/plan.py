"""How much memory a model will take, from its header alone.

Owns the sizes; the same functions size the buffers when they are allocated. Must not read weights.
Invariant: ``Plan.total`` is what load and one session then allocate, within 1 %.
"""

from dataclasses import dataclass, field

from cudflash import defaults
from cudflash.checks import one_of, whole
from cudflash.model.buffers import QUANTIZED_LAYOUTS, scratch_widths
from cudflash.model.cache import BLOCK_ROWS, KV_ITEM_BYTES, check_kv_type, layer_capacity
from cudflash.model.outcome import STOP_IDS, outcome_words
from cudflash.model.rope import table_bytes
from cudflash.model.weights import weight_refs, weight_vectors

TABLE_CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_SAMPLE_ROWS = 64  # scratch of int8 rows is linear in multiples of it
LAYOUT_OF_BLOCK = {1: "f32", 32: "q32", 256: "q256"}  # input of a product, by weight block


@dataclass(frozen=True)
class ContextRow:
    """One line of the context table."""

    n_ctx: int
    kv_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Plan:
    """Bytes allocated by load and one session, by kind; names as in ``Allocator.n_bytes``."""

    n_ctx: int
    kv_type: str
    activations: str
    max_rows: int
    logit_rows: int
    weights: int  # packed projections, the output head included
    embedding: int  # allocated for embedding rows: 0 where they are read from the file's map
    norms: int  # and biases
    rope: int
    kv: int
    scratch: int
    logits: int
    io: int  # ids, positions, flags
    mapped: int  # bytes of the embedding that are read from the file's map, not allocated
    kv_layers: tuple[int, ...]  # bytes per layer
    contexts: tuple[ContextRow, ...]
    taps: int = 0  # captured layers of a block, for the draft
    state: int = 0  # of recurrent layers, checkpoints included; does not grow with the context
    workspace: int = 0  # scratch that the ops of a GPU share
    draft: dict = field(default_factory=dict)  # bytes of the draft by the same kinds; {} without

    @property
    def total(self):
        """Bytes of all kinds; ``mapped`` is not allocated and not counted."""
        return (
            self.weights + self.embedding + self.norms + self.rope + self.kv
            + self.state + self.scratch + self.logits + self.io + self.taps + self.workspace
            + sum(self.draft.values())
        )  # fmt: skip

    @property
    def session_bytes(self):
        """What of it one conversation allocates for the target: its caches and small buffers."""
        return self.kv + self.state + self.taps + 4 * (2 * self.max_rows + STOP_IDS)

    def to_dict(self):
        """Plain values, for JSON."""
        values = dict(vars(self), total=self.total, kv_layers=list(self.kv_layers))
        values["contexts"] = [vars(row) for row in self.contexts]
        return values


def choose_context(n_ctx, context_length):
    """Return the context to use: as asked for, else the model's own up to the default."""
    if n_ctx is None:
        return min(context_length, defaults.N_CTX)
    return whole("n_ctx", n_ctx, 1, defaults.MAX_N_CTX)


def plan(
    target,
    draft=None,
    *,
    device="auto",
    n_ctx=None,
    kv_type=defaults.KV_TYPE,
    activations=None,
    max_rows=defaults.PREFILL_ROWS,
    logit_rows=defaults.LOGIT_ROWS,
    draft_window=None,
    draft_sink=None,
    draft_activations=None,
    drafter=None,
):
    """Plan a model file, and its draft if given, without loading it.

    Parameters
    ----------
    target : str, path-like
        GGUF file.
    draft, draft_window, draft_sink, draft_activations
        As in ``cudflash.load``.
    device, n_ctx, kv_type, activations
        As in ``cudflash.load``.
    max_rows : int
        Rows of a prefill chunk.
    logit_rows : int
        Rows of logits computed at once.
    drafter : {"mtp"}, optional
        Plan for the MTP block of the model's file as the drafter.

    Returns
    -------
    Plan
    """
    from cudflash.backend import planner
    from cudflash.device import planned_kind
    from cudflash.pair import open_pair

    pair = open_pair(
        target, draft, draft_window=draft_window, draft_sink=draft_sink,
        draft_activations=draft_activations,
    )  # fmt: skip
    if drafter is not None:
        from cudflash.mtp_side import require_mtp

        one_of("drafter", drafter, ("mtp",))
        require_mtp(pair.target, pair.gguf.path)
    return plan_pair(
        planner(planned_kind(device)),
        pair,
        n_ctx=choose_context(n_ctx, pair.target.config.context_length),
        kv_type=kv_type,
        activations=defaults.ACTIVATIONS if activations is None else activations,
        max_rows=max_rows,
        logit_rows=logit_rows,
        mtp=drafter is not None,
    )


def plan_pair(
    backend,
    pair,
    *,
    n_ctx,
    kv_type,
    activations,
    max_rows=defaults.PREFILL_ROWS,
    logit_rows=defaults.LOGIT_ROWS,
    mtp=False,
):
    """Plan an opened pair; parameters as in ``plan``, none optional but the rows.

    ``backend`` comes from ``cudflash.backend.planner``; ``mtp`` adds the target's MTP block.
    """
    ops, target, draft = backend.ops, pair.target, pair.draft
    draft_config = None if draft is None else draft.config
    check_kv_type(kv_type)
    one_of("activations", activations, defaults.ACTIVATION_TYPES)
    config, weights = target.config, target.weights
    refs = list(weight_refs(weights))
    embd = weights.token_embd
    embedding = ops.embedding_nbytes(embd.type, *embd.shape)
    fixed = {
        "weights": sum(ops.packed_nbytes(ref.type.name, *ref.shape) for ref in refs),
        "embedding": embedding,
        "norms": sum(vector.nbytes for vector in weight_vectors(weights)),
        "scratch": _scratch(ops, config, refs, max_rows, activations),
        "logits": logit_rows * config.vocab_size * 4,
        "io": 4 * (outcome_words(logit_rows) + 2 * max_rows + STOP_IDS),
        "taps": 0,
        "state": _state(config),
    }
    if draft is not None:
        fixed["taps"] = max_rows * len(draft.config.taps) * config.hidden_dim * 4
    elif mtp:
        fixed["taps"] = max_rows * config.hidden_dim * 4

    def varying(context):
        layers = kv_bytes(config, context, kv_type, max_rows, ops.CHUNK)
        work = backend.workspace_bytes(config, draft_config, context, max_rows)
        drafting = _draft(ops, pair, context)
        if mtp:
            from cudflash.mtp_side import mtp_memory

            drafting = mtp_memory(ops, target, context, kv_type, activations, max_rows)
        return layers, _rope(config, context), work, drafting

    kv_layers, rope, workspace, drafting = varying(n_ctx)
    rows = []
    for context in sorted({*TABLE_CONTEXTS, n_ctx, config.context_length}):
        if context <= max(config.context_length, n_ctx):
            layers, tables, work, of_draft = varying(context)
            total = sum(fixed.values()) + sum(layers) + tables + work + sum(of_draft.values())
            rows.append(ContextRow(context, sum(layers), total))
    return Plan(
        n_ctx=n_ctx,
        kv_type=kv_type,
        activations=activations,
        max_rows=max_rows,
        logit_rows=logit_rows,
        rope=rope,
        kv=sum(kv_layers),
        workspace=workspace,
        draft=drafting,
        mapped=0 if embedding else embd.raw.nbytes,
        kv_layers=kv_layers,
        contexts=tuple(rows),
        **fixed,
    )


def kv_bytes(config, n_ctx, kv_type, max_rows, chunk):
    """Bytes of keys and values of every layer; 0 for one without attention."""
    row = 2 * config.head_dim * KV_ITEM_BYTES[kv_type]
    return tuple(
        layer_capacity(layer.window, n_ctx, max_rows, chunk) * layer.n_kv_heads * row
        if layer.delta is None else 0
        for layer in config.layers
    )  # fmt: skip


def _state(config):
    if not config.recurrent:
        return 0
    from cudflash.model.recurrent import state_bytes

    return state_bytes(config, BLOCK_ROWS, defaults.CHECKPOINTS)


def _draft(ops, pair, n_ctx):
    if pair.draft is None:
        return {}
    from cudflash.model.draft_buffers import draft_memory

    return draft_memory(ops, pair.draft, pair.target, n_ctx, pair.draft_activations)


def _rope(config, n_ctx):
    distinct = {layer.rope for layer in config.layers if layer.rope is not None}
    return sum(table_bytes(rope, n_ctx) for rope in distinct)


def _scratch(ops, config, refs, max_rows, activations):
    floats = sum(scratch_widths(config).values()) * max_rows * 4
    layouts = {(ref.shape[1], LAYOUT_OF_BLOCK[ref.type.block_size]) for ref in refs}
    # measured on a few rows, so that planning does not allocate what it plans
    sample = min(max_rows, _SAMPLE_ROWS)
    quantized = sum(
        ops.quantized_rows(sample, k, layout, activations).nbytes
        for k, layout in layouts
        if layout in QUANTIZED_LAYOUTS
    )
    return floats + quantized * max_rows // sample
