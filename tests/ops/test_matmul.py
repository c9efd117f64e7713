"""Packed matmul and activation quantisation: exact against an integer model, row by row.

Every comparison is on integer views. Weights are random bytes, so damaged-looking scales, minimum
terms and sign bits are all exercised; only the half-precision scales are made finite.
"""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from cudflash.ops.cpu import jit, program
from cudflash.ops.cpu.formats import FORMATS, TILE_ROWS
from tests.reference import packed_model

PACKED = sorted(packed_model.BLOCK)
FLOAT = ["BF16", "F16", "F32"]
ACTIVATIONS = ["int8", "int8x2"]


def random_rows(name, n, k, seed=0, scale=0.02):
    """Random raw rows of a packed format with finite half-precision scales."""
    rng = np.random.default_rng([seed, n, k])
    fmt = FORMATS[name]
    raw = rng.integers(0, 256, (n, k // fmt.block, fmt.block_bytes), dtype=np.uint8)
    for field in fmt.fields:
        if field.name in ("d", "dmin", "m"):
            values = (rng.standard_normal(raw.shape[:2]) * scale).astype(np.float16)
            raw[..., field.offset:field.offset + 2] = values[..., None].view(np.uint8)
    return raw.reshape(n, -1)


def activations_with_outliers(m, k, seed=0):
    """Rows with heavy tails, an all-zero group, a tiny group and one huge value."""
    rng = np.random.default_rng([seed, m, k, 1])
    x = (rng.standard_normal((m, k)) * np.exp(rng.standard_normal((m, k)))).astype(np.float32)
    x[0, :32] = 0
    x[-1, 32:64] = 1e-35
    x[m // 2, k // 2] = 300
    return x


def product(w, x, activations="int8"):
    """Quantise and multiply into a poisoned output."""
    out = np.full((len(x), w.n), np.nan, np.float32)
    if w.layout == "f32":
        ops.matmul(out, x, w)
        return out
    xq = ops.quantized_rows(len(x), w.k, w.layout, activations)
    for array in xq.arrays:
        array.view(np.uint8)[...] = 0xFF
    ops.quantize_rows(xq, x)
    ops.matmul(out, xq, w)
    return out


def assert_same_bits(found, expected):
    differ = found.view(np.int32) != expected.view(np.int32)
    assert not differ.any(), (
        f"{differ.sum()} of {differ.size} values differ, first at {np.argwhere(differ)[0]}: "
        f"{found[differ][0]!r} instead of {expected[differ][0]!r}")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Share out even the small launches of these tests."""
    monkeypatch.setattr(program, "_SERIAL_BYTES", -1)
    ops.set_threads(2)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", PACKED)
def test_matmul_equals_the_integer_model(name, activations):
    """Catches a wrong code, scale, exponent, sum, slice boundary or float order, bit for bit."""
    raw, x = random_rows(name, 37, 2560), activations_with_outliers(5, 2560)
    found = product(ops.pack(raw, name, 2560), x, activations)
    assert_same_bits(found, packed_model.matmul(name, raw, x, activations))


@pytest.mark.parametrize("name", PACKED)
def test_matmul_of_extreme_codes_does_not_overflow(name):
    """Catches an int32 overflow: every code, scale and activation at its largest magnitude."""
    k = 512
    x = np.where(np.arange(k) % 2, 1.0, -1.0).astype(np.float32)[None] * np.float32(3)
    x = np.concatenate([x, np.abs(x), -np.abs(x)])
    for fill in (0xFF, 0x00, 0x80, 0x7F):
        raw = random_rows(name, 5, k)
        fmt = FORMATS[name]
        blocks = raw.reshape(5, -1, fmt.block_bytes)
        for field in fmt.fields:
            if field.name not in ("d", "dmin", "m"):
                blocks[..., field.offset:field.offset + field.width * field.count] = fill
        for activations in ACTIVATIONS:
            found = product(ops.pack(raw, name, k), x, activations)
            assert_same_bits(found, packed_model.matmul(name, raw, x, activations))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Q4_1", "F16"])
@pytest.mark.parametrize("k", [256, 2048, 6656, 16384, 33280])
def test_matmul_is_right_at_real_widths(name, k):
    """Catches a width that falls through to another's constants, and S = 16 from K = 16,384."""
    x = activations_with_outliers(2, k)
    if name == "F16":
        raw = np.random.default_rng(k).standard_normal((3, k)).astype(np.float16).view(np.uint8)
        expected = float_model(raw.view(np.float16).astype(np.float32), x)
    else:
        raw = random_rows(name, 3, k)
        expected = packed_model.matmul(name, raw, x, "int8")
    assert_same_bits(product(ops.pack(raw, name, k), x), expected)


def float_model(w, x):
    """Float weights: one fused multiply-add per element, 8 or 16 slices added in order."""
    k = x.shape[1]
    n_slices = 8 if k < 16384 else 16
    out = np.zeros((len(x), len(w)), np.float32)
    for r in range(len(x)):
        for s in range(n_slices):
            acc = np.zeros(len(w), np.float32)
            for i in range(k * s // n_slices, k * (s + 1) // n_slices):
                acc = packed_model.fma(w[:, i], np.full(len(w), x[r, i]), acc)
            out[r] += acc
    return out


@pytest.mark.parametrize("name", FLOAT)
def test_float_matmul_equals_the_sequential_model(name):
    """Catches a changed order or a contraction in the float-weight kernels."""
    rng = np.random.default_rng(3)
    w = rng.standard_normal((21, 96)).astype(np.float32)
    if name == "BF16":
        bits = (w.view(np.uint32) >> 16).astype(np.uint16)
        raw, w = bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32)
    elif name == "F16":
        raw = w.astype(np.float16).view(np.uint8)
        w = w.astype(np.float16).astype(np.float32)
    else:
        raw = w.view(np.uint8)
    x = activations_with_outliers(6, 96)
    assert_same_bits(product(ops.pack(raw, name, 96), x), float_model(w, x))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", PACKED + FLOAT)
def test_matmul_row_does_not_depend_on_the_other_rows(name, activations):
    """Catches what breaks losslessness: a row that changes with M, its neighbours or threads."""
    if name in FLOAT and activations == "int8x2":
        activations = "int8"
    k, n = 768, 50
    fmt = FORMATS[name]
    raw = (random_rows(name, n, k) if name in PACKED else
           np.random.default_rng(0).standard_normal((n, k)).astype(np.float16).view(np.uint8)
           if fmt.block_bytes == 2 else
           np.random.default_rng(0).standard_normal((n, k)).astype(np.float32).view(np.uint8))
    w = ops.pack(raw, name, k)
    x = activations_with_outliers(33, k)
    single = np.concatenate([product(w, x[i:i + 1], activations) for i in range(33)])
    for n_threads in (1, 2):
        ops.set_threads(n_threads)
        for m in (1, 2, 3, 7, 8, 16, 33):
            assert_same_bits(product(w, np.ascontiguousarray(x[33 - m:]), activations),
                             single[33 - m:])


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33])
def test_matmul_writes_only_its_output(n):
    """Catches a store past the last column or row when N or M is no multiple of the tile."""
    raw = random_rows("Q4_K", n, 256)
    w = ops.pack(raw, "Q4_K", 256)
    x = activations_with_outliers(5, 256)
    guarded = np.full((7, n + 8), 7.5, np.float32)
    xq = ops.quantized_rows(5, 256, "q256", "int8")
    ops.quantize_rows(xq, x)
    ops.matmul(guarded[1:6, :n], xq, w)
    assert_same_bits(np.ascontiguousarray(guarded[1:6, :n]),
                     packed_model.matmul("Q4_K", raw, x, "int8"))
    assert (guarded[:, n:] == 7.5).all() and (guarded[[0, 6]] == 7.5).all()


@pytest.mark.parametrize("layout,unit", [("q32", 32), ("q256", 256)])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_quantised_rows_equal_the_model(layout, unit, activations):
    """Catches a wrong scale, exponent, rounding or sum in the activation scratch itself."""
    x = activations_with_outliers(9, 1024)
    xq = ops.quantized_rows(12, 1024, layout, activations).rows(9)
    ops.quantize_rows(xq, x)
    q, e, d = packed_model.quantize(x, unit, activations)
    low = ((q + 128) % 256) - 128 if activations == "int8x2" else q
    assert np.array_equal(xq.q[0, :9], low)
    if activations == "int8x2":
        assert np.array_equal(xq.q[1, :9].astype(np.int64) * 256 + low, q)
    assert_same_bits(np.ascontiguousarray(xq.d[:9]), d)
    if layout == "q32":
        sums = q.reshape(9, -1, 32).sum(-1)
        assert np.array_equal(xq.a[:9], -8 * sums)
        assert_same_bits(np.ascontiguousarray(xq.b[0, :9]), d * sums.astype(np.float32))
    else:
        assert np.array_equal(xq.a[:9], e.reshape(9, -1, 32)[..., 0])
        assert np.array_equal(xq.b[0, :9], (low << e).reshape(9, -1, 16).sum(-1))
        assert np.array_equal(xq.c[0, :9], (low << e).reshape(9, -1, 32).sum(-1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q8_0", "F16"])
def test_a_non_finite_activation_reaches_every_product_of_its_row(name, activations, bad):
    """Catches a NaN that quantisation turns into finite codes: no later check could see it."""
    raw = random_rows(name, 5, 512) if name != "F16" else np.ones((5, 1024), np.uint8)
    w = ops.pack(raw, name, 512)
    x = activations_with_outliers(6, 512)
    clean = product(w, x, activations)
    x[3, 300] = bad
    found = product(w, x, activations)
    assert not np.isfinite(found[3]).any()
    others = [0, 1, 2, 4, 5]
    assert_same_bits(found[others], clean[others])


def test_subnormal_products_are_flushed():
    """Catches a lost flush-to-zero mode: the card cannot keep subnormals, so neither may we."""
    raw = random_rows("Q8_0", 16, 32)
    blocks = raw.reshape(16, 1, 34)
    blocks[..., :2] = np.full((16, 1), 2.0 ** -24, np.float16)[..., None].view(np.uint8)
    x = np.full((1, 32), np.float32(1e-29))
    found = product(ops.pack(raw, "Q8_0", 32), x)
    assert (found == 0).all()
    exact = packed_model.matmul("Q8_0", raw, x, "int8")
    assert (exact != 0).any(), "the case no longer reaches the subnormal range"


@pytest.mark.parametrize("name", PACKED + FLOAT)
def test_packed_size_is_the_raw_size_of_whole_tiles(name):
    """Catches weights that grow when they are packed (plan counts these bytes)."""
    fmt = FORMATS[name]
    k = 512
    raw = np.zeros((33, k // fmt.block * fmt.block_bytes), np.uint8)
    w = ops.pack(raw, name, k)
    assert w.nbytes == ops.packed_nbytes(name, 33, k) == 3 * TILE_ROWS * raw.shape[1]


def test_wrong_shapes_are_refused_in_one_sentence():
    """Catches silent broadcasting or reading past a buffer."""
    w = ops.pack(random_rows("Q4_K", 16, 256), "Q4_K", 256)
    out = np.zeros((2, 16), np.float32)
    with pytest.raises(UsageError, match=r"\(16, 256\)"):
        ops.matmul(out, ops.quantized_rows(2, 512, "q256", "int8"), w)
    with pytest.raises(UsageError, match="layout q256"):
        ops.matmul(out, np.zeros((2, 256), np.float32), w)
    with pytest.raises(UsageError, match="raw rows have 100 bytes"):
        ops.pack(np.zeros((4, 100), np.uint8), "Q4_K", 256)
    with pytest.raises(UsageError, match="no matmul"):
        ops.pack(np.zeros((4, 100), np.uint8), "IQ1_S", 256)


_DIGESTS = """
import sys, numpy as np
from tests.ops.test_matmul import isa_digest
print(isa_digest())
"""


def isa_digest():
    """Digest of products of every format at M = 1 and 6 (run once per instruction set)."""
    ops.set_threads(1)
    digest = hashlib.sha256()
    for name in PACKED:
        w = ops.pack(random_rows(name, 18, 512), name, 512)
        x = activations_with_outliers(6, 512)
        digest.update(product(w, x).tobytes() + product(w, x[:1]).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("path", ["generic", "avx2", "avx512vnni"])
def test_every_instruction_set_gives_the_same_bits(path):
    """Catches saturation or a wrong lane order in the path this machine does not use."""
    order = ["generic", "avx2", "avx512vnni"]
    if order.index(path) > order.index(jit.isa()):
        pytest.skip(f"this processor has no {path}")
    env = {**os.environ, jit.ISA_ENV: path}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run([sys.executable, "-c", _DIGESTS], cwd=root, env=env, check=True,
                          capture_output=True, text=True)
    assert done.stdout.strip() == isa_digest()


def test_matrices_packed_together_are_those_packed_alone():
    """Catches a matrix that is packed into its neighbour's place, or before its buffer is there."""
    items = [(random_rows(name, n, 512, n), name, 512)
             for name, n in (("Q4_1", 7), ("Q6_K", 64), ("F32", 3), ("Q4_1", 130), ("Q8_0", 1))]
    together = ops.pack_all(items)
    assert len(together) == len(items)
    for matrix, item in zip(together, items):
        alone = ops.pack(*item)
        assert (matrix.type, matrix.n, matrix.k) == (alone.type, alone.n, alone.k)
        np.testing.assert_array_equal(matrix.data, alone.data)
    assert ops.pack_all([]) == []
