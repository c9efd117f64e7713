"""Ops of drafts: attention over spans, dynamic convolution, candidate selector.

Every comparison is on integer views, against a model of the stated order on NumPy arrays.
"""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from cudflash.ops.cpu import special
from tests.helpers import exact_f32 as E

CHUNK = ops.CHUNK
INF = np.float32(np.inf)


@pytest.fixture(params=[1, 2], autouse=True)
def n_threads(request):
    ops.set_threads(request.param)


def rng(*seed):
    return np.random.default_rng(seed)


def normal(generator, *shape):
    return generator.standard_normal(shape).astype(np.float32)


def poisoned(*shape):
    return np.full(shape, np.nan, np.float32)


def assert_same_bits(found, expected):
    differ = found.view(np.int32) != np.ascontiguousarray(expected).view(np.int32)
    assert not differ.any(), f"{differ.sum()} of {differ.size} values differ"


# -- attention ------------------------------------------------------------------------------------


class Rows:
    """Keys and values by absolute position, and caches that hold a part of them."""

    def __init__(self, n, n_kv, d, seed=0):
        generator = rng(n, n_kv, d, seed)
        self.n_kv, self.d = n_kv, d
        self.k, self.v = normal(generator, n, n_kv, d), normal(generator, n, n_kv, d)

    def ring(self, first, last, capacity, kv_type="f32"):
        """Caches that hold positions first .. last - 1; all other slots are NaN."""
        cache_k, cache_v = ops.kv_cache(self.n_kv, self.d, capacity, kv_type)
        cache_k[...], cache_v[...] = np.nan, np.nan
        for start in range(first, last, capacity):
            at = np.arange(start, min(last, start + capacity), dtype=np.int32)
            ops.kv_write(cache_k, cache_v, self.k[at], self.v[at], at)
        return cache_k, cache_v


def attention_model(q, keys, values, parts, scale, softcap):
    """All heads of one row: keys (n, H, D) of ``parts`` (positions of one chunk each) in order."""
    A = E.Arithmetic
    n_heads, d = q.shape
    m, total, acc = np.full(n_heads, -INF), np.zeros(n_heads, np.float32), np.zeros_like(q)
    for positions in parts:
        scores = np.zeros((len(positions), n_heads), np.float32)
        for j in range(d):
            scores = E.fma(keys[positions, :, j], q[:, j], scores)
        scores = E.mul(scores, np.float32(scale))
        if softcap:
            cap = np.float32(softcap)
            scores = E.mul(cap, special.tanh(A, E.div(scores, cap)))
        m_c = scores.max(axis=0)
        p = special.exp(A, E.sub(scores, m_c))
        lanes, acc_c = np.zeros((n_heads, 16), np.float32), np.zeros_like(q)
        for i, position in enumerate(positions):
            lanes[:, position % 16] = E.add(lanes[:, position % 16], p[i])
            acc_c = E.fma(p[i][:, None], values[position], acc_c)
        top = np.maximum(m, m_c)
        a, b = special.exp(A, E.sub(m, top)), special.exp(A, E.sub(m_c, top))
        total = E.fma(total, a, E.mul(E.halving_tree(lanes), b))
        acc = E.fma(acc, a[:, None], E.mul(acc_c, b[:, None]))
        m = top
    return E.div(acc, total[:, None])


