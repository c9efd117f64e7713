"""Attention and its caches: exact against a model of the order, alone in every row."""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from cudflash.ops.cpu import attend, special
from tests.helpers import exact_f32 as F
from tests.helpers.ops_checks import (
    assert_close,
    assert_same_bits,
    check_row_independence,
    check_writes_only,
    poisoned,
    replay,
)

CHUNK = 128


def exp(x):
    return special.exp(F.Arithmetic, x)


def model(q, k, v, positions, window, scale, cap, kv_dtype=np.float16):
    """The contract's order, one (row, head) at a time. k, v: (positions, Hkv, D), unrounded."""
    k, v = (a.astype(kv_dtype).astype(np.float32) for a in (k, v))
    group = q.shape[1] // k.shape[1]
    scale, out = np.float32(scale), np.full_like(q, np.nan)
    for r, p in enumerate(positions):
        first = max(0, p - window + 1) if window else 0
        for h in range(q.shape[1]):
            state = np.float32(-np.inf), np.float32(0), np.zeros(q.shape[2], np.float32)
            for c in range(first // CHUNK, p // CHUNK + 1):
                keys = np.arange(max(first, CHUNK * c), min(p, CHUNK * c + CHUNK - 1) + 1)
                part = chunk_model(q[r, h], k[keys, h // group], v[keys, h // group], keys, scale,
                                   cap)
                state = merge_model(state, part)
            out[r, h] = F.div(state[2], state[1])
    return out


def chunk_model(q, k, v, keys, scale, cap):
    """(m_c, l_c, acc_c) of the visible keys of one chunk."""
    score = np.zeros(len(keys), np.float32)
    for i in range(len(q)):
        score = F.fma(k[:, i], q[i], score)
    score = F.mul(score, scale)
    if cap:
        score = special.softcap(F.Arithmetic, score, np.float32(cap))
    m = score.max()
    p = np.zeros(CHUNK, np.float32)
    p[keys % CHUNK] = exp(F.sub(score, m))
    lanes = np.zeros(16, np.float32)
    for group in p.reshape(8, 16):
        lanes = F.add(lanes, group)
    acc = np.zeros(v.shape[1], np.float32)
    for weight, row in zip(p[keys % CHUNK], v):
        acc = F.fma(weight, row, acc)
    return m, F.halving_tree(lanes), acc


def merge_model(state, part):
    m, l, acc = state  # noqa: E741
    m_c, l_c, acc_c = part
    top = max(m, m_c)
    a, b = exp(np.float32([m - top]))[0], exp(np.float32([m_c - top]))[0]
    return top, F.fma(l, a, F.mul(l_c, b)), F.fma(acc, a, F.mul(acc_c, b))


class Case:
    """Random keys and values for ``n`` positions, written into caches full of NaNs."""

    def __init__(self, n_heads, n_kv_heads, d, n, capacity, kv_type="f16", n_rows=33, seed=0):
        rng = np.random.default_rng([seed, n_heads, d, n])
        self.q = ops.upload(rng.standard_normal((n_rows, n_heads, d)).astype(np.float32))
        self.k = ops.upload(rng.standard_normal((n, n_kv_heads, d)).astype(np.float32))
        self.v = ops.upload(rng.standard_normal((n, n_kv_heads, d)).astype(np.float32))
        self.caches = ops.kv_cache(n_kv_heads, d, capacity, kv_type)
        for cache in self.caches:
            cache.fill(np.nan)
        self.positions = ops.upload(np.arange(n - n_rows, n).astype(np.int32))
        for start in range(0, n, capacity):
            self.write(slice(start, min(n, start + capacity)))

    def write(self, rows):
        positions = ops.upload(np.arange(len(self.k), dtype=np.int32)[rows])
        ops.kv_write(*self.caches, self.k[rows], self.v[rows], positions)

    def run(self, rows=slice(None), window=0, scale=0.125, cap=0.0):
        out = poisoned(self.q[rows].shape)
        ops.attention(out, self.q[rows], *self.caches, self.positions[rows], window, scale, cap)
        return out


@pytest.mark.parametrize("d,kv_type", [(32, "f16"), (64, "f16"), (64, "f32"), (80, "f16"),
                                       (128, "f16"), (256, "f16")])
def test_attention_equals_the_model(d, kv_type):
    """Catches a changed order of scores, weights, sums or merges, at every head width."""
    case = Case(4, 2, d, 300, 384, kv_type, n_rows=3)
    dtype = attend.KV_TYPES[kv_type]
    expected = model(case.q, case.k, case.v, case.positions, 0, 0.125, 0.0, dtype)
    assert_same_bits(case.run(), expected)


@pytest.mark.parametrize("n_heads,n_kv_heads", [(1, 1), (2, 1), (3, 1), (4, 1), (9, 3), (7, 1),
                                                (8, 8), (16, 1)])
def test_attention_of_grouped_heads_equals_the_model(n_heads, n_kv_heads):
    """Catches a head that reads another group's keys, at every block size."""
    case = Case(n_heads, n_kv_heads, 64, 140, 256, n_rows=2)
    expected = model(case.q, case.k, case.v, case.positions, 0, 0.2, 0.0)
    assert_same_bits(case.run(scale=0.2), expected)
    assert_same_bits(case.run(slice(1, 2), scale=0.2), expected[1:])


@pytest.mark.parametrize("window", [1, 24, 128, 200, 383])
def test_attention_in_a_window_equals_the_model(window):
    """Catches an off-by-one at the window's edge, in a ring that has wrapped twice."""
    case = Case(4, 2, 64, 900, 512, n_rows=9)
    expected = model(case.q, case.k, case.v, case.positions, window, 0.125, 0.0)
    assert_same_bits(case.run(window=window), expected)


def test_attention_with_a_soft_cap_equals_the_model():
    """Catches a cap applied before the scale, or to masked keys."""
    case = Case(4, 2, 64, 150, 256, n_rows=4)
    expected = model(case.q, case.k, case.v, case.positions, 0, 0.5, 3.0)
    assert_same_bits(case.run(scale=0.5, cap=3.0), expected)


@pytest.mark.parametrize("window", [0, 100])
def test_attention_at_arbitrary_positions_equals_the_model(window):
    """Catches the assumption that rows of a block are neighbours: tree and replay rows are not."""
    case = Case(6, 2, 32, 400, 512, n_rows=9)
    case.positions[:] = [399, 0, 127, 128, 5, 255, 256, 0, 390]
    expected = model(case.q, case.k, case.v, case.positions, window, 0.125, 0.0)
    assert_same_bits(case.run(window=window), expected)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("n_heads,n_kv_heads,d", [(9, 3, 64), (4, 1, 256)])
def test_attention_row_is_alone(n_heads, n_kv_heads, d, window):
    """Catches what breaks losslessness: bits that depend on M, the block, the split or threads."""
    case = Case(n_heads, n_kv_heads, d, 290, 384)
    check_row_independence(lambda rows: case.run(rows, window))


def test_both_splits_give_the_same_bits(monkeypatch):
    """Catches a merge order that depends on how work is shared: by chunk or by block."""
    case = Case(9, 3, 64, 500, 512, n_rows=5)
    by_chunk = case.run()
    monkeypatch.setattr(attend, "_FEW_BLOCKS", 0)
    assert_same_bits(case.run(), by_chunk)


def test_prefill_in_pieces_gives_the_same_bits():
    """Catches rows that see keys written later in the call, or chunks cut by the prefill size."""
    whole = Case(4, 2, 64, 200, 256, n_rows=200)
    expected = whole.run()
    pieces = Case(4, 2, 64, 200, 256, n_rows=200)
    for cache in pieces.caches:
        cache.fill(np.nan)
    for start in range(0, 200, 37):
        rows = slice(start, min(200, start + 37))
        pieces.write(rows)
        assert_same_bits(pieces.run(rows), expected[rows])


def test_attention_is_close_to_float64():
    """Catches a wrong formula that the model shares.

    Bound: scores err by about D roundings of |q||k|; all weights then by that plus n roundings.
    """
    case = Case(9, 3, 64, 700, 768, n_rows=4)
    found = case.run()
    k, v = (a.astype(np.float16).astype(np.float64) for a in (case.k, case.v))
    for r, p in enumerate(case.positions):
        for h in range(9):
            score = k[:p + 1, h // 3] @ case.q[r, h].astype(np.float64) * 0.125
            weight = np.exp(score - score.max())
            weight /= weight.sum()
            exact = weight @ v[:p + 1, h // 3]
            reach = np.abs(k[:p + 1, h // 3]) @ np.abs(case.q[r, h].astype(np.float64)) * 0.125
            bound = (64 * reach.max() + 200) * 2.0**-24 * (weight @ np.abs(v[:p + 1, h // 3]))
            assert_close(found[r, h], exact, bound)


def test_attention_ignores_dead_memory_and_other_rows():
    """Catches a read of slots beyond the row, or of a neighbour's garbage."""
    case = Case(4, 2, 64, 130, 256, n_rows=3)
    expected = case.run(slice(0, 2))
    k, v = case.caches
    k[:, 129 // 16, :, 129 % 16], v[:, 129] = np.inf, np.nan  # only the last row sees it
    found = case.run()
    assert_same_bits(found[:2], expected)
    assert np.isnan(found[2]).all()


@pytest.mark.parametrize("group", [1, 2, 4])
def test_keys_that_some_rows_of_a_block_see_touch_no_other(group):
    """Catches edges of windows that are summed for all rows of a block, times a weight of 0."""
    heads, window, n_rows = 2 * group, 20, 8
    case = Case(heads, 2, 64, 256, 256, n_rows=n_rows)
    alone = [case.run(slice(r, r + 1), window=window) for r in range(n_rows)]
    first = int(case.positions[0])
    k, v = case.caches
    seen = {first - window + 1: [0], first + n_rows - 1: [n_rows - 1]}
    for position, rows in seen.items():  # the oldest key of the first row, the newest of the last
        k[:, position // 16, :, position % 16], v[:, position] = np.nan, np.nan
    found = case.run(window=window)
    for r in range(n_rows):
        if any(r in rows for rows in seen.values()):
            assert np.isnan(found[r]).all()
        else:
            assert_same_bits(found[r : r + 1], alone[r])


def test_a_first_chunk_is_merged_into_zero():
    """Catches a first chunk that is copied as it is: 0 * 0 + x has no negative zero."""
    case = Case(2, 1, 64, 8, 128, kv_type="f32", n_rows=1)
    case.k[:], case.q[:] = 0.0, 1.0
    case.k[0, 0, 0], case.v[0] = 4.0, 0.0  # the largest weight
    case.v[1:] = np.float32(-1.2e-38)  # times a small weight it is flushed, and keeps its sign
    case.write(slice(0, 8))
    found = case.run(scale=1.0)
    assert not (np.signbit(found) & (found == 0)).any()


def test_attention_fails_closed_on_bad_positions():
    """Catches a read outside the cache: a row without a sound set of keys is NaN."""
    case = Case(4, 2, 64, 256, 256, n_rows=3)
    expected = case.run()
    for bad in (-1, 256, 100000, 2**31 - 1, -(2**31)):
        case.positions[1] = bad
        found = case.run()
        assert np.isnan(found[1]).all()
        assert_same_bits(found[[0, 2]], expected[[0, 2]])


def test_attention_writes_only_its_rows_and_replays():
    """Catches a store outside strided rows, and work that only happens at record time."""
    case = Case(9, 3, 64, 200, 256, n_rows=4)
    expected = case.run()
    found = check_writes_only(
        lambda out: replay(lambda: ops.attention(out, case.q, *case.caches, case.positions, 0,
                                                 0.125, 0.0)), case.q.shape)
    assert_same_bits(found, expected)


def test_kv_write_rounds_to_nearest_even_and_keeps_subnormals():
    """Catches truncation, flushed halves, and a wrong place in the tiled layout."""
    rng = np.random.default_rng(0)
    k = np.exp(rng.uniform(-18, 11, (40, 2, 48))) * rng.choice([-1, 1], (40, 2, 48))
    k = ops.upload(k.astype(np.float32))
    k[0, 0, :7] = [65519.996, 65520, 1e9, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 6e-8]
    k[0, 0, 7:9] = [1 + 2.0**-11, 1 + 3 * 2.0**-11]  # ties: to even, down and up
    v = ops.upload(k[::-1].copy())
    with np.errstate(over="ignore"):
        k16, v16 = k.astype(np.float16), v.astype(np.float16)
    cache_k, cache_v = ops.kv_cache(2, 48, 128, "f16")
    positions = ops.upload(np.arange(500, 540, dtype=np.int32))
    ops.kv_write(cache_k, cache_v, k, v, positions)
    slot = positions % 128
    assert_same_bits(cache_k[:, slot // 16, :, slot % 16], k16)
    assert_same_bits(cache_v[:, slot].swapaxes(0, 1), v16)
    others = np.setdiff1d(np.arange(128), slot)
    assert not cache_v[:, others].any() and not cache_k[:, others // 16, :, others % 16].any()


def test_kv_write_to_f32_copies_every_bit():
    """Catches a rounding or a flush in the float32 cache."""
    k = ops.upload(np.random.default_rng(1).standard_normal((5, 2, 32)).astype(np.float32))
    k[0, 0, :2] = [1e-40, -0.0]
    cache_k, cache_v = ops.kv_cache(2, 32, 128, "f32")
    positions = ops.upload(np.array([3, -1, 0, 127, 64], np.int32))
    ops.kv_write(cache_k, cache_v, k, k, positions)
    for row in (0, 2, 3, 4):
        slot = positions[row]
        assert_same_bits(cache_k[:, slot // 16, :, slot % 16], k[row])
        assert_same_bits(cache_v[:, slot], k[row])
    assert np.count_nonzero(cache_v.any(-1)) == 8, "a negative position was stored"


def test_wrong_caches_are_refused():
    """Catches silent misuse of a cache of another geometry."""
    with pytest.raises(UsageError, match="multiple of 128"):
        ops.kv_cache(2, 64, 100, "f16")
    with pytest.raises(UsageError, match="q8_0"):
        ops.kv_cache(2, 64, 128, "q8_0")
    with pytest.raises(UsageError, match="head_dim is 40"):
        ops.kv_cache(2, 40, 128, "f16")
    case = Case(4, 2, 64, 130, 256, n_rows=3)
    with pytest.raises(UsageError, match="3 query heads"):
        ops.attention(case.q[:, :3].copy(), case.q[:, :3].copy(), *case.caches, case.positions, 0,
                      1.0, 0.0)
    with pytest.raises(UsageError, match="cache_k has shape"):
        ops.kv_write(*ops.kv_cache(2, 32, 128, "f16"), case.k[:3], case.v[:3], case.positions)
