"""Recurrent state: what is kept of a block equals never having seen the rest of it."""

import sys
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from cudflash.loader.config import DeltaConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.model.buffers import Allocator
from cudflash.model.recurrent import RecurrentState, state_bytes
from cudflash.ops import cpu as ops
from tests.helpers.delta_net import F32, Rows, Shape, conv_weight
from tests.helpers.ops_checks import assert_same_bits

DELTAS = (DeltaConfig(1, 2, 8, 16, 4), None, DeltaConfig(2, 2, 16, 32, 3))
CONFIG = SimpleNamespace(layers=[SimpleNamespace(delta=delta) for delta in DELTAS])
BLOCK_ROWS, MAX_ROWS, CHECKPOINTS = 5, 14, 2
POOL = 64  # different rows; a script that goes back takes others than the first time


@cache
def layer_inputs(index):
    """(shape, weight, rows) of one layer; every row of the pool is different."""
    d = DELTAS[index]
    shape = Shape(d.n_k_heads, d.n_v_heads, d.k_dim, d.v_dim, d.conv_taps)
    return shape, ops.upload(conv_weight(shape)), Rows.random(shape, POOL, seed=index)


class Sequence:
    """A state, the ids of its committed rows, and passes over rows of given ids."""

    def __init__(self):
        self.allocator = Allocator(ops)
        self.state = RecurrentState(
            ops, CONFIG, MAX_ROWS, BLOCK_ROWS, self.allocator, CHECKPOINTS
        )
        for layer in (self.state.layer(0), self.state.layer(2)):
            for array in (*layer.conv[:-1], *layer.delta[:-1]):
                array.fill(np.nan)
        self.ids = []
        self.saved = {}
        self.positions = ops.zeros((MAX_ROWS,), np.int32)

    def run(self, ids):
        """Outputs of a tentative block at the committed length, all layers side by side."""
        n, first = len(ids), len(self.ids)
        self.state.begin(first, n)
        self.positions[:n] = np.arange(first, first + n)
        with ops.capture() as graph:
            self.state.open(self.positions[:n])
            outs = [out for index in (0, 2) for out in self._record(index, list(ids))]
        graph.launch()
        return np.concatenate([out.reshape(n, -1) for out in outs], axis=1)

    def _record(self, index, ids):
        shape, weight, pool = layer_inputs(index)
        rows, layer = pool[ids], self.state.layer(index)
        c = ops.empty((len(ids), shape.width), F32)
        o = ops.empty((len(ids), shape.n_v, shape.d_v), F32)
        ops.short_conv(c, rows.u, weight, *layer.conv)
        ops.delta_rule(o, rows.q, rows.k, rows.v, rows.decay, rows.beta, 0.5, *layer.delta)
        return c, o

    def commit(self, ids, n):
        self.state.commit(n)
        self.ids = [*self.ids, *ids[:n]]

    def digest(self):
        return self.state.digest(len(self.ids))


def clean(ids, block=4):
    """(outputs, digest) of a sequence that was given exactly these rows."""
    sequence, outs = Sequence(), []
    for start in range(0, len(ids), block):
        part = ids[start:start + block]
        outs.append(sequence.run(part))
        sequence.commit(part, len(part))
    return np.concatenate(outs) if outs else None, sequence.digest()


class Fresh:
    """Ids that were not used for the last POOL rows, so that a stale row cannot pass for a new."""

    def __init__(self):
        self.next = 0

    def __call__(self, n):
        self.next += n
        return [i % POOL for i in range(self.next - n, self.next)]


def apply(sequence, fresh, action):
    """Carry out one action; returns the outputs of a block that was run, and its ids."""
    kind, n, m = action
    if kind in ("block", "rollback"):
        ids = fresh(n)
        outs = sequence.run(ids)
        whole = n > BLOCK_ROWS
        kept = 0 if kind == "rollback" else (n if whole else min(m, n))
        before = list(sequence.ids)
        if kind == "rollback":
            sequence.state.rollback()
        else:
            sequence.commit(ids, kept)
        return outs, before + ids
    if kind == "unrun":  # interrupted before the pass was launched
        sequence.state.begin(len(sequence.ids), n)
        sequence.state.rollback()
    elif kind == "rewind":
        length = max(0, len(sequence.ids) - m)
        if sequence.state.reachable(length):
            del sequence.ids[length:]
    elif kind == "start":
        sequence.ids = []
    elif kind == "save":
        sequence.state.save(m % CHECKPOINTS, len(sequence.ids))
        sequence.saved[m % CHECKPOINTS] = list(sequence.ids)
    elif kind == "restore" and m % CHECKPOINTS in sequence.saved:
        sequence.state.restore(m % CHECKPOINTS)
        sequence.ids = list(sequence.saved[m % CHECKPOINTS])
        assert sequence.state.saved(m % CHECKPOINTS) == len(sequence.ids)
    elif kind == "digest":
        sequence.digest()
    return None


