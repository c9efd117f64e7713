"""State of a target's gated-delta-net layers: advanced tentatively, kept or dropped by row.

Owns where the state of a sequence lies and up to which position. Must not know what a row means or
how it is computed. Invariant: the position of a pass's first row alone decides which state it
starts from, so the length that the caller keeps is the single truth: ``commit`` and ``rollback``
write nothing, and an interrupt anywhere leaves the committed state as it was.

Per layer: the delta state and the rows before the convolution, in two slots, and a *tape*, which
holds what the last small block has added to them, row by row. A block of up to ``block_rows`` rows
leaves the stored state at its own first position; the next pass carries it over the rows that were
kept, while it reads it anyway (``cudflash.ops``: ``recurrent_open``). A larger block, a part of a
prompt, is kept or dropped as a whole and writes its last state into the other slot. Position 0 is
the zero state whatever the slots hold. Checkpoints are further slots.

Dead slots and dead rows of the tape hold anything, NaN included.
"""

from dataclasses import dataclass

import numpy as np

_F32 = 4
_SEQUENCE_SLOTS = 2
# layout of the buffers of ``recurrent_open``
_PLAN_WORDS, _CONTROL_WORDS = 8, 8
_CURRENT, _TAPE_SLOT, _TAPE_BASE, _TAPE_ROWS = range(4)
_NOWHERE = -1


@dataclass(frozen=True)
class LayerState:
    """Buffers of one layer.

    Attributes
    ----------
    conv : tuple
        (history, tape_u, plan), the last arguments of ``short_conv``.
    delta : tuple
        (states, tape_k, tape_d, tape_decay, plan), the last arguments of ``delta_rule``.
    """

    conv: tuple
    delta: tuple


def _shapes(delta, n_slots, block_rows):
    """Shapes of a layer's float32 buffers, in the order of ``LayerState.conv`` and ``.delta``."""
    d = delta
    return (
        (n_slots, d.conv_taps - 1, d.conv_width),
        (block_rows, d.conv_width),
        (n_slots, d.n_v_heads, d.v_dim // 16, d.k_dim, 16),
        (2, block_rows, d.n_k_heads, d.k_dim),
        (block_rows, d.n_v_heads, d.v_dim),
        (2, block_rows, d.n_v_heads),
    )


def state_bytes(config, block_rows, n_checkpoints=0):
    """Bytes that a RecurrentState allocates; 0 for a target without recurrent layers."""
    deltas = [layer.delta for layer in config.layers if layer.delta is not None]
    if not deltas:
        return 0
    n_slots = _SEQUENCE_SLOTS + n_checkpoints
    shapes = [shape for delta in deltas for shape in _shapes(delta, n_slots, block_rows)]
    floats = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)
    return _F32 * (floats + _PLAN_WORDS + _CONTROL_WORDS + n_slots + 1)


