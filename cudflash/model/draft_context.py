"""What a draft remembers of committed tokens: keys and values per draft layer, float32.

Owns which rows are held and in which slot. Must not know what a row means or how it is made.

A windowed layer keeps the first ``sink`` positions (position p in slot p of the sink cache) and a
ring of later ones (slot ``p % capacity``); a full layer keeps all of them in a ring that never
wraps. The rows of a block are written past the committed ones, into the ring, and never kept: true
rows overwrite them. The ring is larger than the window by a block and ``SLACK`` rows, so that
tentative rows destroy no visible row, and a conversation can be rewound a little after the ring has
wrapped. Invariant: while ``ready``, the visible rows are those of a context that was given exactly
the committed rows, whatever else happened to this one; a rewind that cannot keep this says so.

Dead slots hold anything, NaN included.
"""

import hashlib
from dataclasses import dataclass, fields

import numpy as np

from cudflash.errors import ContextLengthError

KV_TYPE = "f32"
_ITEM_BYTES = 4
SLACK = 64  # tentative rows of one transaction at most
_K_TILE = 16  # positions that lie together in a key cache


@dataclass(frozen=True)
class DraftContextGeometry:
    """How much of the past a draft may attend to; part of a pair's identity."""

    layers: int
    elements_per_token: int  # of keys, and of values, in one layer
    sink: int
    window: int | None  # of the layers that slide; None when none does
    full_layers: int = 0  # layers that see the whole context
    n_ctx: int | None = None  # positions they see; None when there is no such layer

    @classmethod
    def of(cls, config, n_ctx):
        """Geometry of a DraftConfig in a context of ``n_ctx`` positions."""
        full = sum(layer.window is None for layer in config.layers)
        return cls(
            config.n_layers, config.n_kv_heads * config.head_dim, config.sink, config.window,
            full, n_ctx if full else None,
        )  # fmt: skip

    @property
    def row_limit(self):
        """Committed rows that one layer attends to at most; the larger kind of layer counts."""
        windowed = 0 if self.window is None else self.sink + self.window
        return max(windowed, self.n_ctx or 0)

    @property
    def byte_limit(self):
        """Bytes of the rows that all layers attend to at most, without the slack of the rings."""
        windowed = 0 if self.window is None else self.sink + self.window
        rows = (self.layers - self.full_layers) * windowed + self.full_layers * (self.n_ctx or 0)
        return 2 * _ITEM_BYTES * self.elements_per_token * rows

    def difference(self, other):
        """First field in which two geometries differ: (name, own value, other value), or None."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return field.name, mine, theirs
        return None


@dataclass(frozen=True)
class HeldRows:
    """What a draft remembers at the moment."""

    length: int  # committed rows of the conversation
    rows: int  # that the layer holding most has, of ``DraftContextGeometry.row_limit``
    n_bytes: int  # of the rows of all layers, of ``DraftContextGeometry.byte_limit``
    window_start: int  # position of the first row past the pinned ones


def ring_capacity(window, n_ctx, block_size, chunk):
    """Slots of a layer's ring, in whole chunks."""
    everything = n_ctx + block_size
    needed = everything if window is None else min(everything, window + block_size + SLACK)
    return -(-needed // chunk) * chunk


def context_bytes(config, n_ctx, chunk):
    """Bytes that a context allocates, slack and sinks included."""
    row = 2 * _ITEM_BYTES * config.n_kv_heads * config.head_dim
    slots = 0
    for layer in config.layers:
        slots += ring_capacity(layer.window, n_ctx, config.block_size, chunk)
        if layer.window is not None:
            slots += -(-config.sink // chunk) * chunk
    return row * slots


@dataclass(frozen=True)
class DraftLayerCache:
    """Keys and values of one draft layer."""

    k: object  # (n_kv_heads, capacity / 16, head_dim, 16) float32
    v: object  # (n_kv_heads, capacity, head_dim) float32
    sink_k: object | None  # as k; None without a sink
    sink_v: object | None
    capacity: int  # slots of the ring
    window: int | None
    causal: bool


class DraftContext:
    """Context rows of all draft layers and the transaction over them.

    Parameters
    ----------
    ops : module
    config : DraftConfig
    n_ctx : int
        Positions that may be committed.
    allocator : Allocator
    hold_all : bool
        Hold every row in windowed layers, too; what is attended to stays the same.

    Attributes
    ----------
    length : int
        Committed rows; the anchor of the next block gets this position.
    pending : int
        Tentative rows of the open transaction, 0 when none is open.
    sink : int
        Pinned positions of windowed layers.
    layers : tuple of DraftLayerCache
    geometry : DraftContextGeometry
    bytes_moved : int
        Bytes that commit, rollback and rewind have copied: none.
    """

    def __init__(self, ops, config, n_ctx, allocator, hold_all=False):
        self._ops = ops
        self.n_ctx, self.block_size = n_ctx, config.block_size
        self.window = config.window
        self.sink = 0 if config.window is None else config.sink
        self.geometry = DraftContextGeometry.of(config, n_ctx)
        self.length = self.pending = self.bytes_moved = 0
        self._oldest = 0  # ring rows of windowed layers from here to length are intact
        self._may_skip = not hold_all and all(la.window is not None for la in config.layers)

        def caches(capacity):
            pair = ops.kv_cache(config.n_kv_heads, config.head_dim, capacity, KV_TYPE)
            return [allocator.count("kv", cache) for cache in pair]

        def make(layer):
            window = None if hold_all else layer.window
            capacity = ring_capacity(window, n_ctx, config.block_size, ops.CHUNK)
            sink = (None, None)
            if layer.window is not None and self.sink:
                sink = caches(-(-self.sink // ops.CHUNK) * ops.CHUNK)
            return DraftLayerCache(*caches(capacity), *sink, capacity, layer.window, layer.causal)

        self.layers = tuple(make(layer) for layer in config.layers)
        rings = [layer.capacity for layer in self.layers if layer.window is not None]
        self._capacity = rings[0] if rings else None

    # -- transaction ----------------------------------------------------------------------------

    def begin(self, n_rows):
        """Open a transaction of 1 to ``SLACK`` rows and return the position of its first row.

        Raises
        ------
        ContextLengthError
            If they do not fit the context.
        """
        self._check_closed()
        if not 1 <= n_rows <= SLACK:
            raise RuntimeError(f"a transaction has {n_rows} rows, expected 1 to {SLACK}")
        self._check_room(n_rows)
        self._overwrite(self.length + n_rows)
        self.pending = n_rows
        return self.length

    def commit(self, n_rows):
        """Keep the first ``n_rows`` rows of the open transaction and drop the others."""
        if not 0 <= n_rows <= self.pending:
            raise RuntimeError(f"commit of {n_rows} rows, {self.pending} are tentative")
        self.length += n_rows
        self.pending = 0

    def rollback(self):
        """Drop the open transaction; does nothing when none is open."""
        self.pending = 0

    def reserve(self, n_rows):
        """Return the position of a block of ``n_rows`` rows that will be written and not kept."""
        self._check_closed()
        if not 1 <= n_rows <= self.block_size:
            raise RuntimeError(f"a block has {n_rows} rows, expected 1 to {self.block_size}")
        self._overwrite(self.length + n_rows)
        return self.length

    # -- gaps -----------------------------------------------------------------------------------

    def skippable(self, n_rows):
        """How many of the next ``n_rows`` rows need not be written, when all of them will follow.

        Those that the ring would have lost by the first block after them; never pinned rows, and
        none where a layer sees everything.
        """
        if not self._may_skip or self.length < self.sink:
            return 0
        lost = self.length + n_rows + self.block_size - self._capacity  # positions before this one
        return min(n_rows, max(0, lost - self.length))

    @property
    def reach(self):
        """Rows that have to follow skipped ones until it is ``ready``; None: none can be skipped."""
        return None if not self._may_skip or self.length < self.sink else self.window

    def skip(self, n_rows):
        """Count ``n_rows`` rows as committed without their keys and values.

        The context is not ``ready`` until as many rows have followed as the window holds.
        """
        self._check_closed()
        if not self._may_skip or self.length < self.sink:
            raise RuntimeError("rows can be skipped only past the sink, and only in sliding layers")
        self._check_room(n_rows)
        self._oldest = self.length + n_rows  # first: an interrupt then loses rows, not the truth
        self.length += n_rows

    # -- rewinding ------------------------------------------------------------------------------

    @property
    def ready(self):
        """Whether every row is held that a block at ``length`` may see."""
        return self.keepable(self.length) == self.length

    def keepable(self, length):
        """How many leading rows a rewind to ``length`` would keep: ``length``, or the sink's.

        Rows that a ring has lost cannot be made again from what is left; the pinned rows are never
        lost.
        """
        if not 0 <= length <= self.length:
            raise RuntimeError(f"rewind to {length}, but {self.length} rows are committed")
        if self.window is None or length <= self.sink:
            return length
        oldest_needed = max(self.sink, length - self.window)
        return length if oldest_needed >= self._oldest else self.sink

    def rewind(self, length):
        """Keep at most the first ``length`` rows; return how many are kept, ``keepable(length)``."""
        self._check_closed()
        self.length = self.keepable(length)
        if self.length <= self.sink:
            self._oldest = self.length
        return self.length

    # -- what a block sees ----------------------------------------------------------------------

    def spans(self, window, causal, n_rows):
        """Positions [lo, hi) that every row of a block at ``length`` may see.

        Returns
        -------
        ndarray of shape (n_rows, 2), int32
            Pinned rows, which are seen as well, are not excluded.
        """
        first, per_position = self.span_terms(window, causal, n_rows)
        return np.maximum(first + self.length * per_position, 0).astype(np.int32)

    @staticmethod
    def span_terms(window, causal, n_rows):
        """Terms of ``spans``: [lo, hi) = max(0, first + length * per_position).

        Returns
        -------
        first, per_position : ndarray of shape (n_rows, 2), int32
        """
        row = np.arange(n_rows)
        first, per_position = np.zeros((n_rows, 2), np.int32), np.ones((n_rows, 2), np.int32)
        if window is None:
            per_position[:, 0] = 0
        else:
            first[:, 0] = row - (window - 1)
        first[:, 1] = row + 1 if causal else n_rows
        return first, per_position

    @property
    def n_pinned(self):
        """Rows in the sink caches."""
        return min(self.length, self.sink)

    def held(self):
        """Return the HeldRows: rows that a block at ``length`` may see and that are intact."""
        rows, window_start = [], self.length
        for layer in self.layers:
            pinned = 0 if layer.window is None else self.n_pinned
            first = pinned
            if layer.window is not None:
                first = min(max(pinned, self._oldest, self.length - layer.window), self.length)
            rows.append(pinned + self.length - first)
            window_start = min(window_start, first)
        row_bytes = 2 * _ITEM_BYTES * self.geometry.elements_per_token
        return HeldRows(self.length, max(rows), row_bytes * sum(rows), window_start)

    # -- inspection, for tests and digests ------------------------------------------------------

    def retained(self, index):
        """Positions of layer ``index`` that count: all, or the sink's and a window's worth."""
        window = self.layers[index].window
        first = 0 if window is None else max(self.n_pinned, self.length - window)
        pinned = 0 if window is None else self.n_pinned
        return np.concatenate([np.arange(pinned), np.arange(first, self.length)]).astype(np.int64)

    def rows(self, index, positions):
        """Read rows of layer ``index``: (k, v), each of shape (n, n_kv_heads, head_dim)."""
        layer = self.layers[index]
        positions = np.asarray(positions, np.int64)
        k, v = self._read(layer.k, layer.v, positions % layer.capacity)
        if layer.sink_k is not None:
            pinned = positions < self.n_pinned
            k[pinned], v[pinned] = self._read(layer.sink_k, layer.sink_v, positions[pinned])
        return k, v

    def _read(self, cache_k, cache_v, slot):
        k = self._ops.download(cache_k)[:, slot // _K_TILE, :, slot % _K_TILE]  # (n, Hkv, D)
        v = self._ops.download(cache_v)[:, slot].swapaxes(0, 1)
        return np.ascontiguousarray(k), np.ascontiguousarray(v)

    def digest(self):
        """SHA-256 over the length and every retained row: equal states have equal digests."""
        digest = hashlib.sha256(str(self.length).encode())
        for index in range(len(self.layers)):
            for rows in self.rows(index, self.retained(index)):
                digest.update(rows.tobytes())
        return digest.hexdigest()

    # -- pieces ---------------------------------------------------------------------------------

    def _overwrite(self, end):
        """Note that slots of positions before ``end`` are about to be written."""
        if self._capacity is not None:
            self._oldest = max(self._oldest, end - self._capacity)

    def _check_closed(self):
        if self.pending:
            raise RuntimeError(f"{self.pending} rows are tentative; commit or roll them back")

    def _check_room(self, n_rows):
        if self.length + n_rows > self.n_ctx:
            raise ContextLengthError(
                f"the draft context holds {self.n_ctx} tokens, {self.length} are in use and "
                f"{n_rows} more do not fit; load the model with a larger n_ctx"
            )