KINDS = ("block", "block", "block", "rollback", "unrun", "rewind", "start", "save", "restore",
         "digest")  # fmt: skip
actions = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(1, MAX_ROWS), st.integers(0, 9)), max_size=14
)


@settings(max_examples=60, deadline=None)
@given(actions)
def test_any_history_equals_the_one_without_dropped_rows(script):
    """Catches rejected rows that leave a trace: in a state, a history, a tape, or what comes next.

    Blocks of all lengths with any number of rows kept, blocks dropped before and after their pass,
    rewinds, restarts, checkpoints: after each, the outputs of the block are those of a sequence
    that was only ever given the committed rows, and in the end so is every state tensor.
    """
    sequence, fresh = Sequence(), Fresh()
    for action in script:
        ran = apply(sequence, fresh, action)
        if ran is not None:
            outs, ids = ran
            assert_same_bits(outs, clean(ids)[0][-len(outs):])
    assert sequence.digest() == clean(sequence.ids)[1]


@pytest.mark.parametrize("n", range(1, BLOCK_ROWS + 1))
def test_every_number_of_kept_rows_of_every_block(n):
    """Catches an index off by one: n rows kept of a block, then of the next, and once more."""
    for first in range(n + 1):
        for second in range(n + 1):
            sequence, fresh = Sequence(), Fresh()
            start = fresh(MAX_ROWS)
            sequence.run(start)
            sequence.commit(start, MAX_ROWS)
            for kept in (first, second):
                ids = fresh(n)
                sequence.run(ids)
                sequence.commit(ids, kept)
                assert sequence.digest() == clean(sequence.ids)[1]


def test_kept_rows_need_no_digest_in_between():
    """Catches a digest that repairs the state: the same blocks, looked at only at the end."""
    sequence, fresh = Sequence(), Fresh()
    for n, kept in ((3, 1), (5, 0), (5, 5), (1, 1), (14, 14), (4, 2), (12, 0), (2, 1), (1, 0)):
        ids = fresh(n)
        sequence.run(ids)
        sequence.commit(ids, kept)
    assert sequence.digest() == clean(sequence.ids)[1] == clean(sequence.ids, 1)[1]


def test_a_large_block_is_kept_as_a_whole():
    """Catches a part of a prompt kept whose state exists nowhere."""
    sequence, ids = Sequence(), Fresh()(BLOCK_ROWS + 1)
    sequence.run(ids)
    with pytest.raises(RuntimeError, match="as a whole or not at all"):
        sequence.state.commit(BLOCK_ROWS)
    sequence.state.commit(0)
    assert sequence.digest() == clean([])[1]


def test_what_can_be_reached():
    """Catches a rewind to a length whose state is gone, and one refused although it is there."""
    sequence, fresh = Sequence(), Fresh()

    def reach():
        return [n for n in range(40) if sequence.state.reachable(n)]

    assert reach() == [0]
    for n, kept, expected in (
        (10, 10, [0, 10]),
        (8, 8, [0, 10, 18]),  # the other slot still holds the state before
        (4, 3, [0, 10, 18, 19, 20, 21, 22]),
        (2, 1, [0, 10, 21, 22, 23]),
        (7, 7, [0, 21, 22, 29]),  # rows of the tape that were dropped are gone
    ):
        ids = fresh(n)
        sequence.run(ids)
        sequence.commit(ids, kept)
        assert reach() == expected
    del sequence.ids[22:]
    ids = fresh(2)
    sequence.run(ids)
    assert reach() == [0, 22, 23, 24], "a state of rows that were replaced"
    with pytest.raises(RuntimeError, match="open"):
        sequence.state.save(0, 22)
    sequence.commit(ids, 2)
    with pytest.raises(RuntimeError, match="not at 29"):
        sequence.state.save(0, 29)
    with pytest.raises(RuntimeError, match="empty"):
        sequence.state.restore(1)
    with pytest.raises(RuntimeError, match="does not exist"):
        sequence.state.restore(2)


