"""Expansion of packed weights: ggml's recorded bits, and a second implementation on random bytes.

The same cases go through ``cudflash.quant`` (NumPy) and through the ``embed_rows`` kernels.
"""

import gguf
import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.loader.ggml_types import SUPPORTED, GGMLType
from cudflash.ops import cpu as ops
from cudflash.quant import dequantize
from tests.helpers.exact_f32 import flush
from tests.helpers.ops_checks import (
    assert_same_bits,
    check_row_independence,
    check_writes_only,
    poisoned,
)
from tests.helpers.vectors import quant_case

FORMATS = sorted(t.name for t in SUPPORTED)
RECORDED = [name for name in FORMATS if name != "F32"]
# byte offsets of the half-precision fields in a block
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "IQ4_NL": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_XS": [0], "BF16": [], "F32": [],
}  # fmt: skip
K = 768


def raw_rows(name, kind, n=40, k=K):
    """Rows of random bytes (scales anything, NaN included), zeros, ones, or tiny scales."""
    fmt = GGMLType[name]
    shape = n, k // fmt.block_size, fmt.type_size
    if kind == "zeros":
        return np.zeros(shape, np.uint8).reshape(n, -1)
    if kind == "ones":
        return np.full(shape, 255, np.uint8).reshape(n, -1)
    rng = np.random.default_rng(sum(name.encode()))
    raw = rng.integers(0, 256, shape, dtype=np.uint8)
    if kind == "subnormal scales":
        for at in HALVES[name]:
            raw[..., at + 1] &= 0x83  # exponent 0
    return raw.reshape(n, -1)


def same(found, expected):
    """Equal bits, any NaN for a NaN: payloads of NaNs are nobody's promise."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    assert_same_bits(np.where(nan, 0, found).astype(np.float32),
                     np.where(nan, 0, expected).astype(np.float32))


def embed(name, raw, k, ids=None, scale=1.0):
    table = ops.embedding_table(raw, name, k)
    ids = ops.upload(np.arange(len(raw)) if ids is None else ids).astype(np.int32)
    out = poisoned((len(ids), k))
    ops.embed_rows(out, table, ids, scale)
    return out


@pytest.mark.parametrize("name", RECORDED)
def test_expansion_equals_ggml(name):
    """Catches any wrong layout, sign, bias or order: bits that ggml itself produced."""
    case = quant_case(name)
    n = 1 if GGMLType[name].block_size == 1 else len(case["blocks_raw"])
    raw, expected = case["blocks_raw"].reshape(n, -1), case["blocks_dequant"].reshape(n, -1)
    same(dequantize(raw, name), expected)
    same(embed(name, raw, expected.shape[1]), flush(expected))


@pytest.mark.parametrize("kind", ["random", "zeros", "ones", "subnormal scales"])
@pytest.mark.parametrize("name", FORMATS)
def test_expansion_of_any_bytes_equals_the_gguf_package(name, kind):
    """Catches codes, scales and signs that recorded blocks do not contain."""
    raw = raw_rows(name, kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    found = dequantize(raw, name)
    same(found, expected)
    if kind == "subnormal scales" and HALVES[name]:
        assert np.abs(found).max() > 0, "half-precision subnormals were flushed"
    same(embed(name, raw, K), flush(expected))


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_row_is_alone_and_scaled_once(name):
    """Catches a row that depends on M or threads, an unscaled block, and a store outside."""
    raw = raw_rows(name, "subnormal scales" if name in HALVES and HALVES[name] else "ones", 50)
    ids = ops.upload(np.random.default_rng(0).integers(0, 50, 33).astype(np.int32))
    single = check_row_independence(lambda rows: embed(name, raw, K, ids[rows], 1.7))
    with np.errstate(all="ignore"):
        expected = flush(flush(dequantize(raw[ids], name)) * np.float32(1.7))
    same(single, expected)
    table = ops.embedding_table(raw, name, K)
    found = check_writes_only(lambda out: ops.embed_rows(out, table, ids, 1.7), (33, K))
    same(found, expected)


@pytest.mark.parametrize("name", ["F32", "Q4_0", "Q6_K"])
def test_bad_id_gives_a_nan_row(name):
    """Catches a read outside the table, and a wrong row in place of an error."""
    raw = raw_rows(name, "zeros", 5)
    found = embed(name, raw, K, np.array([4, -1, 5, 2**31 - 1, -(2**31), 0], np.int32))
    assert np.isnan(found[1:5]).all()
    assert (found[[0, 5]] == 0).all()


def test_shapes_and_names_of_types():
    """Catches a lost leading axis, and a name or id that stops working."""
    raw = raw_rows("Q4_K", "zeros", 6).reshape(2, 3, -1)
    for kind in (GGMLType.Q4_K, "Q4_K", "q4_k", 12):
        assert dequantize(raw, kind).shape == (2, 3, K)
    assert dequantize(raw[:0], "Q4_K").shape == (0, 3, K)
    assert dequantize(raw[..., ::-1][..., ::-1], "Q4_K").dtype == np.float32


def test_wrong_input_is_refused_in_one_sentence():
    """Catches a silent guess at a format or at a torn block."""
    with pytest.raises(UsageError, match="multiple of the 144-byte block of Q4_K"):
        dequantize(np.zeros((2, 100), np.uint8), "Q4_K")
    for unknown in ("IQ1_S", "Q9_K", 99):
        with pytest.raises(UsageError, match="cannot be expanded"):
            dequantize(np.zeros((2, 100), np.uint8), unknown)
    with pytest.raises(UsageError, match="expected uint8"):
        dequantize(np.zeros((2, 144), np.int8), "Q4_K")
    with pytest.raises(UsageError, match="raw rows have 100 bytes"):
        ops.embedding_table(np.zeros((4, 100), np.uint8), "Q4_K", 256)
    with pytest.raises(UsageError, match="cannot be expanded"):
        ops.embedding_table(np.zeros((4, 100), np.uint8), "IQ1_S", 256)
