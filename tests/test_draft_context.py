"""The draft context against a plain list, and the draft runner's equality of bits."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.errors import ContextLengthError
from cudflash.model.buffers import Allocator
from cudflash.model.draft_context import (
    SLACK,
    DraftContext,
    DraftContextGeometry,
    context_bytes,
    ring_capacity,
)
from tests.helpers.list_cache import CHUNK, OPS

N_CTX, BLOCK = 400, 4


def make_context(windows, sink, n_ctx=N_CTX, hold_all=False):
    """A context with one layer per window (None: full), every slot NaN."""
    layers = tuple(SimpleNamespace(window=w, causal=i % 2 == 0) for i, w in enumerate(windows))
    config = SimpleNamespace(
        layers=layers, n_layers=len(layers), n_kv_heads=2, head_dim=2, block_size=BLOCK, sink=sink,
        window=next((w for w in windows if w is not None), None),
    )  # fmt: skip
    return DraftContext(OPS, config, n_ctx, Allocator(OPS), hold_all)


def put(cache_k, cache_v, slot, value):
    cache_k[:, slot // 16, :, slot % 16] = value
    cache_v[:, slot] = -value


def write(context, first, values, keep=True):
    """Write one number per row into every layer, where a context pass puts it."""
    for layer in context.layers:
        for i, value in enumerate(values):
            position = first + i
            if keep and layer.sink_k is not None and position < context.sink:
                put(layer.sink_k, layer.sink_v, position, value)
            else:
                put(layer.k, layer.v, position % layer.capacity, value)


def append(context, values):
    """Commit rows, as many at a time as a transaction takes."""
    for start in range(0, len(values), SLACK):
        part = values[start : start + SLACK]
        write(context, context.begin(len(part)), part)
        context.commit(len(part))


def read(context, index, positions):
    k, v = context.rows(index, positions)
    np.testing.assert_array_equal(k, -v)
    return k[:, 0, 0].tolist()


def retained(context, index=0):
    return read(context, index, context.retained(index))


# -- the scenarios of the original's tests, with 2 pinned rows and a window of 3 ------------------


def numbers(first, last):
    return [float(i) for i in range(first, last)]


def test_appends_keep_the_sink_and_the_last_rows():
    """Catches eviction of a pinned row, or of the newest instead of the oldest."""
    context = make_context([3], 2)
    append(context, numbers(0, 4))
    append(context, numbers(4, 7))
    assert retained(context) == [0, 1, 4, 5, 6] and context.length == 7
    assert context.retained(0).tolist() == [0, 1, 4, 5, 6]


def test_one_long_append_equals_many():
    """Catches rows placed by their order in a call instead of their position."""
    context = make_context([3], 2)
    append(context, numbers(0, 20))
    assert retained(context) == [0, 1, 17, 18, 19]


def test_gap_leaves_out_only_rows_that_no_block_sees():
    """Catches a prompt gap that shifts positions, or that hides rows a block still sees."""
    context = make_context([3], 2)
    append(context, numbers(0, 2))
    context.skip(15)
    assert not context.ready
    append(context, numbers(17, 19))
    assert not context.ready, "the window of 3 holds a row that was skipped"
    append(context, numbers(19, 20))
    assert context.ready
    assert retained(context) == [0, 1, 17, 18, 19] and context.length == 20
    assert context.keepable(19) == 2, "row 16 was never written"


def test_slots_are_absolute():
    """Catches rings indexed by history: position p lies in slot p, or p modulo the ring."""
    context = make_context([3], 2)
    capacity = context.layers[0].capacity
    append(context, numbers(0, capacity + 9))
    layer = context.layers[0]
    slot = (capacity + 8) % capacity
    assert layer.k[0, slot // 16, 0, slot % 16] == capacity + 8
    assert layer.sink_k[0, 0, 0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("n", [1, 2, 15, SLACK])
def test_rolled_back_rows_leave_no_trace(n):
    """Catches tentative rows that overwrite visible ones, before and after the ring has wrapped."""
    context = make_context([16], 2)
    for length in (5, 18, 100, 250):
        append(context, numbers(context.length, length))
        before = context.digest()
        write(context, context.begin(n), [999.0] * n)
        context.rollback()
        assert context.digest() == before and context.ready


def test_blocks_leave_no_trace():
    """Catches block rows, which lie past the committed ones, taken for committed rows."""
    context = make_context([3, None], 2)
    for length in range(0, 200, 3):
        append(context, numbers(context.length, length))
        before = context.digest()
        write(context, context.reserve(BLOCK), [999.0] * BLOCK, keep=False)
        assert context.digest() == before and context.ready


def test_release_geometries_have_their_published_bounds():
    """Catches another element size, a forgotten plane, slack counted as attended rows."""
    release = DraftContextGeometry(5, 1024, 64, 2048)
    assert (release.row_limit, release.byte_limit) == (2112, 86_507_520)
    other = DraftContextGeometry(5, 1024, 64, 1024)
    assert (other.row_limit, other.byte_limit) == (1088, 44_564_480)
    assert release.difference(other) == ("window", 2048, 1024)
    assert release.difference(release) is None
    full = DraftContextGeometry(5, 1024, 0, None, 5, 1000)
    assert full.byte_limit == 5 * 1000 * 8192
    mixed = DraftContextGeometry(5, 1024, 64, 1024, 2, 4000)
    assert mixed.byte_limit == (3 * 1088 + 2 * 4000) * 8192


@pytest.mark.parametrize("windows, sink", [([3], 2), ([3, None], 0), ([None], 0), ([20, 20], 17)])
def test_allocation_is_what_is_planned(windows, sink):
    """Catches a plan that forgets sinks or slack."""
    context = make_context(windows, sink)
    config = SimpleNamespace(
        layers=context.layers, n_kv_heads=2, head_dim=2, block_size=BLOCK, sink=sink
    )
    held = [a for la in context.layers for a in (la.k, la.v, la.sink_k, la.sink_v)]
    assert sum(a.nbytes for a in held if a is not None) == context_bytes(config, N_CTX, CHUNK)
    assert ring_capacity(3, N_CTX, BLOCK, CHUNK) == 80
    assert ring_capacity(3, 40, BLOCK, CHUNK) == 48, "never more than the whole context"


# -- against a list -------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, SLACK), st.integers(0, SLACK)),
        st.tuples(st.just("rollback"), st.integers(1, SLACK), st.just(0)),
        st.tuples(st.just("block"), st.integers(1, BLOCK), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, N_CTX), st.integers(0, 1)),
        st.tuples(st.just("prompt"), st.integers(1, 200), st.just(0)),
    ),
    max_size=25,
)
SHAPES = [((3,), 2), ((3,), 0), ((20, 20), 17), ((5, None), 4), ((None,), 0), ((40,), 64)]


class ListModel:
    """All committed rows, and by position whether each still lies where a block looks for it."""

    def __init__(self):
        self.rows, self.count = [], 0

    def fresh(self, n):
        self.count += n
        return [float(i) for i in range(self.count - n, self.count)]


def run(context, model, action):
    kind, a, b = action
    n = min(a, context.n_ctx - context.length)
    if kind == "rewind":
        rewind(context, model, min(a, context.length) if b else max(0, context.length - a % 30))
    elif kind == "block":
        if context.ready:
            write(context, context.reserve(a), [-1.0] * a, keep=False)
    elif n and kind == "prompt":
        values = model.fresh(n)
        model.rows += values
        while values:
            skipped = context.skippable(len(values))
            if skipped:
                context.skip(skipped)
            else:
                skipped = max(1, min(SLACK, len(values), context.sink - context.length))
                append(context, values[:skipped])
            values = values[skipped:]
    elif n:
        values = model.fresh(n)
        write(context, context.begin(n), values)
        if kind == "rollback":
            context.rollback()
        else:
            context.commit(min(b, n))
            model.rows += values[: min(b, n)]


def rewind(context, model, length):
    """A rewind keeps everything, unless rows that a block would see are really gone."""
    gone = any(
        read(context, index, at) != [model.rows[p] for p in at]
        for index, layer in enumerate(context.layers)
        if layer.window is not None
        for at in [range(max(min(length, context.sink), length - layer.window), length)]
    )
    kept = context.rewind(length)
    assert kept == (min(length, context.sink) if gone else length)
    del model.rows[kept:]


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(SHAPES), ACTIONS)
def test_retained_rows_are_those_of_a_list(shape, script):
    """Catches stale, lost or shifted rows after any sequence of what a conversation does.

    After every action: length and retained rows equal the list's; the digest equals that of a
    context which was given the committed rows only; no byte was moved.
    """
    context, model = make_context(*shape), ListModel()
    for action in script:
        run(context, model, action)
        assert context.length == len(model.rows) and context.pending == 0
        assert context.ready
        for index in range(len(context.layers)):
            at = context.retained(index)
            assert read(context, index, at) == [model.rows[p] for p in at]
    clean = make_context(*shape)
    append(clean, model.rows)
    assert context.digest() == clean.digest() and context.bytes_moved == 0


# -- spans and misuse -----------------------------------------------------------------------------


def test_spans_are_the_masks_of_the_reference():
    """Catches a window off by one, or a lower bound that is the same for all rows."""
    context = make_context([3], 0)
    append(context, numbers(0, 10))
    position = np.arange(10, 14)[:, None]
    key = np.arange(14)[None, :]
    for window in (None, 3, 12):
        for causal in (False, True):
            lo, hi = context.spans(window, causal, 4).T[:, :, None]
            visible = np.ones((4, 14), bool)
            if causal:
                visible &= key <= position
            if window is not None:
                visible &= position - key < window
            np.testing.assert_array_equal((lo <= key) & (key < hi), visible)


@pytest.mark.parametrize("n_rows", [2, BLOCK])
def test_the_box_of_a_block_says_what_the_context_says(n_rows):
    """Catches positions or spans that are right at one length alone, and rows of a block before."""
    from cudflash.model.draft_buffers import InBox
    from cudflash.ops import cpu

    context = make_context([3, None], 2)
    config = SimpleNamespace(block_size=BLOCK, layers=context.layers, selector_top_k=3)
    box = InBox(Allocator(cpu), cpu, config)
    for length in range(20):
        box.fill(context, 7 + length, 5, BLOCK if length % 2 else n_rows)
        box.fill(context, 7 + length, 5, n_rows)
        ids = box.ids[:n_rows]
        np.testing.assert_array_equal(ids, [7 + length] + [5] * (n_rows - 1))
        np.testing.assert_array_equal(box.positions[:n_rows], np.arange(length, length + n_rows))
        assert box.n_sink[0] == context.n_pinned and (box.candidates[0] == 7 + length).all()
        for kind in box.kinds:
            np.testing.assert_array_equal(box.spans[kind][:n_rows], context.spans(*kind, n_rows))
        append(context, numbers(length, length + 1))


def test_rows_beyond_the_context_are_refused_with_both_numbers():
    """Catches rows written past the last slot, over the first ones."""
    context = make_context([None], 0, n_ctx=10)
    append(context, numbers(0, 9))
    with pytest.raises(ContextLengthError, match="10 tokens, 9 are in use and 2 more"):
        context.begin(2)
    assert context.reserve(BLOCK) == 9, "a block may reach past the context"
    assert context.begin(1) == 9


def test_misuse_of_the_transaction_is_refused():
    """Catches a block inside a transaction, more rows kept than written, gaps where none may be."""
    context = make_context([3, None], 2)
    context.begin(3)
    for wrong in (lambda: context.begin(1), lambda: context.commit(4),
                  lambda: context.rewind(0), lambda: context.reserve(2)):  # fmt: skip
        with pytest.raises(RuntimeError):
            wrong()
    context.rollback()
    for wrong in (lambda: context.begin(SLACK + 1), lambda: context.reserve(BLOCK + 1),
                  lambda: context.keepable(1), lambda: context.skip(1)):  # fmt: skip
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(RuntimeError, match="past the sink"):
        make_context([3], 2).skip(1)


def test_digest_tells_states_apart():
    """Catches a digest blind to a value, the length or the layer."""
    digests = set()
    for rows in ([], [1.0], [2.0], [1.0, 2.0], [2.0, 1.0]):
        context = make_context([1, None], 0)
        append(context, rows)
        digests.add(context.digest())
    assert len(digests) == 5