@pytest.mark.parametrize("n", [BLOCK_ROWS, MAX_ROWS])
def test_a_new_conversation_cannot_reach_states_of_the_last(n):
    """Catches a slot whose rows were replaced from position 0 on and that still counts as there."""
    sequence, fresh = Sequence(), Fresh()
    for rows in (10, 4, 13, 3):
        ids = fresh(rows)
        sequence.run(ids)
        sequence.commit(ids, rows)
    sequence.ids = []
    ids = fresh(n)
    sequence.run(ids)
    sequence.commit(ids, n)
    reached = [length for length in range(1, 40) if sequence.state.reachable(length)]
    assert reached == (list(range(1, n + 1)) if n <= BLOCK_ROWS else [n])
    assert sequence.digest() == clean(ids)[1]


def test_a_checkpoint_outlives_what_comes_after_it():
    """Catches a checkpoint that shares memory with the sequence, or is used up by one restore."""
    sequence, fresh = Sequence(), Fresh()
    ids = fresh(4)
    sequence.run(ids)
    sequence.commit(ids, 3)
    sequence.state.save(1, 3)
    prefix = list(sequence.ids)
    for _ in range(3):
        for n in (9, 5, 1):
            ids = fresh(n)
            sequence.run(ids)
            sequence.commit(ids, n)
        sequence.state.restore(1)
        sequence.ids = list(prefix)
        assert sequence.digest() == clean(prefix)[1]


@pytest.mark.parametrize("blocks", [(6,), (10, 5, 6), (10, 3), (4, 3)])
def test_a_restored_state_knows_nothing_of_the_conversation_in_between(blocks):
    """Catches slots and tape rows of another conversation that fit the restored length by chance."""
    sequence, fresh = Sequence(), Fresh()
    prefix = fresh(10)
    sequence.run(prefix)
    sequence.commit(prefix, 10)
    sequence.state.save(0, 10)
    sequence.ids = []
    for rows in blocks:
        ids = fresh(rows)
        sequence.run(ids)
        sequence.commit(ids, rows)
    sequence.state.restore(0)
    assert [n for n in range(1, 40) if sequence.state.reachable(n)] == [10]


def test_bytes_are_those_that_plan_counts():
    """Catches a buffer that plan does not know of."""
    sequence = Sequence()
    assert sequence.allocator.n_bytes == {
        "state": state_bytes(CONFIG, BLOCK_ROWS, CHECKPOINTS)
    }
    assert state_bytes(SimpleNamespace(layers=[SimpleNamespace(delta=None)]), 16) == 0


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line executed in ``recurrent.py`` or this file."""

    def __init__(self, at):
        self.left, self.fired = at, False

    def __call__(self, frame, event, arg):
        mine = frame.f_code.co_filename.endswith(("model/recurrent.py", "test_recurrent_state.py"))
        return self.line if mine else None

    def line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.fired = True
                raise KeyboardInterrupt
        return self.line


def interrupt_at(line, call):
    """Run ``call`` with an interrupt at a line of it; whether it came to that line."""
    interrupter, before = Interrupter(line), sys.gettrace()
    sys.settrace(interrupter)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupter.fired


@pytest.mark.parametrize("n, kept", [(4, 2), (9, 9), (1, 1)])
def test_an_interrupt_at_any_line_leaves_the_committed_state(n, kept):
    """Catches a commit made in two steps, and a pass that damages the state it may have to keep."""
    line = 0
    while True:
        line += 1
        sequence, fresh = Sequence(), Fresh()
        first, block, after = fresh(5), fresh(n), fresh(3)
        sequence.run(first)
        sequence.commit(first, 3)

        def round_(sequence=sequence, block=block):
            sequence.run(block)
            sequence.commit(block, kept)

        fired = interrupt_at(line, round_)
        sequence.state.rollback()
        assert len(sequence.ids) in (3, 3 + kept)
        want, _ = clean([*sequence.ids, *after])
        assert_same_bits(sequence.run(after), want[-3:])
        if not fired:
            break
    assert line > 15


def test_an_interrupt_in_a_restore_leaves_one_of_both_states():
    """Catches layers that are at different lengths after half a restore."""
    for line in range(1, 200):
        sequence, fresh = Sequence(), Fresh()
        prefix, rest, after = fresh(3), fresh(4), fresh(2)
        for ids in (prefix, rest):
            sequence.run(ids)
            sequence.commit(ids, len(ids))
            if ids is prefix:
                sequence.state.save(0, 3)
        fired = interrupt_at(line, lambda s=sequence: s.state.restore(0))
        if not sequence.state.reachable(len(sequence.ids)):
            sequence.ids = prefix
        want, _ = clean([*sequence.ids, *after])
        assert_same_bits(sequence.run(after), want[-2:])
        if not fired:
            return
    raise AssertionError("the restore never ended")
