"""Norms, rotation, elementwise ops, caches, attention, selection, embeddings against the CPU's.

The shipped .cu files run in emulation (README.md); every comparison is of bits.
"""

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.ops.cpu.formats import FORMATS
from tests.emulation import device_ops as device
from tests.emulation.host_module import to_device, unavailable
from tests.helpers.ops_checks import assert_same_bits, poisoned
from tests.ops.test_matmul import activations_with_outliers, random_rows
from tests.ops.test_special import arguments

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

SCHEDULES = [("in order", 0), ("reverse", 0), ("random", 1)]


def normal(shape, seed=0, scale=1.0):
    """Random floats."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("d", [1, 31, 64, 128, 256, 257, 576, 640, 1152])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_has_the_cpus_bits(d, weighted):
    """Another number of lanes, another tree, or a sum that depends on the number of rows."""
    x = normal((9, d), d) * np.exp(normal((9, 1), 1) * 4)
    weight = normal(d, 2) if weighted else None
    expected = poisoned(x.shape)
    ops.rms_norm(expected, x, weight, 1e-6)
    for schedule, seed in SCHEDULES:
        assert_same_bits(device.rms_norm(x, weight, 1e-6, schedule=schedule, seed=seed), expected)
    assert_same_bits(device.rms_norm(x[4:5], weight, 1e-6), expected[4:5])


@pytest.mark.parametrize("style", ["interleaved", "split_half"])
@pytest.mark.parametrize("d,n_dims", [(64, 64), (80, 32), (128, 128), (48, 34)])
def test_rope_has_the_cpus_bits(style, d, n_dims):
    """A wrong pairing, a contraction, touched values past the rotated ones, a silent bad position."""
    x, table = normal((5, 3, d)), normal((40, n_dims // 2, 2), 1)
    positions = np.array([0, 39, 7, -1, 40], np.int32)
    expected = np.array(x)
    ops.rope(expected, positions, table, style, n_dims)
    found = device.rope(x, positions, table, style, n_dims)
    assert np.isnan(found[3:, :, :2]).all()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["copy", "add", "add_bias", "scale", "softcap", "swiglu", "geglu",
                                  "sigmoid_gate"])
def test_elementwise_op_has_the_cpus_bits_on_edges_and_all_magnitudes(name):
    """A coefficient or a step of a special function that differs, a contraction, subnormals kept."""
    x = arguments(3, 1200)
    x = x[:len(x) // 7 * 7].reshape(7, -1)
    y = normal(x.shape, 4) if name != "add_bias" else normal(x.shape[1], 4)
    number = {"scale": 0.3, "softcap": 30.0}.get(name)
    expected = poisoned(x.shape)
    operands = (x,) if name == "copy" else (x, number if number else y)
    if name == "sigmoid_gate":
        x, y = y, x
        operands = (x, y)
    with np.errstate(all="ignore"):
        getattr(ops, name)(expected, *operands)
    found = device.elementwise(name, x, None if number or name == "copy" else y, number or 0.0)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert_same_bits(found[numbers], expected[numbers])


def caches(n_kv_heads, d, capacity, kv_type, n_positions, seed=0):
    """CPU caches with the newest positions written, damage in every other slot, and device copies."""
    cpu = ops.kv_cache(n_kv_heads, d, capacity, kv_type)
    for cache in cpu:
        cache.fill(np.nan)
    first = max(0, n_positions - capacity)
    k, v = (normal((n_positions - first, n_kv_heads, d), seed + i) for i in (0, 1))
    positions = np.arange(first, n_positions, dtype=np.int32)
    on_device = [to_device(cache) for cache in cpu]
    for r in range(0, len(positions), 64):
        rows = slice(r, r + 64)
        ops.kv_write(*cpu, k[rows], v[rows], positions[rows])
    device.kv_write(*on_device, k, v, positions)
    return cpu, on_device


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_kv_write_has_the_cpus_bits(kv_type):
    """Truncation instead of rounding, flushed f16 subnormals, a wrong slot or an overwritten one."""
    k, v = arguments(5, 200)[:320].reshape(5, 2, 32), normal((5, 2, 32), 6) * 1e-6
    k[np.isnan(k)] = 1.0
    cpu = ops.kv_cache(2, 32, 128, kv_type)
    for cache in cpu:
        cache.fill(7)
    on_device = [to_device(cache) for cache in cpu]
    positions = np.array([3, 127, 128, 400, -1], np.int32)
    with np.errstate(all="ignore"):
        ops.kv_write(*cpu, k, v, positions)
    device.kv_write(*on_device, k, v, positions)
    for found, expected in zip(on_device, cpu):
        assert_same_bits(found, expected)


CASES = {  # heads, kv heads, head_dim, capacity, positions, rows, window, softcap
    "decode": (4, 2, 64, 512, 301, 1, 0, 0.0),
    "verify": (6, 2, 64, 512, 389, 16, 0, 0.0),
    "many pairs": (18, 1, 64, 256, 140, 16, 0, 0.0),
    "window": (4, 4, 64, 512, 400, 8, 100, 0.0),
    "ring": (4, 2, 64, 256, 700, 7, 200, 0.0),
    "softcap": (4, 2, 32, 256, 130, 4, 0, 50.0),
}


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_attention_has_the_cpus_bits(case, kv_type):
    """A wrong slot, range, order of keys or of chunks; damage outside the range that leaks in."""
    n_heads, n_kv_heads, d, capacity, n_positions, m, window, cap = CASES[case]
    cpu, on_device = caches(n_kv_heads, d, capacity, kv_type, n_positions)
    q = normal((m, n_heads, d), 9, 2.0)
    positions = np.arange(n_positions - m, n_positions, dtype=np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, window, d**-0.5, cap)
    assert np.isfinite(expected).all()
    found = device.attention(q, *on_device, positions, window, d**-0.5, cap)
    assert_same_bits(found, expected)
    for r in {0, m // 2, m - 1}:
        row = device.attention(q[r:r + 1], *on_device, positions[r:r + 1], window, d**-0.5, cap,
                               threads=64, schedule="random", seed=r)
        assert_same_bits(row, expected[r:r + 1])


@pytest.mark.parametrize("d", [80, 128, 256])
def test_attention_has_the_cpus_bits_at_other_head_sizes(d):
    """Indices that only fit one head size."""
    cpu, on_device = caches(2, d, 256, "f16", 190)
    q, positions = normal((3, 4, d), 1), np.array([150, 10, 189], np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, 0, 0.1, 0.0)
    assert_same_bits(device.attention(q, *on_device, positions, 0, 0.1, 0.0), expected)


def test_attention_of_a_row_without_keys_is_nan():
    """A row that cannot be answered and gets a plausible number."""
    cpu, on_device = caches(1, 32, 128, "f16", 128)
    q, positions = normal((3, 2, 32), 1), np.array([-1, 100, 128], np.int32)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions, 0, 0.2, 0.0)
    found = device.attention(q, *on_device, positions, 0, 0.2, 0.0)
    assert np.isnan(found[[0, 2]]).all() and np.isnan(expected[[0, 2]]).all()
    assert_same_bits(found[1], expected[1])


def test_damage_in_a_later_key_leaves_the_rows_before_it_alone():
    """A key out of sight whose weight is 0 instead of left out: 0 times infinity is not 0."""
    cpu, on_device = caches(1, 32, 256, "f16", 200)
    q, positions = normal((4, 2, 32), 1), np.arange(196, 200, dtype=np.int32)
    clean = device.attention(q, *on_device, positions, 0, 0.2, 0.0)
    bad = np.full((1, 1, 32), 1e6, np.float32)
    for write, target in ((ops.kv_write, cpu), (device.kv_write, on_device)):
        write(*target, normal((1, 1, 32), 2), bad, positions[3:])
    found = device.attention(q, *on_device, positions, 0, 0.2, 0.0)
    assert_same_bits(found[:3], clean[:3])
    assert not np.isfinite(found[3]).any()


def test_argmax_has_the_cpus_ids():
    """A tie that goes to a higher id, a NaN that wins, a span that is not looked at."""
    logits = normal((9, 20001))
    logits[1, [5, 9000, 20000]] = 50
    logits[2, [19999, 20000]] = 50
    logits[3, :] = -np.inf
    logits[4, :] = np.nan
    logits[5, 100] = np.nan
    logits[6, [300, 301]] = [-0.0, 0.0]
    logits[6, logits[6] > 0] = -1
    logits[7, :8192] = np.nan
    logits[8, :8192] = -np.inf
    expected = poisoned((9,), np.int32)
    ops.argmax(expected, logits)
    assert list(expected[1:5]) == [5, 19999, 0, 0]
    for schedule, seed in SCHEDULES:
        found = device.argmax(logits, schedule=schedule, seed=seed)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_embedding_rows_have_the_cpus_bits(name):
    """Another order of the roundings, a wrong nibble, an id outside the table that finds a row."""
    k = 512
    if FORMATS[name].block == 1:
        raw = normal((7, k)).astype(np.float32 if name == "F32" else np.float16).view(np.uint8)
    else:
        raw = random_rows(name, 7, k)
    ids = np.array([6, 0, 3, 7, -1], np.int32)
    expected = poisoned((5, k))
    table = ops.embedding_table(raw, name, k)
    for scale in (1.0, 33.94113):
        ops.embed_rows(expected, table, ids, scale)
        found = device.embed_rows(raw, name, k, ids, scale)
        assert np.isnan(found[3:]).all()
        assert_same_bits(found[:3], expected[:3])


@pytest.mark.parametrize("name,k", [("F32", 96), ("F16", 100), ("BF16", 640), ("F16", 16384)])
def test_product_with_float_weights_has_the_cpus_bits(name, k):
    """A sum in another order at a slice boundary inside a 16-byte step, a row that depends on M."""
    n = 3 if k == 16384 else 37
    w = normal((n, k), 1)
    raw = w.view(np.uint8) if name == "F32" else w.astype(np.float16).view(np.uint8)
    x = activations_with_outliers(16, k)
    expected = poisoned((16, n))
    ops.matmul(expected, x, ops.pack(raw, name, k))
    for m, tokens in ((1, 1), (5, 4), (16, 16)):
        assert_same_bits(device.matmul_float(x[16 - m:], raw, name, tokens), expected[16 - m:])


@pytest.mark.parametrize("m", [2, 4, 7, 8, 9, 17, 40])
def test_ops_have_the_cpus_bits_for_every_m(m):
    """A grid that ends too soon, a row that depends on how many there are; odd widths."""
    x, weight, table = normal((m, 261), m), normal(261, 1), normal((64, 8, 2), 2)
    expected = poisoned(x.shape)
    ops.rms_norm(expected, x, weight, 1e-6)
    assert_same_bits(device.rms_norm(x, weight, 1e-6), expected)
    ops.swiglu(expected, x, x)
    assert_same_bits(device.elementwise("swiglu", x, x), expected)
    ids = poisoned((m,), np.int32)
    ops.argmax(ids, x)
    assert np.array_equal(device.argmax(x), ids)
    raw, rows = random_rows("Q5_0", 7, 96), np.arange(m, dtype=np.int32) % 7
    expected = poisoned((m, 96))
    ops.embed_rows(expected, ops.embedding_table(raw, "Q5_0", 96), rows, 2.0)
    assert_same_bits(device.embed_rows(raw, "Q5_0", 96, rows, 2.0), expected)
    positions = np.arange(m, dtype=np.int32)
    expected = np.array(q := normal((m, 3, 16), 3))
    ops.rope(expected, positions, table, "interleaved", 16)
    assert_same_bits(device.rope(q, positions, table, "interleaved", 16), expected)
    cpu, card = caches(1, 16, 128, "f16", 60 + m)
    expected = poisoned(q.shape)
    ops.attention(expected, q, *cpu, positions + 60, 0, 0.25, 0.0)
    assert_same_bits(device.attention(q, *card, positions + 60, 0, 0.25, 0.0), expected)
    w = normal((33, 100), 4)
    expected = poisoned((m, 33))
    ops.matmul(expected, np.ascontiguousarray(x[:, :100]), ops.pack(w.view(np.uint8), "F32", 100))
    found = device.matmul_float(np.ascontiguousarray(x[:, :100]), w.view(np.uint8), "F32", 16)
    assert_same_bits(found, expected)
