"""Every kernel once in the checking build: no race, no access out of bounds, none misaligned, no
unwritten shared memory; and its bits are still the CPU's.

Small shapes with ragged ends: the checker keeps a record for every byte.
"""

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from tests.emulation import device_ops as device
from tests.emulation.host_module import to_device, unavailable
from tests.emulation.test_matmul_twin import on_cpu
from tests.emulation.test_op_twins import caches, normal
from tests.helpers.ops_checks import assert_same_bits, poisoned
from tests.ops.test_draft_ops import Rows, run_span
from tests.ops.test_matmul import activations_with_outliers, random_rows

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

HOW = {"mode": "check", "schedule": "random", "seed": 5}


@pytest.mark.parametrize("name,k,activations", [
    ("Q4_K", 512, "int8x2"), ("Q6_K", 512, "int8x2"), ("Q3_K", 512, "int8"), ("IQ4_XS", 512, "int8"),
    ("Q5_1", 96, "int8x2"), ("Q8_0", 96, "int8")])
def test_packed_product_is_clean(name, k, activations):
    """A fragment, header or scale read past the last tile; a partial sum read before it is there."""
    raw, x = random_rows(name, 37, k), activations_with_outliers(9, k)
    w = device.retile(raw, name, k, **HOW)
    assert_same_bits(device.matmul(x, w, activations, 2, **HOW), on_cpu(raw, name, x, activations))


def test_row_group_past_the_last_tile_is_clean():
    """The second half of a block that finds no rows and reads past the matrix."""
    for name, k in (("Q4_K", 512), ("Q8_0", 96)):
        raw, x = random_rows(name, 5, k), activations_with_outliers(2, k)
        w = device.retile(raw, name, k)
        found = device.matmul(x, w, "int8", 1, row_groups=2, **HOW)
        assert_same_bits(found, on_cpu(raw, name, x, "int8"))


@pytest.mark.parametrize("name,k", [("F16", 100), ("F32", 36)])
def test_float_product_is_clean(name, k):
    """A 16-byte step past the last element or the last row of x."""
    w = normal((33, k), 1)
    raw = w.view(np.uint8) if name == "F32" else w.astype(np.float16).view(np.uint8)
    x = activations_with_outliers(3, k)
    expected = poisoned((3, 33))
    ops.matmul(expected, x, ops.pack(raw, name, k))
    assert_same_bits(device.matmul_float(x, raw, name, 4, **HOW), expected)


@pytest.mark.parametrize("d", [48, 300])
def test_rms_norm_is_clean(d):
    """A tree without its barriers."""
    x, weight = normal((3, d)), normal(d, 1)
    expected = poisoned(x.shape)
    ops.rms_norm(expected, x, weight, 1e-6)
    assert_same_bits(device.rms_norm(x, weight, 1e-6, **HOW), expected)


def test_attention_and_cache_are_clean():
    """Scores that one warp writes and another reads too early, a chunk past the cache's end."""
    cpu, on_device = caches(2, 32, 256, "f16", 300)
    q, positions = normal((5, 4, 32), 1), np.arange(295, 300, dtype=np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, 150, 0.2, 0.0)
    found = device.attention(q, *on_device, positions, 150, 0.2, 0.0, threads=128, **HOW)
    assert_same_bits(found, expected)
    k, v = normal((3, 2, 32), 2), normal((3, 2, 32), 3)
    on_device = [to_device(cache) for cache in cpu]
    positions = np.array([300, 301, 302], np.int32)
    ops.kv_write(*cpu, k, v, positions)
    device.kv_write(*on_device, k, v, positions, **HOW)
    for a, b in zip(on_device, cpu):
        assert_same_bits(a, b)


def test_prefill_attention_is_clean():
    """A chunk's scores that overwrite the last one's before they are used."""
    cpu, on_device = caches(1, 48, 256, "f32", 300)
    q, positions = normal((17, 4, 48), 1), np.arange(283, 300, dtype=np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, 150, 0.2, 0.0)
    assert_same_bits(device.attention_prefill(q, *on_device, positions, 150, 0.2, 0.0, **HOW),
                     expected)


def test_span_attention_is_clean():
    """A chunk of the sink past its end, a record that two blocks write."""
    rows, ranges = Rows(330, 2, 32), [(150 + r, 320 + r) for r in range(9)]
    q, cache, sink = normal((9, 4, 32), 1), rows.ring(130, 330, 256), rows.ring(0, 130, 256)
    found = device.attention_span(q, [to_device(c) for c in cache], [to_device(c) for c in sink],
                                  ranges, 130, 0.25, 0.0, **HOW)
    assert_same_bits(found, run_span(q, cache, sink, ranges, 130))


def test_draft_and_selection_kernels_are_clean():
    """A candidate list that one warp writes and another still reads, a tap before row 0."""
    x, base, dyn = normal((5, 33), 1), normal((2, 3, 33), 2), normal((5, 18), 3)
    out = poisoned(x.shape)
    ops.dynamic_conv(out, x, dyn, base, 1, 11)
    assert_same_bits(device.dynamic_conv(x, dyn, base, 1, 11, **HOW), out)
    succ, pred, gate = normal((3, 7, 20), 1), normal((3, 7, 20), 2), normal((3, 20), 3)
    unary, lattice = normal((3, 7), 4), poisoned((3, 7, 7))
    ops.selector_lattice(lattice, succ, pred, gate, unary)
    assert_same_bits(device.selector_lattice(succ, pred, gate, unary, **HOW), lattice)
    candidates = np.arange(21, dtype=np.int32).reshape(3, 7)
    walked = [poisoned((3,), dtype) for dtype in (np.int32, np.int32, np.float32, np.float32)]
    ops.selector_walk(*walked, lattice, candidates)
    for found, expected in zip(device.selector_walk(lattice, candidates, **HOW), walked):
        assert_same_bits(found, expected)
    logits, ids, values = normal((2, 4100), 5), poisoned((2, 9), np.int32), poisoned((2, 9))
    ops.top_k(ids, values, logits)
    found_ids, found_values = device.top_k(logits, 9, **HOW)
    assert np.array_equal(found_ids, ids)
    assert_same_bits(found_values, values)
    assert device.check_finite(normal((3, 9000), 6), **HOW) == 1
    assert device.accept_greedy([4, 5, 6], [4, 5, 7, 8], 1, (9,), **HOW)[1:4] == (2, 2, [4, 5, 7])


def test_other_kernels_are_clean():
    """Ends of rows and of the last block."""
    x, table = normal((3, 2, 34)), normal((9, 17, 2), 1)
    positions, expected = np.array([0, 8, 3], np.int32), np.array(x)
    ops.rope(expected, positions, table, "split_half", 34)
    assert_same_bits(device.rope(x, positions, table, "split_half", 34, **HOW), expected)
    logits, ids = normal((2, 8200)), poisoned((2,), np.int32)
    ops.argmax(ids, logits)
    assert np.array_equal(device.argmax(logits, **HOW), ids)
    rows, out = normal((3, 259)), poisoned((3, 259))
    ops.swiglu(out, rows, rows)
    assert_same_bits(device.elementwise("swiglu", rows, rows, **HOW), out)
    raw, out = random_rows("Q6_K", 3, 256), poisoned((2, 256))
    ids = np.array([2, 0], np.int32)
    ops.embed_rows(out, ops.embedding_table(raw, "Q6_K", 256), ids, 1.0)
    assert_same_bits(device.embed_rows(raw, "Q6_K", 256, ids, 1.0, **HOW), out)
