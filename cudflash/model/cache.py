"""Caches of a target: keys and values, full and sliding, and the state of recurrent layers.

Owns which row of which layer is committed, and at which lengths a recurrent state was put aside.
Must not know what a row means. Every layer holds the row of position p in slot ``p % capacity``.
A sliding layer's ring is larger than its window by the rows of the largest block, so tentative rows
never overwrite a row that is visible after they are dropped. Invariant: after ``commit`` or
``rollback`` the visible rows are as if dropped rows had never been written; neither moves a byte,
only the length changes.

Dead slots (never written, dropped, out of the window) hold anything, NaN included: attention must
mask them, not multiply them by zero.

The state of a recurrent layer (``recurrent``) is that of one length. A rewind to another length
needs a checkpoint made there; there are ``n_checkpoints`` of them, the least recently used gives
way. Rows beyond a rewind are other rows from then on, so checkpoints beyond it are dropped.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from cudflash.errors import ContextLengthError, UsageError

KV_ITEM_BYTES = {"f16": 2, "f32": 4}
BLOCK_ROWS = 16  # rows of a block that may be kept in part, by a recurrent state
_K_TILE = 16  # positions that lie together in cache_k


def check_kv_type(kv_type):
    """Raise UsageError unless keys and values can be stored as ``kv_type``."""
    if not isinstance(kv_type, str) or kv_type not in KV_ITEM_BYTES:
        raise UsageError(
            f"kv_type is {kv_type!r}, expected one of {', '.join(KV_ITEM_BYTES)}; pass one of them"
        )


def layer_capacity(window, n_ctx, max_rows, chunk):
    """Slots of a layer: all positions, or its window and the largest block, in whole chunks."""
    needed = n_ctx if window is None else min(n_ctx, window + max_rows)
    return -(-needed // chunk) * chunk


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer."""

    k: object  # (n_kv_heads, capacity / 16, head_dim, 16)
    v: object  # (n_kv_heads, capacity, head_dim)
    capacity: int  # slots
    window: int | None  # None: every earlier position is visible


