"""A draft in use: its context kept in step with the target, blocks run, tokens read back.

Owns when a pass is captured and replayed. Must not know targets, acceptance or text. Invariant:
``length`` equals the rows the target has committed whenever ``propose`` is called; nothing is
allocated in a round, and one small copy goes each way.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from cudflash.errors import NumericsError
from cudflash.model.buffers import Allocator
from cudflash.model.draft import BlockPass, ContextPass
from cudflash.model.draft_buffers import CONTEXT_ROWS, InBox, OutBox
from cudflash.model.draft_context import DraftContext
from cudflash.model.repeats import Repeats

MAX_GRAPHS = 96  # recorded passes kept: one per number of context rows, one per kind of block


@dataclass(frozen=True)
class DraftOutcome:
    """What one block proposes."""

    tokens: tuple[int, ...]  # greedy draft tokens
    scores: tuple[float, ...] | None  # DFlash2: score of every choice, selector included
    confidence: tuple[float, ...] | None  # DFlash2: softmax of that score among the candidates
    echo: int  # most likely token of row 0: the anchor, when the conditioning is right


@dataclass(frozen=True)
class DraftBlock:
    """One draft pass, for tests and diagnosis; n context rows, B block rows."""

    context_k: np.ndarray  # (n_layers, n, n_kv_heads, head_dim) float32, normed and rotated
    context_v: np.ndarray  # as context_k
    hidden: np.ndarray  # (B, hidden_dim) float32, after the final norm
    logits: np.ndarray  # (B - 1, vocab_size) float32, rows 1 ..
    tokens: tuple[int, ...]  # B - 1 greedy draft tokens
    outcome: DraftOutcome


class DraftRunner:
    """The draft of one conversation.

    Parameters
    ----------
    ops : module
    model : DraftModel
    work : DraftWorkspace
        Shared by the sessions of an engine; the caller makes sure that passes do not overlap.
    n_ctx : int, optional
        Positions that may be committed, the model's if absent.
    hold_all : bool
        Hold every context row, for inspection; no bit of a proposal changes.

    Attributes
    ----------
    context : DraftContext
    allocator : Allocator
        What this conversation has allocated.
    source : DraftSource
        Where a block leaves its tokens.
    """

    def __init__(self, ops, model, work, n_ctx=None, hold_all=False):
        self._ops, self._model, self._work = ops, model, work
        self.config = model.config
        self.allocator = Allocator(ops)
        n_ctx = model.n_ctx if n_ctx is None else n_ctx
        self.context = DraftContext(ops, model.config, n_ctx, self.allocator, hold_all)
        self._inbox = InBox(self.allocator, ops, model.config)
        self._outbox = OutBox(self.allocator, ops, model.config)
        self.source = self._outbox.source
        self._positions = self.allocator.empty("io", (3, CONTEXT_ROWS), np.int32)
        self._host = np.empty((3, CONTEXT_ROWS), np.int32)
        self._rows = np.arange(CONTEXT_ROWS, dtype=np.int32)
        self._graphs = OrderedDict()
        owners = tuple(zip(model.layers, self.context.layers, strict=True))
        self._repeats = Repeats(ops, model.config.layers, owners)
        self._start = None  # length before the observed rows
        self._asked = 0  # draft rows of the last block

    def release(self):
        """Let go of model and context, whoever still holds the runner."""
        self._graphs.clear()
        self._model = self._work = self._inbox = self._outbox = self._positions = None
        self._repeats = self.allocator = None
        self.context.layers = ()

    @property
    def length(self):
        """Committed rows."""
        return self.context.length

    # -- committed rows -------------------------------------------------------------------------

    def observe(self, tap_rows, n, remaining=0):
        """Append ``n`` committed rows.

        Parameters
        ----------
        tap_rows : buffer of shape (at least n, n_taps, hidden_dim), float32
            Target residuals in the order of ``config.taps``; copied.
        n : int
        remaining : int
            Rows that are sure to follow before the next block (the rest of a prompt). Rows that no
            block will see are then left out, which saves time and changes nothing.
        """
        self.write(tap_rows, n, remaining)
        self.commit(n)

    def write(self, tap_rows, n, remaining=0):
        """Compute ``n`` rows past the committed ones; ``commit`` or ``rollback`` must follow.

        Parameters as in ``observe``. On an exception nothing is left open.
        """
        if self._start is not None:
            raise RuntimeError("observed rows are tentative; commit or roll them back")
        self._start = self.context.length
        flat = tap_rows.reshape(len(tap_rows), len(self.config.taps) * self.config.hidden_dim)
        context, done = self.context, 0
        try:
            while done < n:
                context.commit(context.pending)
                rows = min(n - done, context.skippable(n - done + remaining))
                if rows:
                    context.skip(rows)
                else:
                    rows = min(CONTEXT_ROWS, n - done)
                    if n > CONTEXT_ROWS and context.length < context.sink:
                        rows = min(rows, context.sink - context.length)  # then some may be skipped
                    self._write_rows(flat[done : done + rows])
                done += rows
        except BaseException:
            self.rollback()
            raise

    def commit(self, n):
        """Keep the first ``n`` of the rows written last and drop the others."""
        if self._start is None:
            raise RuntimeError("no rows are tentative; write some")
        kept = self._start + n
        first = self.context.length  # rows before it were committed on the way
        if not self._start <= kept <= first + self.context.pending:
            raise RuntimeError(f"commit of {n} rows, but fewer were written")
        self._start = None
        if kept >= first:
            self.context.commit(kept - first)
        else:
            self.context.rollback()
            self.context.rewind(kept)

    def rollback(self):
        """Drop the rows written last; does nothing when there are none.

        After more than ``CONTEXT_ROWS`` rows, or a gap, the ring may have lost earlier ones;
        ``length`` then tells what is left.
        """
        start, self._start = self._start, None
        self.context.rollback()
        if start is not None and start < self.context.length:
            self.context.rewind(start)

    def keepable(self, length):
        """How many leading rows ``rewind(length)`` would keep."""
        return self.context.keepable(length)

    def rewind(self, length):
        """Keep at most the first ``length`` rows; return how many are kept."""
        self.rollback()
        return self.context.rewind(min(length, self.context.length))

    def digest(self):
        """SHA-256 of the state: equal for equal committed rows, however they came in."""
        return self.context.digest()

    def _write_rows(self, flat):
        n, width = flat.shape
        first = self.context.begin(n)
        every, ring, sink = self._host
        np.add(self._rows, first, out=every)
        ring[:] = every
        sink[:] = -1
        n_pinned = min(max(self.context.sink - first, 0), n)
        if n_pinned:
            ring[:n_pinned], sink[:n_pinned] = -1, every[:n_pinned]
        self._ops.copy_in(self._positions, self._host)
        self._ops.move(self._work.view("taps", n, width), flat)
        self._graph(("context", n)).launch()

    # -- blocks ---------------------------------------------------------------------------------

    def propose(self, anchor, n_tokens, block=None):
        """Run one block and return its first ``n_tokens`` draft tokens.

        Parameters
        ----------
        anchor : int
            Newest committed token; its row is not part of the context yet.
        n_tokens : int
            1 to block - 1.
        block : int, optional
            Rows of the block; the trained number if absent. Fewer is another conditioning, since
            rows see one another.

        Returns
        -------
        DraftOutcome

        Raises
        ------
        NumericsError
            If logits or scores are not finite.
        """
        self.start(anchor, n_tokens, block)
        return self._outcome(self._outbox.read())

    def start(self, anchor, n_tokens, block=None):
        """As ``propose``, but leave the tokens in ``source``; ``learn`` follows before anything else.

        Parameters as of ``propose``.
        """
        block = self.config.block_size if block is None else block
        if not 2 <= block <= self.config.block_size or not 1 <= n_tokens < block:
            raise RuntimeError(
                f"{n_tokens} tokens from a block of {block} rows, expected 1 to rows - 1 from 2 to "
                f"{self.config.block_size}"
            )
        if not self.context.ready:
            raise RuntimeError("the draft context lacks rows that the block would see; rewind it")
        self._run_block(anchor, n_tokens, block)

    def learn(self, words):
        """Return the DraftOutcome of the block that was started.

        Parameters
        ----------
        words : ndarray of int32
            Begins with a host copy of ``source.box``.

        Raises
        ------
        NumericsError
            As ``propose``.
        """
        return self._outcome(self._outbox.parts(words))

    def _outcome(self, parts):
        finite, ids, scores, confidence = parts
        n_tokens = self._asked
        if not finite:
            raise NumericsError(
                f"the draft's logits or scores at position {self.length} are not finite, expected "
                "numbers; decode without the draft"
            )
        tokens = tuple(ids[1 : n_tokens + 1])
        if self.config.kind != "dflash2":
            return DraftOutcome(tokens, None, None, ids[0])
        return DraftOutcome(
            tokens, tuple(scores[:n_tokens]), tuple(confidence[:n_tokens]), ids[0]
        )  # fmt: skip

    def time_block(self, anchor, n_tokens, block):
        """Do what ``propose`` does and propose nothing, for measurements: rows may be missing."""
        self._run_block(anchor, n_tokens, block)
        self._outbox.read()

    def _run_block(self, anchor, n_tokens, block):
        self.context.reserve(block)
        self._inbox.fill(self.context, anchor, self.config.mask_token_id, block)
        self._asked = n_tokens
        self._graph(("block", block, n_tokens)).launch()

    def logits(self):
        """Logits of the last block's draft rows: (n_tokens, vocab_size) float32, host copy."""
        return self._ops.download(self._work.logits[1 : self._asked + 1])

    def hidden(self, n_rows):
        """First rows of the last block after the final norm: (n_rows, hidden_dim), host copy."""
        return self._ops.download(self._work.view("hidden", n_rows, self.config.hidden_dim))

    def lattice(self):
        """DFlash2: what the last block's walk chose from, host copies.

        Returns
        -------
        candidate_ids : ndarray of shape (n_tokens, K), int32
            Largest logit first.
        scores : ndarray of shape (n_tokens, K, K), float32
            [row, predecessor among the candidates of the row before, successor]; row 0: the anchor.
        """
        n, k = self._asked, self.config.selector_top_k
        ids = self._ops.download(self._inbox.candidates[1 : n + 1])
        return ids, self._ops.download(self._work.view("lattice", n, k * k)).reshape(n, k, k)

    def unary(self):
        """DFlash2: logits of the last block's candidates, (n_tokens, K) float32, host copy."""
        return self._ops.download(
            self._work.view("unary", self._asked, self.config.selector_top_k)
        )

    # -- recording ------------------------------------------------------------------------------

    def has_recorded(self, block, n_tokens):
        """Whether the pass over such a block, and any pass over context rows, were recorded."""
        contexts = any(key[0] == "context" for key in self._graphs)
        return ("block", block, n_tokens) in self._graphs, contexts

    def _graph(self, key):
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._record(key)
            while len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(key)
        return graph

    def _record(self, key):
        recorder = self._repeats.recorder()
        if key[0] == "context":
            positions = [row[: key[1]] for row in self._positions]
            one = ContextPass(
                self._ops, self._model, self._work, self.context, positions, recorder
            )
        else:
            one = BlockPass(
                self._ops, self._model, self._work, self.context, self._inbox, self._outbox,
                *key[1:], recorder,
            )  # fmt: skip
        with self._ops.capture() as graph:
            one.run()
        return graph


def draft_block(ops, model, work, tap_rows, anchor, block=None):
    """Run one draft pass on a context of its own.

    Parameters
    ----------
    ops, model, work
        As in :class:`DraftRunner`.
    tap_rows : ndarray of shape (n, n_taps, hidden_dim), float32
        Host array, in the order of ``model.config.taps``.
    anchor : int
    block : int, optional
        Rows of the block, the trained number if absent.

    Returns
    -------
    DraftBlock

    Raises
    ------
    ContextLengthError
        For more rows than ``model.n_ctx``.
    """
    block = model.config.block_size if block is None else block
    n = len(tap_rows)
    runner = DraftRunner(ops, model, work, n_ctx=min(max(n, 1), model.n_ctx), hold_all=True)
    if n:
        runner.observe(ops.upload(np.ascontiguousarray(tap_rows, np.float32)), n)
    outcome = runner.propose(anchor, block - 1, block)
    layers = [runner.context.rows(i, range(n)) for i in range(model.config.n_layers)]
    return DraftBlock(
        np.stack([k for k, _ in layers]), np.stack([v for _, v in layers]),
        runner.hidden(block), runner.logits(), outcome.tokens, outcome,
    )  # fmt: skip
