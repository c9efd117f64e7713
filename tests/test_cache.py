"""Key/value caches against a plain list of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.errors import ContextLengthError, UsageError
from cudflash.model.cache import layer_capacity
from tests.helpers.list_cache import CHUNK, make_cache, read_rows, write_block

WINDOWS = (None, 1, 5, 24)

actions = st.lists(
    st.one_of(
        st.tuples(st.just("block"), st.integers(1, 9), st.integers(0, 9)),
        st.tuples(st.just("rollback"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("truncate"), st.integers(0, 200), st.integers(0, 1)),
    ),
    max_size=40,
)


class ListModel:
    """Rows as a list: what the cache must look like."""

    def __init__(self, windows):
        self.windows, self.rows, self.count = windows, [], 0

    def fresh(self, n):
        """Numbers never used before, so that a stale row cannot pass for a new one."""
        self.count += n
        return [float(i) for i in range(self.count - n, self.count)]

    def visible(self, index):
        window = self.windows[index]
        first = 0 if window is None else max(0, len(self.rows) - window + 1)
        return self.rows[first:]


def apply(cache, model, action):
    kind, a, b = action
    if kind == "truncate":
        rewind(cache, model, min(a, cache.length) if b else max(0, cache.length - a % 20))
        return
    n = min(a, cache.n_ctx - cache.length)
    if n == 0:
        return
    values = model.fresh(n)
    write_block(cache, values)
    before = [(layer.k.tobytes(), layer.v.tobytes()) for layer in cache.layers]
    if kind == "rollback":
        cache.rollback()
    else:
        kept = min(b, n)
        cache.commit(kept)
        model.rows += values[:kept]
    after = [(layer.k.tobytes(), layer.v.tobytes()) for layer in cache.layers]
    assert after == before, "commit and rollback move no bytes"


def rewind(cache, model, length):
    expected_lost = any(
        length and rows_lost(cache, model, index, window, length)
        for index, window in enumerate(model.windows)
        if window is not None
    )
    kept = cache.truncate(length)
    assert kept == (0 if expected_lost else length), "rows given up that were still there, or kept"
    del model.rows[kept:]


def rows_lost(cache, model, index, window, length):
    """Whether a row that a query at ``length`` sees is no longer in its slot."""
    needed = range(max(0, length - window + 1), length)
    return read_rows(cache, index, needed) != [model.rows[p] for p in needed]


@settings(max_examples=150, deadline=None)
@given(actions)
def test_visible_rows_are_those_of_a_list(script):
    """Catches rows of dropped blocks that stay visible, and rings that lose rows they still need.

    After every action: visible rows equal the list's; lengths agree; and the digest equals that of
    a cache that has never seen the dropped rows.
    """
    cache, model = make_cache(WINDOWS), ListModel(WINDOWS)
    for action in script:
        apply(cache, model, action)
        assert cache.length == len(model.rows) and cache.pending == 0
        for index in range(len(WINDOWS)):
            assert read_rows(cache, index, cache.visible(index)) == model.visible(index)
    clean = make_cache(WINDOWS)
    for start in range(0, len(model.rows), 7):
        block = model.rows[start : start + 7]
        write_block(clean, block)
        clean.commit(len(block))
    assert cache.digest() == clean.digest()
    assert cache.bytes_moved == 0


@pytest.mark.parametrize("window", [1, 5, 16, 24, 33])
@pytest.mark.parametrize("n", [1, 2, 7, 9])
def test_tentative_rows_leave_visible_rows_alone_at_every_length(window, n):
    """Catches a ring that is one row too small for its window and the largest block."""
    cache, model = make_cache((window,)), ListModel((window,))
    while cache.length < cache.n_ctx - n:
        write_block(cache, model.fresh(n))
        cache.rollback()
        assert read_rows(cache, 0, cache.visible(0)) == model.visible(0)
        values = model.fresh(1)
        write_block(cache, values)
        cache.commit(1)
        model.rows += values


def test_capacity_holds_window_and_block_in_whole_chunks():
    """Catches rings larger than the context, or no multiple of the attention chunk."""
    assert layer_capacity(None, 200, 9, CHUNK) == 208
    assert layer_capacity(24, 200, 9, CHUNK) == 48
    assert layer_capacity(24, 30, 9, CHUNK) == 32
    assert make_cache((None, 24)).layers[1].capacity == 48


def test_block_beyond_the_context_is_refused_with_both_numbers():
    """Catches rows written past the last slot, over the first ones."""
    cache = make_cache((None,), n_ctx=10)
    write_block(cache, [1.0] * 9)
    cache.commit(9)
    with pytest.raises(ContextLengthError, match="10.*9"):
        cache.begin(2)
    assert cache.begin(1) == 9


def test_misuse_of_the_transaction_is_refused():
    """Catches a second block opened over the first, or more rows kept than were written."""
    cache = make_cache((None,))
    cache.begin(3)
    for wrong in (lambda: cache.begin(1), lambda: cache.commit(4), lambda: cache.truncate(0)):
        with pytest.raises(RuntimeError):
            wrong()
    cache.rollback()
    with pytest.raises(RuntimeError):
        cache.begin(10)
    with pytest.raises(RuntimeError):
        cache.keepable(1)
    with pytest.raises(UsageError, match="q8_0"):
        make_cache((None,), kv_type="q8_0")


def test_digest_tells_states_apart():
    """Catches a digest blind to a value, to the length or to the layer."""
    digests = set()
    for rows in ([], [1.0], [2.0], [1.0, 2.0], [2.0, 1.0]):
        cache = make_cache((None, 1))
        if rows:
            write_block(cache, rows)
            cache.commit(len(rows))
        digests.add(cache.digest())
    assert len(digests) == 5


def test_rows_read_back_what_float16_keeps():
    """Catches a layout read transposed: distinct numbers in every place of a f16 cache."""
    cache = make_cache((None,), kv_type="f16")
    layer = cache.layers[0]
    k = np.arange(layer.v.size, dtype=np.float16).reshape(layer.v.shape)  # (Hkv, capacity, D)
    layer.v[...] = k
    for slot in range(layer.capacity):
        layer.k[:, slot // 16, :, slot % 16] = k[:, slot]
    read_k, read_v = cache.rows(0, range(3, 40))
    np.testing.assert_array_equal(read_k, k[:, 3:40])
    np.testing.assert_array_equal(read_v, k[:, 3:40])
