"""One sequence on a target: its caches, its captured passes, prefill in chunks.

Owns when a pass is captured and replayed, and the pairing of passes with cache transactions. Must
not know sampling or text. Invariant: a pass of a given shape is recorded once on fixed buffers and
replayed; what differs between replays (ids, positions) lies in two int32 buffers.
"""

import time
from collections import OrderedDict

import numpy as np

from cudflash.model.buffers import Allocator
from cudflash.model.cache import TargetCache
from cudflash.model.outcome import STOP_IDS
from cudflash.model.transformer import (
    ALL,
    LAST,
    NONE,
    Pass,
    layer_repeats,
    selected_rows,
    tap_buffer,
)

STOP_ROWS, REGULAR_STOPS = 256, 2  # checkpoints of a prompt: see ``Runner.prompt_stops``
KEPT_TAPS = 240  # rows of taps that can be kept for later
MAX_GRAPHS = 48  # recorded passes kept; prefill remainders come in many lengths


class Runner:
    """A sequence of one session.

    Parameters
    ----------
    ops : module
    model : TargetModel
    work : Workspace
        Shared by the sessions of an engine; the caller makes sure that passes do not overlap.
    n_ctx : int
    kv_type : {"f16", "f32"}
    n_checkpoints : int
        Of a recurrent state, for rewinding.

    Attributes
    ----------
    cache : TargetCache
    tokens : list of int
        Committed ids; as long as ``cache.length``.
    allocator : Allocator
        What this sequence has allocated.
    record_ms : float
        Spent on recording passes so far.
    least_record_ms : float or None
        The least that recording one took.
    """

    def __init__(self, ops, model, work, n_ctx, kv_type, n_checkpoints=0):
        self._ops, self._model, self._work = ops, model, work
        self.allocator = Allocator(ops)
        self.cache = TargetCache(
            ops, model.config, n_ctx, kv_type, work.max_rows, self.allocator, n_checkpoints
        )
        # ids and positions together, filled on the host and copied at once
        self._inputs = self.allocator.empty("io", (2, work.max_rows), np.int32)
        self._host_inputs = np.zeros((2, work.max_rows), np.int32)
        self._stops = self.allocator.upload("io", np.full(STOP_IDS, -1, np.int32))
        self._stop_ids = ()
        self._all_positions = np.arange(n_ctx, dtype=np.int32)
        self.tokens = []
        self._block = []  # ids of the open block
        self._graphs = OrderedDict()
        self._repeats = layer_repeats(ops, model, self.cache)
        self.record_ms, self.least_record_ms = 0.0, None
        self._taps = ()
        self._tap_buffers = {}  # by number of taps: what one answer taps, the next may not

    @property
    def max_rows(self):
        """Rows of the largest pass."""
        return self._work.max_rows

    def reset(self, taps=(), source=None):
        """Forget the sequence; buffers and recorded passes stay for the next one.

        Parameters
        ----------
        taps : sequence of int
            Layers that the next one will capture; passes that capture others are dropped, and where
            they leave them.
        source : DraftSource, optional
            Of the drafter that stays as well; passes that read another one's are dropped.
        """
        self.rollback()
        self.rewind(0)
        self._taps, kept = (), ((), tuple(taps))
        for key in [key for key in self._graphs if key[0] != "head"]:
            if key[3] not in kept or key[-1] not in (None, source):
                del self._graphs[key]
        for n_taps in [n for n in self._tap_buffers if n != len(taps)]:
            del self._tap_buffers[n_taps]

    def release(self):
        """Let go of model and caches, whoever still holds the runner."""
        self._graphs.clear()
        self._tap_buffers.clear()
        self._model = self._work = self._inputs = self._stops = self.allocator = None
        self._repeats = None
        self.cache.layers = ()

    # -- taps -----------------------------------------------------------------------------------

    def set_taps(self, layers):
        """Capture the output residual of these layers (0-based) in every following pass."""
        self._taps = tuple(layers)
        n_taps = len(self._taps)
        if n_taps and n_taps not in self._tap_buffers:
            self._tap_buffers[n_taps] = tap_buffer(
                self.allocator, self._work.max_rows, n_taps, self._model.config.hidden_dim
            )

    def tap_rows(self, n_rows):
        """Buffer (n_rows, n_taps, hidden_dim) of the last pass, valid until the next one.

        None where no layers are captured.
        """
        return self._tap_buffers[len(self._taps)][:n_rows] if self._taps else None

    @property
    def n_keepable_taps(self):
        """Rows that ``keep_taps`` has places for: behind those that a pass with logits writes."""
        if not self._taps:
            return 0
        return max(0, min(KEPT_TAPS, self._work.max_rows - self._work.logit_rows))

    def keep_taps(self, slot):
        """Keep the first row of ``tap_rows`` in a place that only a longer pass overwrites.

        Parameters
        ----------
        slot : int
            Below ``n_keepable_taps``.
        """
        buffer = self._tap_buffers[len(self._taps)]
        self._ops.move(buffer[self._work.logit_rows + slot], buffer[0])

    def kept_taps(self, n_rows):
        """Buffer (n_rows, n_taps, hidden_dim) of the rows kept in the first places."""
        first = self._work.logit_rows
        return self._tap_buffers[len(self._taps)][first : first + n_rows]

    def drop_kept(self, n_rows, left):
        """Move the ``left`` rows after the first ``n_rows`` kept ones, no fewer, to their places."""
        self._ops.move(self.kept_taps(left), self.kept_taps(n_rows + left)[n_rows:])

    # -- passes ---------------------------------------------------------------------------------

    def step(self, tokens, which=LAST, head=True, top=0):
        """Open a block of rows and evaluate it; the caller commits or rolls back.

        On any exception the block is rolled back before the exception goes on.

        Parameters
        ----------
        tokens : sequence of int
            At most ``max_rows`` ids; with ``head``, at most ``logit_rows`` selected ones.
        which : {"all", "last", "none"}
            Rows whose final residual, and with ``head`` logits, are wanted.
        head : bool
            Whether to compute logits: row i of ``work.logits`` belongs to selected row i.
        top : int
            Largest logits of each row that the outcome tells, 0 for none.
        """
        self._step(tokens, (len(tokens), which, head and which != NONE, self._taps, top, None))

    def step_drafted(self, anchor, n_drafts, source, top=0):
        """As ``step`` of an anchor and drafts that the device knows and the host does not.

        The outcome tells the decision of ``accept_greedy`` and the source's box as well. ``name``
        says which tokens they were, before any is committed.

        Parameters
        ----------
        anchor, n_drafts : int
        source : DraftSource
        top : int
        """
        key = (1 + n_drafts, ALL, True, self._taps, top, source)
        self._step((anchor, *[0] * n_drafts), key)

    def name(self, tokens):
        """Say which ids the open block has: its first ones, as many as may be committed."""
        self._block = tokens

    def set_stops(self, ids):
        """Tokens after which ``accept_greedy`` decides nothing; at most STOP_IDS."""
        ids = tuple(sorted(ids))
        if ids != self._stop_ids:
            host = np.full(STOP_IDS, -1, np.int32)
            host[: len(ids)] = ids
            self._ops.copy_in(self._stops, host)
            self._stop_ids = ids

    def _step(self, tokens, key):
        n = len(tokens)
        first = self.cache.begin(n)
        self._block = tokens
        try:
            self._host_inputs[0, :n] = tokens
            self._host_inputs[1, :n] = self._all_positions[first : first + n]
            self._ops.copy_in(self._inputs, self._host_inputs)
            self._graph(key).launch()
        except BaseException:
            self.cache.rollback()
            raise

    def commit(self, n_rows):
        """Keep the first rows of the open block."""
        # ids first, then the length that makes them count: an interrupt may come anywhere
        self.tokens[self.cache.length :] = self._block[:n_rows]
        self.cache.commit(n_rows)

    def rollback(self):
        """Drop the open block, and what an interrupted commit or rewind has left."""
        self.cache.rollback()
        del self.tokens[self.cache.length :]

    def rewind(self, length):
        """Keep at most the first ``length`` rows; returns how many (see ``TargetCache``)."""
        kept = self.cache.truncate(length)
        del self.tokens[kept:]
        return kept

    def prompt_stops(self, start, n_prompt, n_same):
        """Positions at which the evaluation of a prompt pauses for a checkpoint, ascending.

        Where the prompt parted from the session's tokens (the next one may part there, too), before
        its last token (the same prompt, or a longer one, may come again), and at most two regular
        ones before, 256 or a power of two times as many rows apart. None without a recurrent state:
        keys and values can be cut anywhere.

        Parameters
        ----------
        start : int
            Rows that are there already.
        n_prompt : int
        n_same : int
            Leading tokens that the prompt has in common with the session's.
        """
        if self.cache.recurrent is None:
            return ()
        apart = STOP_ROWS
        while n_prompt // apart > REGULAR_STOPS:
            apart *= 2
        stops = {n_same, n_prompt - 1, *range(apart, n_prompt, apart)}
        return tuple(sorted(at for at in stops if start < at < n_prompt))

    def checkpoint(self):
        """Make a rewind to the committed length possible, where that needs a state put aside."""
        self.cache.checkpoint()

    def head(self, start, stop):
        """Logits of rows [start, stop) of the last pass, which was run with ALL."""
        self._graph(("head", start, stop)).launch()

    def prefill_chunk(self, tokens, last):
        """Evaluate and commit a part of a prompt; the ``last`` leaves the logits of its last row.

        The result does not depend on how a prompt is cut into parts.

        Parameters
        ----------
        tokens : sequence of int
            1 to ``max_rows`` ids.
        last : bool
        """
        self.step(tokens, LAST if last else NONE)
        self.commit(len(tokens))

    def has_recorded(self, n_rows, which, taps, top):
        """Whether ``step`` with these arguments, and these layers captured, finds its pass recorded."""
        key = (n_rows, which, True, tuple(taps), top)
        return any(known[:5] == key for known in self._graphs)

    def has_recorded_step(self, taps):
        """Whether a pass of one row was recorded with these layers captured, and none without any."""
        known = {key[3] for key in self._graphs if key[0] == 1}
        return tuple(taps) in known and () not in known

    def _graph(self, key):
        graph = self._graphs.get(key)
        if graph is None:
            started = time.perf_counter()
            graph = self._graphs[key] = self._record(key)
            ms = 1e3 * (time.perf_counter() - started)
            self.record_ms += ms
            if key[0] != "head":  # a small one
                self.least_record_ms = min(ms, self.least_record_ms or ms)
            while len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(key)
        return graph

    def _record(self, key):
        only_head = key[0] == "head"
        n = self._work.max_rows if only_head else key[0]
        ids, positions = self._inputs[0, :n], self._inputs[1, :n]
        one = Pass(self._ops, self._model, self._work, self.cache, ids, positions, self._repeats)
        with self._ops.capture() as graph:
            if only_head:
                one.head(slice(key[1], key[2]))
            else:
                _, which, head, taps, top, source = key
                if source is not None:
                    self._copy_words(ids[1:], source.ids[: n - 1])
                one.forward(which, taps, self.tap_rows(n))
                if head:
                    one.head(selected_rows(n, which), top)
                if source is not None:
                    self._tell(ids[1:], source.box)
        return graph

    def _tell(self, drafts, box):
        """Record the decision on drafts, and what their drafter tells, into the outcome."""
        outcome, n = self._work.outcome, len(drafts)
        self._ops.accept_greedy(
            outcome.decision(n), drafts, outcome.next_ids[: n + 1], outcome.finite, self._stops
        )
        self._copy_words(outcome.box(len(box)), box)

    def _copy_words(self, to, source):
        """Record a copy of int32 words, bit for bit."""
        to, source = (words.view(np.float32).reshape(1, -1) for words in (to, source))
        self._ops.copy(to, source)


__all__ = ["ALL", "LAST", "NONE", "Runner"]