class TargetCache:
    """Caches of all layers and the transaction over them.

    Parameters
    ----------
    ops : module
        Op set of a backend.
    config : TargetConfig
    n_ctx : int
        Positions that may be written.
    kv_type : {"f16", "f32"}
    max_rows : int
        Largest block that ``begin`` accepts.
    allocator : Allocator
    n_checkpoints : int
        Of recurrent layers; none are made where there are none.

    Attributes
    ----------
    recurrent : RecurrentState or None
    length : int
        Committed rows; the next row gets this position.
    pending : int
        Rows of the open block, 0 when none is open.
    n_ctx, max_rows : int
    bytes_moved : int
        Bytes that commit and rollback have copied: none, because rows stay where they are.
    """

    def __init__(self, ops, config, n_ctx, kv_type, max_rows, allocator, n_checkpoints=0):
        check_kv_type(kv_type)
        self._ops = ops
        self.n_ctx, self.max_rows = n_ctx, max_rows
        self.length = 0
        self.pending = 0
        self.bytes_moved = 0
        self._frontier = 0  # one past the highest position written since the caches were empty
        self.recurrent = None
        self._free = list(range(n_checkpoints))
        self._checkpoints = OrderedDict()  # length -> number of the checkpoint, last used last
        if config.recurrent:
            from cudflash.model.recurrent import RecurrentState

            self.recurrent = RecurrentState(
                ops, config, max_rows, BLOCK_ROWS, allocator, n_checkpoints
            )
        self.layers = tuple(
            self._make_layer(layer, config.head_dim, kv_type, allocator)
            if layer.delta is None else self.recurrent.layer(index)
            for index, layer in enumerate(config.layers)
        )  # fmt: skip

    def _make_layer(self, layer, head_dim, kv_type, allocator):
        capacity = layer_capacity(layer.window, self.n_ctx, self.max_rows, self._ops.CHUNK)
        k, v = self._ops.kv_cache(layer.n_kv_heads, head_dim, capacity, kv_type)
        return LayerCache(allocator.count("kv", k), allocator.count("kv", v), capacity, layer.window)

    # -- transaction --------------------------------------------------------------------------

    def begin(self, n_rows):
        """Open a block of ``n_rows`` tentative rows and return the position of its first row.

        Raises
        ------
        ContextLengthError
            If the block does not fit the context.
        """
        if self.pending:
            raise RuntimeError(f"a block of {self.pending} rows is open; commit or roll it back")
        if not 1 <= n_rows <= self.max_rows:
            raise RuntimeError(f"a block has {n_rows} rows, expected 1 to {self.max_rows}")
        if self.length + n_rows > self.n_ctx:
            raise ContextLengthError(
                f"the context holds {self.n_ctx} tokens, {self.length} are in use and "
                f"{n_rows} more do not fit; load the model with a larger n_ctx"
            )
        if self.recurrent is not None:
            self.recurrent.begin(self.length, n_rows)
        self.pending = n_rows
        self._frontier = max(self._frontier, self.length + n_rows)
        return self.length

    def commit(self, n_rows):
        """Keep the first ``n_rows`` rows of the open block and drop the others."""
        if not 0 <= n_rows <= self.pending:
            raise RuntimeError(f"commit of {n_rows} rows, but the open block has {self.pending}")
        if self.recurrent is not None:
            self.recurrent.commit(n_rows)
        self.length += n_rows
        self.pending = 0

    def rollback(self):
        """Drop the open block; does nothing when none is open."""
        if self.recurrent is not None and self.pending:
            self.recurrent.rollback()
        self.pending = 0

    def open(self, positions):
        """Record what a pass over these positions needs before its first layer."""
        if self.recurrent is not None:
            self.recurrent.open(positions)

    # -- rewinding ----------------------------------------------------------------------------

    def keepable(self, length):
        """How many leading rows ``truncate(length)`` would keep.

        A ring that has moved on may no longer hold the rows that a query at ``length`` sees. They
        cannot be made again from what is left, because the rows they were made from are gone too:
        then everything must be evaluated again. A recurrent state goes back to its last checkpoint
        at or before ``length``, or to the start.
        """
        if not 0 <= length <= self.length:
            raise RuntimeError(f"rewind to {length}, but {self.length} rows are committed")
        for layer in self.layers:
            if not isinstance(layer, LayerCache) or layer.window is None:
                continue
            oldest_needed = max(0, length - layer.window + 1)
            oldest_intact = self._frontier - layer.capacity
            if length and oldest_needed < oldest_intact:
                return 0
        if self.recurrent is None or self.recurrent.reachable(length):
            return length
        return max((at for at in self._checkpoints if at <= length), default=0)

    def truncate(self, length):
        """Rewind to the first ``length`` rows, or to fewer where a ring or a state forbids it.

        Returns
        -------
        int
            Rows kept, ``keepable(length)``; the caller evaluates again from there.
        """
        if self.pending:
            raise RuntimeError(f"a block of {self.pending} rows is open; commit or roll it back")
        kept = self.keepable(length)
        if self.recurrent is not None:
            self._rewind_state(kept)
        self.length = kept
        if self.length == 0:
            self._frontier = 0
        return self.length

    @property
    def holder(self):
        """What decides how far a rewind can go, in words."""
        return "a sliding layer" if self.recurrent is None else "the recurrent state"

    def _rewind_state(self, length):
        for at in [at for at in self._checkpoints if at > length]:
            self._free.append(self._checkpoints.pop(at))
        if not self.recurrent.reachable(length):  # the start always is
            self.recurrent.restore(self._checkpoints[length])
        if length in self._checkpoints:
            self._checkpoints.move_to_end(length)

    # -- checkpoints --------------------------------------------------------------------------

    @property
    def checkpoints(self):
        """Lengths at which the recurrent state was put aside, ascending."""
        return tuple(sorted(self._checkpoints))

    def checkpoint(self):
        """Put the recurrent state aside at the committed length; nothing without one."""
        if self.pending:
            raise RuntimeError(f"a block of {self.pending} rows is open; commit or roll it back")
        if not self.length or not (self._free or self._checkpoints):
            return
        if self.length in self._checkpoints:
            self._checkpoints.move_to_end(self.length)
            return
        if not self._free:
            self._free.append(self._checkpoints.popitem(last=False)[1])
        self.recurrent.save(self._free[-1], self.length)
        self._checkpoints[self.length] = self._free.pop()

    # -- inspection, for tests and digests ----------------------------------------------------

    def visible(self, index):
        """Positions of layer ``index`` that a query at ``length`` can see, itself excluded."""
        window = self.layers[index].window
        first = 0 if window is None else max(0, self.length - window + 1)
        return range(first, self.length)

    def rows(self, index, positions):
        """Read rows of layer ``index``: (k, v), each of shape (n_kv_heads, n, head_dim)."""
        layer = self.layers[index]
        slot = np.asarray(positions, np.int64) % layer.capacity
        k = self._ops.download(layer.k)[:, slot // _K_TILE, :, slot % _K_TILE]
        v = self._ops.download(layer.v)[:, slot]
        return np.ascontiguousarray(np.swapaxes(k, 0, 1)), np.ascontiguousarray(v)

    def digest(self):
        """SHA-256 over the length and every visible row: equal states have equal digests."""
        import hashlib  # here: it loads OpenSSL, 1 % of a start

        digest = hashlib.sha256(str(self.length).encode())
        if self.recurrent is not None:
            digest.update(self.recurrent.digest(self.length).encode())
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LayerCache):
                continue
            for rows in self.rows(index, self.visible(index)):
                digest.update(rows.tobytes())
        return digest.hexdigest()
