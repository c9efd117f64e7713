"""What only a draft or a verified block needs, against the CPU's ops, bit for bit.

The shipped .cu files run in emulation (README.md).
"""

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.spec.acceptance import ENDS, TokenRows, match
from tests.emulation import device_ops as device
from tests.emulation.host_module import to_device, unavailable
from tests.emulation.test_op_twins import SCHEDULES, caches, normal
from tests.helpers.ops_checks import assert_same_bits, poisoned
from tests.ops.test_draft_ops import CASES, Rows, run_span

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

MANY_ROWS = (1, 2, 4, 7, 8, 9, 16, 17, 40)


def on_device(pair):
    """Copies of a pair of caches."""
    return None if pair is None else [to_device(cache) for cache in pair]


# -- attention over spans -------------------------------------------------------------------------


@pytest.mark.parametrize("case,n_heads,n_kv,d,kv_type", [
    *((case, 4, 1, 64, "f32") for case in sorted(CASES)), ("wrapped ring", 6, 2, 16, "f16"),
    ("sink of more than a chunk, causal rows", 3, 3, 128, "f16"), ("wrapped ring", 6, 2, 80, "f32")])
def test_span_attention_has_the_cpus_bits(case, n_heads, n_kv, d, kv_type):
    """A pinned row counted twice or in another order, a slot of the wrong ring, damage outside."""
    ranges, n_sink, capacity, first = CASES[case]
    last = max(hi for _, hi in ranges)
    rows = Rows(last, n_kv, d)
    q = normal((len(ranges), n_heads, d), d)
    sink = rows.ring(0, n_sink, 256, kv_type) if n_sink else None
    cache = rows.ring(first, last, capacity, kv_type)
    expected = run_span(q, cache, sink, ranges, n_sink, 0.25, 3.0)
    cache, sink = on_device(cache), on_device(sink)
    assert np.isfinite(expected).all()
    assert_same_bits(device.attention_span(q, cache, sink, ranges, n_sink, 0.25, 3.0), expected)
    for r in {0, len(ranges) - 1}:
        found = device.attention_span(q[r:r + 1], cache, sink, ranges[r:r + 1], n_sink, 0.25, 3.0,
                                      threads=64, schedule="random", seed=r)
        assert_same_bits(found, expected[r:r + 1])


@pytest.mark.parametrize("m", MANY_ROWS)
def test_span_attention_has_the_cpus_bits_for_every_m(m):
    """More pairs than a block takes at a time; a row that depends on those beside it."""
    rows, ranges = Rows(400, 1, 32), [(150 + 3 * r, 330 + r) for r in range(m)]
    q = normal((m, 3, 32), m)
    cache, sink = rows.ring(130, 400, 384), rows.ring(0, 130, 256)
    found = device.attention_span(q, on_device(cache), on_device(sink), ranges, 130, 0.25, 0.0,
                                  threads=96, schedule="reverse")
    assert_same_bits(found, run_span(q, cache, sink, ranges, 130))


@pytest.mark.parametrize(
    "row,n_sink", [((5, 5), 0), ((-1, 4), 0), ((0, 129), 0), ((9, 3), 0), ((60, 90), -1),
                   ((60, 90), 129), ((5, 5), 7), ((0, 2**31 - 1), 0)])
def test_rows_that_cannot_be_served_are_the_cpus(row, n_sink):
    """An answer from stale slots, a neighbour that is damaged with it, a loop over everything."""
    rows = Rows(128, 1, 16)
    cache, sink = rows.ring(0, 128, 128), rows.ring(0, 128, 128)
    q, ranges = normal((2, 2, 16), 8), [row, (0, 9)]
    expected = run_span(q, cache, sink, ranges, n_sink)
    found = device.attention_span(q, on_device(cache), on_device(sink), ranges, n_sink, 0.25, 0.0)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert_same_bits(found[~np.isnan(found)], expected[~np.isnan(found)])


# -- attention of many rows -----------------------------------------------------------------------