class RecurrentState:
    """States of all recurrent layers of one sequence.

    Parameters
    ----------
    ops : module
        Op set of a backend.
    config : TargetConfig
    max_rows : int
        Largest block that ``begin`` accepts.
    block_rows : int
        Largest block that may be kept in part.
    allocator : Allocator
    n_checkpoints : int

    Attributes
    ----------
    block_rows, max_rows, n_checkpoints : int
    pending : int
        Rows of the open block, 0 when none is open.
    """

    def __init__(self, ops, config, max_rows, block_rows, allocator, n_checkpoints=0):
        self._ops = ops
        self.max_rows, self.block_rows = max_rows, block_rows
        self.n_checkpoints = n_checkpoints
        self.pending = 0
        n_slots = _SEQUENCE_SLOTS + n_checkpoints
        self._plan = allocator.empty("state", (_PLAN_WORDS,), np.int32)
        self._control = allocator.upload("state", self._empty_control(n_slots))
        self._at = allocator.empty("state", (1,), np.int32)
        self._layers = {}
        for index, layer in enumerate(config.layers):
            if layer.delta is not None:
                history, tape_u, *delta = (
                    allocator.empty("state", shape, np.float32)
                    for shape in _shapes(layer.delta, n_slots, block_rows)
                )
                self._layers[index] = LayerState(
                    (history, tape_u, self._plan), (*delta, self._plan)
                )
        self._copies = {}  # (source, target) -> recorded copy

    @staticmethod
    def _empty_control(n_slots):
        control = np.zeros(_CONTROL_WORDS + n_slots, np.int32)
        control[_CONTROL_WORDS:] = _NOWHERE
        return control

    def layer(self, index):
        """LayerState of layer ``index`` of the model."""
        return self._layers[index]

    # -- transaction ----------------------------------------------------------------------------

    def open(self, positions):
        """Record what a pass over these positions, shape (M,) int32, needs before its layers."""
        self._ops.recurrent_open(
            self._plan, self._control, positions, len(positions), self.block_rows
        )

    def begin(self, position, n_rows):
        """Open a block of ``n_rows`` rows at ``position``."""
        if self.pending:
            raise RuntimeError(f"a block of {self.pending} rows is open; commit or roll it back")
        if not 1 <= n_rows <= self.max_rows or position < 0:
            raise RuntimeError(
                f"a block of {n_rows} rows at {position}, expected 1 to {self.max_rows}"
            )
        self.pending = n_rows

    def commit(self, n_rows):
        """Keep the first ``n_rows`` rows of the open block: the caller's length says so."""
        if not 0 <= n_rows <= self.pending:
            raise RuntimeError(f"commit of {n_rows} rows, but the open block has {self.pending}")
        if 0 < n_rows < self.pending and self.pending > self.block_rows:
            raise RuntimeError(
                f"commit of {n_rows} rows of {self.pending}: a block of more than "
                f"{self.block_rows} rows is kept as a whole or not at all"
            )
        self.pending = 0

    def rollback(self):
        """Drop the open block; does nothing when none is open."""
        self.pending = 0

    # -- where the state is -----------------------------------------------------------------------

    def reachable(self, length):
        """Whether a pass can start at ``length``, without a checkpoint."""
        return self._source(self._ops.download(self._control), length) is not None

    @staticmethod
    def _source(control, length):
        """Slot from which a pass at ``length`` starts, or None; as ``recurrent_open`` decides."""
        current = int(control[_CURRENT])
        for slot in (current, 1 - current):
            base = int(control[_CONTROL_WORDS + slot])
            if length in (0, base):
                return slot
            on_tape = slot == control[_TAPE_SLOT] and base == control[_TAPE_BASE]
            if on_tape and 0 <= base < length <= base + control[_TAPE_ROWS]:
                return slot
        return None

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, number, length):
        """Put the state at ``length`` into checkpoint ``number``.

        Raises
        ------
        RuntimeError
            If a block is open, or no pass could start at ``length``.
        """
        self._check_number(number)
        if self._source(self._ops.download(self._control), length) is None:
            raise RuntimeError(f"the recurrent state is not at {length} and cannot be put aside")
        self._copy(length, _NOWHERE, _SEQUENCE_SLOTS + number)

    def restore(self, number):
        """Go on from checkpoint ``number``; the caller sets its length to ``saved(number)``.

        The checkpoint stays. Passes can start nowhere else until one has run.
        """
        length = self.saved(number)
        if length is None:
            raise RuntimeError(f"checkpoint {number} of the recurrent state is empty")
        spare = 1 - int(self._ops.download(self._control)[_CURRENT])
        self._copy(length, _SEQUENCE_SLOTS + number, spare)

    def saved(self, number):
        """Length of checkpoint ``number``, None while it is empty."""
        self._check_number(number)
        control = self._ops.download(self._control)
        length = int(control[_CONTROL_WORDS + _SEQUENCE_SLOTS + number])
        return None if length == _NOWHERE else length

    def _check_number(self, number):
        if self.pending:
            raise RuntimeError(f"a block of {self.pending} rows is open; commit or roll it back")
        if not 0 <= number < self.n_checkpoints:
            raise RuntimeError(f"checkpoint {number} of {self.n_checkpoints} does not exist")

    def _copy(self, length, source, target):
        """Copy the state at ``length`` between slots: one uninterruptible program."""
        graph = self._copies.get((source, target))
        if graph is None:
            with self._ops.capture() as graph:
                self._ops.recurrent_open(
                    self._plan, self._control, self._at, 0, self.block_rows, source, target
                )
                for layer in self._layers.values():
                    self._ops.recurrent_copy(*layer.conv[:-1], *layer.delta)
            self._copies[source, target] = graph
        self._ops.copy_in(self._at, np.array([length], np.int32))
        graph.launch()

    # -- inspection, for tests and digests --------------------------------------------------------

    def digest(self, length):
        """SHA-256 over every state tensor at ``length``: equal states have equal digests.

        Carries the state there first, in the slot that is not in use.

        Raises
        ------
        RuntimeError
            If no pass could start at ``length``.
        """
        import hashlib  # here: it loads OpenSSL, 1 % of a start

        source = self._source(self._ops.download(self._control), length)
        if source is None:
            raise RuntimeError(f"the recurrent state is not at {length}")
        self._copy(length, _NOWHERE, 1 - source)
        digest = hashlib.sha256()
        for layer in self._layers.values():
            for slots in (layer.conv[0], layer.delta[0]):
                digest.update(self._ops.download(slots[1 - source]).tobytes())
        return digest.hexdigest()