def chunks(lo, hi):
    """Positions lo .. hi - 1 by chunk."""
    edges = [lo, *range((lo // CHUNK + 1) * CHUNK, hi, CHUNK), hi]
    return [np.arange(a, b) for a, b in zip(edges, edges[1:]) if a < b]


def span_model(rows, q, ranges, n_sink, scale, softcap=0.0):
    group = q.shape[1] // rows.n_kv
    keys, values = (np.repeat(a, group, axis=1) for a in (rows.k, rows.v))
    out = np.empty_like(q)
    for r, (lo, hi) in enumerate(ranges):
        parts = chunks(0, n_sink) + chunks(max(lo, n_sink), hi)
        out[r] = attention_model(q[r], keys, values, parts, scale, softcap)
    return out


def run_span(q, cache, sink, ranges, n_sink, scale=0.25, softcap=0.0):
    out = poisoned(*q.shape)
    pinned = (None, None) if sink is None else sink
    count = None if sink is None else np.array([n_sink], np.int32)
    ops.attention_span(
        out, q, *cache, *pinned, np.array(ranges, np.int32), count, scale, softcap
    )
    return out


CASES = {
    # lo, hi per row; pinned rows; slots of the ring; first position the ring holds
    "start of a conversation": ([(0, 8)] * 8, 0, 128, 0),
    "context shorter than the sink": ([(0, 19)] * 8, 11, 128, 11),
    "sink ends inside a chunk, window behind it": (
        [(200 + r, 308) for r in range(8)], 64, 256, 64),
    "sink of more than a chunk, causal rows": (
        [(190 + r, 301 + r) for r in range(8)], 150, 256, 150),
    "wrapped ring": ([(610 + r, 738) for r in range(8)], 64, 256, 600),
    "rows with different chunks": ([(10, 20), (100, 300), (255, 257), (299, 300)], 5, 384, 5),
    "single row": ([(3, 4)], 0, 128, 3),
    "window inside the sink": ([(10, 70)] * 3, 64, 128, 64),
}  # fmt: skip


@pytest.mark.parametrize(
    "case, n_heads, n_kv, d",
    [(case, 4, 1, 64) for case in CASES] + [("wrapped ring", 6, 2, 16), ("wrapped ring", 3, 3, 128)],
)
def test_span_attention_equals_the_model(case, n_heads, n_kv, d):
    """Catches a wrong order, a pinned row counted twice, and unseen slots (NaN) that leak."""
    ranges, n_sink, capacity, first = CASES[case]
    last = max(hi for _, hi in ranges)
    rows = Rows(last, n_kv, d)
    q = normal(rng(d, len(ranges)), len(ranges), n_heads, d)
    sink = rows.ring(0, n_sink, 256) if n_sink else None
    found = run_span(q, rows.ring(first, last, capacity), sink, ranges, n_sink)
    assert_same_bits(found, span_model(rows, q, ranges, n_sink, 0.25))


def test_span_attention_with_soft_cap_and_f16_equals_the_model():
    """Catches a cap left out, and f16 rows read as f32."""
    ranges = [(130, 200), (190, 201)]
    rows = Rows(201, 2, 32)
    rows.k, rows.v = (a.astype(np.float16).astype(np.float32) for a in (rows.k, rows.v))
    q = normal(rng(5), 2, 4, 32)
    found = run_span(
        q, rows.ring(40, 201, 256, "f16"), rows.ring(0, 40, 128, "f16"), ranges, 40, 0.3, 2.0
    )
    assert_same_bits(found, span_model(rows, q, ranges, 40, 0.3, 2.0))


def test_span_attention_agrees_with_attention_without_a_sink():
    """Catches two orders for the same keys: a window that ends at the row is plain attention."""
    rows, positions = Rows(300, 2, 64), np.arange(280, 296, dtype=np.int32)
    cache = rows.ring(0, 300, 384)
    q = normal(rng(6), 16, 4, 64)
    plain = poisoned(*q.shape)
    ops.attention(plain, q, *cache, positions, 100, 0.125, 0.0)
    ranges = np.stack([positions - 99, positions + 1], axis=1)
    assert_same_bits(run_span(q, cache, None, ranges, 0, 0.125), plain)


def test_span_attention_rows_are_independent_of_block_capacity_and_sink_size():
    """Catches bits that depend on the rows beside, on the ring's size, or on its history."""
    rows = Rows(900, 2, 64)
    q = normal(rng(7), 16, 8, 64)
    ranges = [(700 + r, 880) for r in range(16)]
    sink = rows.ring(0, 64, 128)
    whole = run_span(q, rows.ring(690, 880, 256), sink, ranges, 64)
    for r in range(16):
        one = run_span(q[r:r + 1], rows.ring(64, 880, 1024), rows.ring(0, 100, 256),
                       ranges[r:r + 1], 64)
        assert_same_bits(one, whole[r:r + 1])
    assert_same_bits(run_span(q[:5], rows.ring(650, 900, 256), sink, ranges[:5], 64), whole[:5])


@pytest.mark.parametrize(
    "row, n_sink",
    [((5, 5), 0), ((-1, 4), 0), ((0, 129), 0), ((9, 3), 0), ((60, 90), -1), ((60, 90), 129)],
)
def test_rows_that_cannot_be_served_are_nan(row, n_sink):
    """Catches an answer from stale slots where a recorded op cannot raise; neighbours stay right."""
    rows = Rows(128, 1, 16)
    cache, sink = rows.ring(0, 128, 128), rows.ring(0, 128, 128)
    found = run_span(normal(rng(8), 2, 2, 16), cache, sink, [row, (0, 9)], n_sink)
    assert np.isnan(found[0]).all()
    assert np.isnan(found[1]).any() == (n_sink not in range(129))


def test_span_attention_reads_ranges_at_launch():
    """Catches a recorded span that keeps the numbers of the recording."""
    rows = Rows(64, 1, 16)
    cache, q = rows.ring(0, 64, 128), normal(rng(9), 2, 2, 16)
    out, ranges = poisoned(2, 2, 16), np.array([(0, 9), (1, 9)], np.int32)
    with ops.capture() as graph:
        ops.attention_span(out, q, *cache, None, None, ranges, None, 0.25, 0.0)
    ops.copy_in(ranges, [(20, 50), (0, 64)])
    graph.launch()
    assert_same_bits(out, run_span(q, cache, None, [(20, 50), (0, 64)], 0))


def test_span_attention_refuses_half_a_sink():
    """Catches a sink that is silently not attended to."""
    rows = Rows(9, 1, 16)
    cache, q = rows.ring(0, 9, 128), normal(rng(9), 1, 2, 16)
    ranges, count = np.array([(0, 9)], np.int32), np.array([1], np.int32)
    f16 = rows.ring(0, 9, 128, "f16")
    for sink in ((*cache, None), (None, None, count), (*f16, count)):
        with pytest.raises(UsageError, match="sink"):
            ops.attention_span(
                np.empty_like(q), q, *cache, sink[0], sink[1], ranges, sink[2], 1.0, 0.0
            )


# -- convolution ----------------------------------------------------------------------------------


def conv_model(x, dyn, base, side, group):
    n_rows, width = x.shape
    n_taps = base.shape[1]
    dyn = dyn.reshape(n_rows, 2, n_taps, width // group)
    out = np.empty_like(x)
    for t in range(n_rows):
        for o in range(min(n_taps, t + 1)):
            k = E.add(base[side, o], np.repeat(dyn[t, side, o], group))
            out[t] = E.fma(k, x[t - o], out[t]) if o else E.mul(k, x[t])
    return out


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    "n_rows, width, group, n_taps",
    [(8, 64, 16, 2), (8, 96, 32, 2), (5, 40, 20, 3), (16, 35, 7, 1), (1, 64, 64, 2), (3, 9, 1, 4)],
)
def test_dynamic_convolution_equals_the_model(n_rows, width, group, n_taps, side):
    """Catches tap order, a group shifted by one, the other side's kernel, a carry into row 0."""
    generator = rng(n_rows, width, side)
    x, base = normal(generator, n_rows, width), normal(generator, 2, n_taps, width)
    dyn = normal(generator, n_rows, 2 * n_taps * width // group)
    out = poisoned(n_rows, width)
    ops.dynamic_conv(out, x, dyn, base, side, group)
    assert_same_bits(out, conv_model(x, dyn, base, side, group))
    for r in range(n_rows):
        ops.dynamic_conv(shorter := poisoned(r + 1, width), x[:r + 1], dyn[:r + 1], base, side,
                         group)
        assert_same_bits(shorter, out[:r + 1])


def test_dynamic_convolution_of_strided_rows():
    """Catches strides taken for widths."""
    generator = rng(3)
    wide = normal(generator, 8, 80)
    x, dyn, base = wide[:, 16:48], normal(generator, 8, 8), normal(generator, 2, 2, 32)
    out = poisoned(8, 50)
    ops.dynamic_conv(out[:, 9:41], x, dyn, base, 0, 16)
    assert_same_bits(np.ascontiguousarray(out[:, 9:41]), conv_model(x, dyn, base, 0, 16))
    assert np.isnan(out[:, :9]).all() and np.isnan(out[:, 41:]).all()


def test_identity_kernel_copies():
    """Catches a convolution that is not the identity at its own initial value."""
    base = np.zeros((2, 2, 32), np.float32)
    base[:, 0] = 1
    x = normal(rng(4), 8, 32)
    ops.dynamic_conv(out := poisoned(8, 32), x, np.zeros((8, 8), np.float32), base, 1, 16)
    assert_same_bits(out, x)


def test_dynamic_convolution_refuses_what_does_not_fit():
    """Catches coefficients of another group size read as this one's."""
    x, base = np.zeros((4, 32), np.float32), np.zeros((2, 2, 32), np.float32)
    for side, group, width in ((2, 16, 8), (0, 12, 8), (0, 16, 16)):
        with pytest.raises(UsageError, match="dynamic_conv"):
            ops.dynamic_conv(
                np.empty_like(x), x, np.zeros((4, width), np.float32), base, side, group
            )


# -- selector -------------------------------------------------------------------------------------


def lattice_model(succ, pred, gate, unary):
    n_rows, k, rank = succ.shape
    lanes = np.zeros((n_rows, k, k, 16), np.float32)
    for r in range(rank):
        w = E.mul(pred[:, :, r], gate[:, None, r])
        lanes[..., r % 16] = E.fma(
            w[:, :, None], succ[:, None, :, r], np.ascontiguousarray(lanes[..., r % 16])
        )
    return E.add(unary[:, None, :], E.halving_tree(lanes))


def walk_model(lattice, ids):
    A, previous, out = E.Arithmetic, 0, []
    for t, row_ids in enumerate(ids):
        row = lattice[t, previous]
        previous = int(np.argmax(row))
        total = np.float32(0)
        for score in row:
            total = E.add(total, special.exp(A, E.sub(score, row[previous])))
        out.append((row_ids[previous], previous, row[previous], E.div(np.float32(1), total)))
    return [np.array(column) for column in zip(*out)]


@pytest.mark.parametrize("n_rows, k, rank", [(7, 16, 256), (7, 8, 32), (3, 6, 20), (1, 1, 7)])
def test_lattice_and_walk_equal_the_model(n_rows, k, rank):
    """Catches predecessor and successor exchanged, a lane order, a walk that looks ahead."""
    generator = rng(n_rows, k, rank)
    succ, pred = normal(generator, n_rows, k, rank), normal(generator, n_rows, k, rank)
    gate, unary = normal(generator, n_rows, rank), normal(generator, n_rows, k)
    lattice = poisoned(n_rows, k, k)
    ops.selector_lattice(lattice, succ, pred, gate, unary)
    assert_same_bits(lattice, lattice_model(succ, pred, gate, unary))
    ids = generator.permutation(1000)[: n_rows * k].reshape(n_rows, k).astype(np.int32)
    tokens, index = np.full((2, n_rows), -7, np.int32)
    scores, confidence = poisoned(2, n_rows)
    ops.selector_walk(tokens, index, scores, confidence, lattice, ids)
    expected = walk_model(lattice, ids)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_array_equal(index, expected[1])
    assert_same_bits(scores, expected[2])
    assert_same_bits(confidence, expected[3])


def test_lattice_rows_are_independent():
    """Catches a score that depends on how many rows are scored at once."""
    generator = rng(11)
    succ, pred = normal(generator, 7, 6, 40), normal(generator, 7, 6, 40)
    gate, unary = normal(generator, 7, 40), normal(generator, 7, 6)
    ops.selector_lattice(whole := poisoned(7, 6, 6), succ, pred, gate, unary)
    for t in range(7):
        at = slice(t, t + 1)
        ops.selector_lattice(one := poisoned(1, 6, 6), succ[at], pred[at], gate[at], unary[at])
        assert_same_bits(one, whole[at])


def test_walk_takes_the_first_of_equal_scores_and_follows_its_row():
    """Catches ties to the last, and a walk along row 0 only."""
    lattice = np.zeros((3, 2, 2), np.float32)
    lattice[1, 0], lattice[1, 1] = (5, 5), (9, 0)
    lattice[0, 0] = (1, 2)  # candidate 1 first, so row 1 is read at predecessor 1
    ids = np.array([[10, 11], [20, 21], [30, 31]], np.int32)
    tokens, index = np.zeros((2, 3), np.int32)
    scores, confidence = poisoned(2, 3)
    ops.selector_walk(tokens, index, scores, confidence, lattice, ids)
    assert tokens.tolist() == [11, 20, 30] and scores.tolist() == [2, 9, 0]
    assert confidence[2] == 0.5


def test_selector_refuses_what_does_not_fit():
    """Catches codebook rows of another width or number."""
    f32 = np.float32
    shapes = (3, 4, 4), (3, 4, 8), (3, 4, 8), (3, 8), (3, 4)
    arrays = [np.zeros(shape, f32) for shape in shapes]
    for i, wrong in enumerate([(3, 5, 5), (3, 4, 7), (2, 4, 8), (3, 7), (3, 5)]):
        changed = list(arrays)
        changed[i] = np.zeros(wrong, f32)
        with pytest.raises(UsageError, match="selector_lattice"):
            ops.selector_lattice(*changed)