PREFILL = {  # heads, kv heads, head_dim, capacity, first position, window, softcap
    "prompt": (4, 2, 32, 256, 0, 0, 0.0),
    "window": (3, 1, 64, 512, 290, 100, 0.0),
    "ring": (2, 2, 48, 256, 600, 200, 50.0),
    "wide heads": (2, 1, 256, 384, 100, 0, 0.0),
}


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("case", sorted(PREFILL))
def test_prefill_attention_has_the_cpus_bits(case, kv_type):
    """Running results that are merged in another order than records, keys a row does not see."""
    n_heads, n_kv_heads, d, capacity, first, window, cap = PREFILL[case]
    cpu, card = caches(n_kv_heads, d, capacity, kv_type, first + 40)
    q, positions = normal((40, n_heads, d), 3, 2.0), np.arange(first, first + 40, dtype=np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, window, d**-0.5, cap)
    assert np.isfinite(expected).all()
    for m, schedule in ((1, "in order"), (9, "random"), (17, "reverse"), (40, "random")):
        found = device.attention_prefill(q[40 - m:], *card, positions[40 - m:], window, d**-0.5,
                                         cap, schedule=schedule, seed=m)
        assert_same_bits(found, expected[40 - m:])


def test_prefill_attention_of_rows_without_keys_is_nan():
    """A row that cannot be answered and gets its neighbour's running result."""
    cpu, card = caches(1, 32, 128, "f16", 128)
    q, positions = normal((3, 2, 32), 1), np.array([-1, 100, 128], np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, 0, 0.2, 0.0)
    found = device.attention_prefill(q, *card, positions, 0, 0.2, 0.0)
    assert np.isnan(found[[0, 2]]).all() and np.isnan(expected[[0, 2]]).all()
    assert_same_bits(found[1], expected[1])


def test_attention_of_rows_far_apart_has_the_cpus_bits():
    """A grid that ends before the last row's chunks: rows of one call need not be neighbours."""
    cpu, card = caches(1, 32, 128, "f16", 1000)
    q, positions = normal((3, 2, 32), 1), np.array([900, 130, 999], np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, 60, 0.2, 0.0)
    assert_same_bits(device.attention(q, *card, positions, 60, 0.2, 0.0), expected)
    assert_same_bits(device.attention_prefill(q, *card, positions, 60, 0.2, 0.0), expected)


# -- convolution and selector ---------------------------------------------------------------------


@pytest.mark.parametrize("n_rows,width,group,n_taps", [
    (8, 64, 16, 2), (5, 520, 20, 3), (17, 9, 1, 4), (1, 64, 64, 2),
    *((m, 35, 7, 3) for m in MANY_ROWS)])
