"""The MTP block (NextN) of a target: weights, passes, and its own keys and values.

Owns how a hidden row and the token after it become a prediction. Must not know acceptance or text.
Row p joins the token at position p + 1 with the target's hidden row at p, after the target's final
norm, and stands at position p: the token is shifted by one, the position is not. A drafted token
joins with the block's own output, after its own final norm, one position on. Invariant: keys and
values at positions below ``length`` - 1 are those of the committed tokens, whatever was drafted;
what lies above is overwritten before it is seen.

Source: llama.cpp 0c1e57098bba, ``src/models/qwen35.cpp`` (the block's graph).
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from cudflash.errors import NumericsError
from cudflash.model.buffers import Allocator, Workspace
from cudflash.model.cache import LayerCache, layer_capacity
from cudflash.model.outcome import DraftSource
from cudflash.model.transformer import Pass
from cudflash.model.weights import MATRICES, VECTORS, DeviceLayer, Packer, load_layer, present

CONTEXT_ROWS = 64  # rows whose keys and values are computed at once; never changes a result
MAX_DEPTH = 15  # tokens drafted at once: as many as the longest verify block has
MAX_KEPT = 8  # hidden rows kept for rewinding, one each
MAX_GRAPHS = 96


@dataclass(frozen=True)
class MTPModel:
    """Everything a pass of the block reads but its cache and scratch."""

    config: object  # TargetConfig of one layer: the block's
    layer: DeviceLayer
    eh_proj: object  # PackedMatrix (hidden_dim, 2 * hidden_dim)
    enorm: object  # (hidden_dim,) float32
    hnorm: object
    head_norm: object
    target_norm: object  # the target's final norm
    embedding: object  # EmbeddingTable, the target's unless the block has its own
    head: object  # PackedMatrix (vocab_size, hidden_dim), as embedding

    def matrices(self):
        """Yield what rows are multiplied with."""
        yield self.eh_proj
        yield from present(self.layer, MATRICES)
        yield self.head


def load_mtp(ops, target, model, allocator):
    """Pack and upload the MTP block of a bound target.

    Parameters
    ----------
    ops : module
    target : loader.bind.Target
        With ``weights.mtp``.
    model : TargetModel
        Embedding, head, norm and RoPE table are shared, not copied.
    allocator : Allocator

    Returns
    -------
    MTPModel
    """
    config, weights = target.config, target.weights.mtp
    packer = Packer(ops, allocator, 0, None)
    pairs = zip(config.layers, model.layers, strict=True)
    # the block turns like the attention layers; there is at least one, see block_config
    table = next(la.rope_table for c, la in pairs if c.rope == config.mtp.rope)
    embedding = model.embedding
    if weights.token_embd is not None:
        ref = weights.token_embd
        embedding = allocator.count("embedding", ops.embedding_table(ref.raw, ref.type, ref.shape[1]))
    return MTPModel(
        config=block_config(config),
        layer=load_layer(packer, weights.layer, table),
        eh_proj=packer.matrix(weights.eh_proj),
        enorm=packer.vector(weights.enorm),
        hnorm=packer.vector(weights.hnorm),
        head_norm=packer.vector(weights.head_norm),
        target_norm=model.output_norm,
        embedding=embedding,
        head=model.output if weights.head is None else packer.matrix(weights.head),
    )


def block_config(config):
    """The block as a target of one layer."""
    return replace(config, layers=(config.mtp,), n_layers=1)


class MTPPass(Pass):
    """Rows of the block: ``cache`` is its LayerCache."""

    def join(self, hidden):
        """x = W [norm(embedding of ids) ; norm(hidden)]."""
        ops, model, c = self.ops, self.model, self.config.hidden_dim
        both = self.work.view("joined", self.n_rows, 2 * c)
        ops.embed_rows(self.h, model.embedding, self.ids, self.config.embedding_scale)
        ops.rms_norm(both[:, :c], self.h, model.enorm, self.config.rms_eps)
        ops.rms_norm(both[:, c:], hidden, model.hnorm, self.config.rms_eps)
        self.linear(self.x, self.quantize(both, (model.eh_proj,)), model.eh_proj)

    def context(self, hidden):
        """Keys and values of rows whose predictions are not wanted."""
        self.join(hidden)
        self.attention(self.config.layers[0], self.model.layer, self.cache, slice(0, 0))

    def predict(self, hidden, out, logits):
        """``out`` = the block's normed output, ``logits`` the head's, of all rows."""
        layer, rows = self.config.layers[0], slice(0, self.n_rows)
        self.join(hidden)
        self.attention(layer, self.model.layer, self.cache, rows)
        self.feed_forward(layer, self.model.layer, rows)
        self.ops.rms_norm(out, self.x, self.model.head_norm, self.config.rms_eps)
        self.linear(logits, self.quantize(out, (self.model.head,)), self.model.head)


class MTPRunner:
    """The MTP block in one conversation.

    Parameters
    ----------
    ops : module
    model : MTPModel
    work : Workspace
        From ``mtp_workspace``; shared by the conversations of an engine.
    n_ctx : int
    kv_type : {"f16", "f32"}
    max_rows : int
        Rows observed at once, at most.

    Attributes
    ----------
    length : int
        Committed rows of the target that were observed.
    allocator : Allocator
    source : DraftSource
        Where drafts are left.
    """

    def __init__(self, ops, model, work, n_ctx, kv_type, max_rows):
        self._ops, self._model, self._work = ops, model, work
        self.allocator = Allocator(ops)
        config = model.config
        capacity = layer_capacity(None, n_ctx, max_rows, ops.CHUNK)
        k, v = ops.kv_cache(config.mtp.n_kv_heads, config.head_dim, capacity, kv_type)
        self.cache = LayerCache(
            self.allocator.count("kv", k), self.allocator.count("kv", v), capacity, None
        )
        c, empty = config.hidden_dim, self.allocator.empty
        # row i + 1: the hidden row of the i-th observed token; row 0: of the one before them
        self._hidden = empty("scratch", (1 + max_rows, c), np.float32)
        self._chain = empty("scratch", (1 + MAX_DEPTH, c), np.float32)  # row i: input of step i
        self._carry = empty("scratch", (2, c), np.float32)  # row ``_turn``: that of length - 1
        self._io = empty("io", (2, max_rows), np.int32)  # ids, positions
        self._at = empty("io", (MAX_DEPTH,), np.int32)  # positions of the steps
        # ids: anchor and drafts; whether the logits of each step are finite
        self._out = empty("io", (2, 1 + MAX_DEPTH), np.int32)
        self.source = DraftSource(self._out[0, 1:], self._out.reshape(-1))
        self._asked = 0  # tokens of the last draft
        self._host = np.zeros((2, max_rows), np.int32)
        self._ops.copy_in(self._carry, np.zeros((2, c), np.float32))
        self._graphs = OrderedDict()
        self.length, self._turn = 0, 0
        self._observed = 0
        self._kept = OrderedDict()  # length -> hidden row before it, host

    # -- rows of the target -------------------------------------------------------------------

    def observe(self, tokens, taps):
        """Take evaluated rows; ``commit`` or ``rollback`` follows.

        Parameters
        ----------
        tokens : sequence of int
        taps : buffer of shape (len(tokens), 1, hidden_dim), float32
            Residuals that leave the target's last layer.
        """
        ops, n = self._ops, len(tokens)
        self._observed = 0
        ops.copy(self._hidden[:1], self._carry[self._turn : self._turn + 1])
        eps = self._model.config.rms_eps
        ops.rms_norm(self._hidden[1 : n + 1], taps[:, 0], self._model.target_norm, eps)
        self._host[0, :n] = tokens
        first = self.length - 1  # -1: no hidden row before the first token, so nothing is written
        self._host[1, :n] = np.arange(first, first + n)
        ops.copy_in(self._io, self._host)
        for start in range(0, n, CONTEXT_ROWS):
            self._graph(("context", start, min(CONTEXT_ROWS, n - start))).launch()
        self._observed = n

    def commit(self, n):
        """Keep the first ``n`` observed rows."""
        if not 0 <= n <= self._observed:
            raise RuntimeError(f"commit of {n} rows, {self._observed} were observed")
        if n:
            turn = 1 - self._turn
            self._ops.copy(self._carry[turn : turn + 1], self._hidden[n : n + 1])
            self._turn, self.length = turn, self.length + n
        self._observed = 0

    def rollback(self):
        """Drop observed rows."""
        self._observed = 0

    def checkpoint(self):
        """Make ``rewind`` to the committed length possible later."""
        self._kept[self.length] = self._ops.download(self._carry[self._turn])
        self._kept.move_to_end(self.length)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def rewind(self, length):
        """Keep at most the first ``length`` rows; return how many are kept."""
        self.rollback()
        if length < self.length:
            length = max((at for at in self._kept if at <= length), default=0)
            if length:
                host = np.stack([self._kept[length]] * 2)
                self._ops.copy_in(self._carry, host)
            self.length = length
        for at in [at for at in self._kept if at > self.length]:
            del self._kept[at]
        return self.length

    # -- drafts -------------------------------------------------------------------------------

    def draft(self, anchor, n):
        """Return ``n`` greedy tokens to follow ``anchor``: ``n`` passes, one copy each way.

        Raises
        ------
        NumericsError
            If logits are not finite.
        """
        self.start(anchor, n)
        return self.learn(self._ops.download(self._out).reshape(-1))

    def start(self, anchor, n):
        """As ``draft``, but leave the tokens in ``source``; ``learn`` follows before anything else."""
        self._begin(anchor)
        self._graph(("steps", 0, n)).launch()
        self._asked = n

    def learn(self, words):
        """Return the tokens that were started.

        Parameters
        ----------
        words : ndarray of int32
            Begins with a host copy of ``source.box``.

        Raises
        ------
        NumericsError
            As ``draft``.
        """
        ids, finite = words[: self._out.size].reshape(2, -1)
        self._check(finite[: self._asked])
        return tuple(ids[1 : self._asked + 1].tolist())

    def draw(self, anchor, n, choose):
        """As ``draft``, each token chosen on the host: ``choose(logits) -> token``."""
        self._begin(anchor)
        found = []
        for step in range(n):
            self._graph(("steps", step, 1)).launch()
            self._check(self._ops.download(self._out)[1, step : step + 1])
            token = choose(self._ops.download(self._work.logits[0]))
            self._ops.copy_in(self._out[0, step + 1 : step + 2], np.array([token], np.int32))
            found.append(token)
        return found

    def _begin(self, anchor):
        ops, first = self._ops, self.length - 1
        if first < 0:
            raise RuntimeError("no row was committed; the block needs one before it drafts")
        ops.copy(self._chain[:1], self._carry[self._turn : self._turn + 1])
        ops.copy_in(self._out[0, :1], np.array([anchor], np.int32))
        ops.copy_in(self._at, np.arange(first, first + MAX_DEPTH, dtype=np.int32))

    def _check(self, finite):
        if not finite.all():
            raise NumericsError(
                f"the MTP block's logits at position {self.length} are not finite, expected "
                "numbers; decode without it"
            )

    # -- recording ----------------------------------------------------------------------------

    def _graph(self, key):
        graph = self._graphs.get(key)
        if graph is None:
            with self._ops.capture() as graph:
                self._record(*key)
            self._graphs[key] = graph
            while len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(key)
        return graph

    def _record(self, kind, start, n):
        if kind == "context":
            rows = slice(start, start + n)
            one = self._pass(self._io[0, rows], self._io[1, rows])
            one.context(self._hidden[rows])
            return
        for step in range(start, start + n):
            ids, finite = self._out[0], self._out[1]
            one = self._pass(ids[step : step + 1], self._at[step : step + 1])
            # the last step's output goes to a row of its own, so that every step is alike
            logits = self._work.logits[:1]
            one.predict(self._chain[step : step + 1], self._chain[step + 1 : step + 2], logits)
            self._ops.check_finite(finite[step : step + 1], logits)
            self._ops.argmax(ids[step + 1 : step + 2], logits)

    def _pass(self, ids, positions):
        return MTPPass(self._ops, self._model, self._work, self.cache, ids, positions)


def mtp_workspace(ops, model, allocator, activations):
    """Scratch for ``MTPRunner``."""
    return Workspace(
        allocator, ops, model.config, model.matrices(), CONTEXT_ROWS, 1, activations,
        {"joined": 2 * model.config.hidden_dim},
    )  # fmt: skip


def mtp_refs(weights):
    """Yield every projection of the block that is packed."""
    yield weights.eh_proj
    yield from present(weights.layer, MATRICES)
    if weights.head is not None:
        yield weights.head


def mtp_vectors(weights):
    """Yield every norm of the block."""
    yield from present(weights.layer, VECTORS)
    yield from (weights.enorm, weights.hnorm, weights.head_norm)
