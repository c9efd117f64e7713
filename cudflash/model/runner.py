"""One sequence on a target: its caches, its captured passes, prefill in chunks.

Owns when a pass is captured and replayed, and the pairing of passes with cache transactions. Must
not know sampling or text. Invariant: a pass of a given shape is recorded once on fixed buffers and
replayed; what differs between replays (ids, positions) lies in two int32 buffers.
"""

from collections import OrderedDict

import numpy as np

from cudflash.model.buffers import Allocator
from cudflash.model.cache import TargetCache
from cudflash.model.transformer import ALL, LAST, NONE, Pass, selected_rows, tap_buffer

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

    Attributes
    ----------
    cache : TargetCache
    tokens : list of int
        Committed ids; as long as ``cache.length``.
    allocator : Allocator
        What this sequence has allocated.
    """

    def __init__(self, ops, model, work, n_ctx, kv_type):
        self._ops, self._model, self._work = ops, model, work
        self.allocator = Allocator(ops)
        self.cache = TargetCache(
            ops, model.config, n_ctx, kv_type, work.max_rows, self.allocator
        )
        # ids and positions together, filled on the host and copied at once
        self._inputs = self.allocator.empty("io", (2, work.max_rows), np.int32)
        self._host_inputs = np.zeros((2, work.max_rows), np.int32)
        self._all_positions = np.arange(n_ctx, dtype=np.int32)
        self.tokens = []
        self._block = []  # ids of the open block
        self._graphs = OrderedDict()
        self._taps = ()
        self._tap_buffers = {}  # by number of taps: what one answer taps, the next may not

    @property
    def max_rows(self):
        """Rows of the largest pass."""
        return self._work.max_rows

    def release(self):
        """Let go of model and caches, whoever still holds the runner."""
        self._graphs.clear()
        self._tap_buffers.clear()
        self._model = self._work = self._inputs = self.allocator = None
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
        at = self._work.logit_rows + slot
        # by way of the host: quicker than an op outside a recorded pass
        self._ops.copy_in(buffer[at], self._ops.download(buffer[0]))

    def kept_taps(self, n_rows):
        """Buffer (n_rows, n_taps, hidden_dim) of the rows kept in the first places."""
        first = self._work.logit_rows
        return self._tap_buffers[len(self._taps)][first : first + n_rows]

    def drop_kept(self, n_rows, left):
        """Move the ``left`` rows after the first ``n_rows`` kept ones to their places."""
        later = self._ops.download(self.kept_taps(n_rows + left)[n_rows:])
        self._ops.copy_in(self.kept_taps(left), later)

    # -- passes ---------------------------------------------------------------------------------

    def step(self, tokens, which=LAST, head=True):
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
        """
        n = len(tokens)
        first = self.cache.begin(n)
        self._block = tokens
        try:
            self._host_inputs[0, :n] = tokens
            self._host_inputs[1, :n] = self._all_positions[first : first + n]
            self._ops.copy_in(self._inputs, self._host_inputs)
            self._graph((n, which, head and which != NONE, self._taps)).launch()
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
        only_head = key[0] == "head"
        n = self._work.max_rows if only_head else key[0]
        ids, positions = self._inputs[0, :n], self._inputs[1, :n]
        one = Pass(self._ops, self._model, self._work, self.cache, ids, positions)
        with self._ops.capture() as graph:
            if only_head:
                one.head(slice(key[1], key[2]))
            else:
                _, which, head, taps = key
                one.forward(which, taps, self.tap_rows(n))
                if head:
                    one.head(selected_rows(n, which))
        return graph


__all__ = ["ALL", "LAST", "NONE", "Runner"]