def test_dynamic_convolution_has_the_cpus_bits(n_rows, width, group, n_taps):
    """Tap order, a group shifted by one, the other side's kernel, a carry into row 0."""
    x, base = normal((n_rows, width), 1), normal((2, n_taps, width), 2)
    dyn = normal((n_rows, 2 * n_taps * width // group), 3)
    for side, (schedule, seed) in zip((0, 1, 1), SCHEDULES):
        expected = poisoned(x.shape)
        ops.dynamic_conv(expected, x, dyn, base, side, group)
        found = device.dynamic_conv(x, dyn, base, side, group, schedule=schedule, seed=seed)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("n_rows,k,rank", [(7, 16, 256), (15, 40, 33), (3, 6, 20), (1, 1, 7)])
def test_selector_has_the_cpus_bits(n_rows, k, rank):
    """Predecessor and successor exchanged, a lane order, a sum that is not ascending."""
    succ, pred = normal((n_rows, k, rank), 1), normal((n_rows, k, rank), 2)
    gate, unary = normal((n_rows, rank), 3), normal((n_rows, k), 4)
    lattice = poisoned((n_rows, k, k))
    ops.selector_lattice(lattice, succ, pred, gate, unary)
    for schedule, seed in SCHEDULES:
        found = device.selector_lattice(succ, pred, gate, unary, schedule=schedule, seed=seed)
        assert_same_bits(found, lattice)
    check_walk(lattice)


def check_walk(lattice):
    """Compare the walk through a lattice with the CPU's."""
    n_rows, k, _ = lattice.shape
    ids = np.random.default_rng(1).permutation(9999)[:n_rows * k].reshape(n_rows, k)
    ids = ids.astype(np.int32)
    tokens, index = poisoned((n_rows,), np.int32), poisoned((n_rows,), np.int32)
    scores, confidence = poisoned((n_rows,)), poisoned((n_rows,))
    ops.selector_walk(tokens, index, scores, confidence, lattice, ids)
    found = device.selector_walk(lattice, ids)
    assert np.array_equal(found[0], tokens) and np.array_equal(found[1], index)
    for a, b in zip(found[2:], (scores, confidence)):
        assert np.array_equal(np.isnan(a), np.isnan(b))
        assert_same_bits(a[~np.isnan(a)], b[~np.isnan(b)])
    return index


def test_walk_takes_the_first_of_equals_and_no_nan_but_the_first():
    """A tie that goes to a later candidate, a NaN that is chosen or passed over differently."""
    lattice = normal((6, 40, 40), 1)
    lattice[0, 0, [5, 36]] = 9
    lattice[1, :, 3] = np.nan
    lattice[2, :, 0] = np.nan
    lattice[3, 0] = -np.inf
    lattice[4, 0] = np.nan
    lattice[5, 0, :2], lattice[5, 0, 2:] = [-0.0, 0.0], -1
    assert list(check_walk(lattice))[::2] == [5, 0, 0]


# -- selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n,k", [(1, 1), (37, 37), (5000, 40), (20001, 16), (4097, 4097), (600, 64)])
def test_top_k_has_the_cpus_ids_and_values(n, k):
    """A tie that goes to a higher id, a span whose best are lost, a NaN or a filler that wins."""
    logits = normal((7, n), n)
    logits[1] = np.round(logits[1])                  # ties everywhere
    logits[2, :] = -np.inf
    logits[3, :] = np.nan
    logits[4, n // 2:] = np.nan
    logits[5, ::3] = -np.inf
    logits[6] = np.where(np.arange(n) % 2, -0.0, 0.0)
    rows = 7 if n < 20001 else 2
    ids, values = poisoned((rows, k), np.int32), poisoned((rows, k))
    ops.top_k(ids, values, logits[:rows])
    for schedule, seed in SCHEDULES if k <= 64 else SCHEDULES[:1]:
        found_ids, found_values = device.top_k(logits[:rows], k, schedule=schedule, seed=seed)
        assert np.array_equal(found_ids, ids)
        assert_same_bits(found_values, values)
    one_ids, one_values = device.top_k(logits[1:2], k)
    assert np.array_equal(one_ids, ids[1:2])
    assert_same_bits(one_values, values[1:2])


@pytest.mark.parametrize("m,n", [(1, 1), (9, 8193), (40, 100), (3, 20000), (0, 7)])
def test_check_finite_has_the_cpus_flag(m, n):
    """A value in the last span, row or lane that is not looked at; a large number that is refused."""
    x = normal((m, n), n, 1e37)
    for place in (None, (0, 0), (-1, -1), (m // 2, n - 1)):
        for bad in (np.nan, np.inf, -np.inf):
            y, flag = np.array(x), poisoned((1,), np.int32)
            if place is not None and m:
                y[place] = bad
            ops.check_finite(flag, y)
            assert device.check_finite(y, schedule="random", seed=1) == flag[0]


# -- acceptance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3, 7, 15, 31])
def test_greedy_acceptance_is_the_rule_of_the_host(n):
    """A draft past the first difference that is kept, a token after a stop, a wrong count."""
    generator = np.random.default_rng(n)
    for turn in range(40):
        best = generator.integers(0, 5, n + 1).tolist()
        drafts = [b if generator.random() < 0.8 else 9 for b in best[:n]]
        stops = frozenset(generator.integers(0, 8, turn % 3).tolist())
        expected = match(drafts, TokenRows(best), stops)
        finite, accepted, end, tokens = device.accept_greedy(drafts, best, 1, stops)
        assert (finite, accepted, tuple(tokens)) == (1, expected.accepted, expected.tokens)
        assert ENDS[end] == expected.end
        outcome = poisoned((5 + n,), np.int32)
        ops.accept_greedy(outcome, *(np.array(a, np.int32) for a in (drafts, best, [1], [*stops])))
        assert outcome[:4].tolist() == [1, accepted, len(tokens), end]
        assert outcome[4:4 + len(tokens)].tolist() == tokens


def test_nothing_is_accepted_from_rows_that_are_not_finite():
    """Tokens of a failed pass that become part of the answer."""
    assert device.accept_greedy([1, 2], [1, 2, 3], 0, ()) == (0, 0, 0, [])
