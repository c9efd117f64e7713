"""Quantisation fused with a norm or a gated unit: the bits of one op after the other, in every byte.

The scratch of int8 rows is compared as a whole, places of tokens that do not exist included; the
products of a matrix with it are compared with the CPU's. The shipped .cu files run in emulation.
"""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu
from scripts.device import twins
from tests.emulation.cuda import emulated_ops
from tests.emulation.host_module import unavailable
from tests.emulation.test_op_twins import SCHEDULES, normal
from tests.helpers.ops_checks import assert_same_bits

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

ROWS = (1, 2, 4, 7, 8, 9, 16, 17, 40)
CASES = [("q32", "int8", 96), ("q32", "int8x2", 288), ("q32", "int8", 1120), ("q256", "int8", 256),
         ("q256", "int8x2", 768), ("q256", "int8", 2560)]


def rows_of(m, k, seed=0):
    """Rows of all magnitudes; one with a NaN, one with an infinity, one of zeros."""
    x = normal((m, k), seed) * np.exp(normal((m, k), seed + 1) * 3)
    for row, value in ((1, np.nan), (3, np.inf), (5, 0.0)):
        if row < m:
            x[row, 7 if value else slice(None)] = value
    return x


def scratch(ops, m, layout, activations, k):
    return ops.quantized_rows(m, k, layout, activations)


def same_scratch(ops, found, expected):
    for a, b in zip(found.arrays, expected.arrays):
        assert np.array_equal(ops.download(a).view(np.uint8), ops.download(b).view(np.uint8))


@pytest.mark.parametrize("layout, activations, k", CASES)
def test_norm_and_quantisation_are_those_of_two_ops(layout, activations, k):
    """Another order of the sum, a weight left out, a token or a span that is not written."""
    weight = normal(k, 9)
    for i, m in enumerate(ROWS):
        schedule, seed = SCHEDULES[i % len(SCHEDULES)]
        ops, _ = emulated_ops(schedule=schedule, seed=seed)
        x, w = ops.upload(rows_of(m, k)), ops.upload(weight)
        for given, keep in ((w, True), (None, False)):
            one, two = (scratch(ops, m, layout, activations, k) for _ in range(2))
            h, kept = ops.upload(np.full((m, k), -7, np.float32)), ops.zeros((m, k), np.float32)
            ops.norm_quantize(one, h, x, given, 1e-6, keep)
            ops.rms_norm(kept, x, given, 1e-6)
            ops.quantize_rows(two, kept)
            same_scratch(ops, one, two)
            if keep:
                assert_same_bits(ops.download(h), ops.download(kept))
            else:
                assert (ops.download(h) == -7).all()


@pytest.mark.parametrize("layout, activations, k", CASES)
def test_gated_unit_and_quantisation_are_those_of_two_ops(layout, activations, k):
    """An activation of the other kind, a span that is left out, a row taken for another."""
    for i, m in enumerate(ROWS):
        schedule, seed = SCHEDULES[i % len(SCHEDULES)]
        ops, _ = emulated_ops(schedule=schedule, seed=seed)
        gate, up = ops.upload(rows_of(m, k)), ops.upload(normal((m, k), 4, 5.0))
        for name in ("swiglu", "geglu", "sigmoid_gate"):
            one, two = (scratch(ops, m, layout, activations, k) for _ in range(2))
            h = ops.zeros((m, k), np.float32)
            getattr(ops, f"{name}_quantize")(one, h, gate, up)
            getattr(ops, name)(h, gate, up)
            ops.quantize_rows(two, h)
            same_scratch(ops, one, two)


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_products_of_fused_rows_have_the_cpus_bits(mode):
    """A scratch that only its own kernels understand; a race, or an access out of bounds."""
    ops, _ = emulated_ops(mode=mode, schedule="random", seed=4)
    few = mode == "check"
    for found, expected in zip(twins.fused(ops, few), twins.fused(cpu, few)):
        assert_same_bits(ops.download(found), cpu.download(expected))


def test_row_of_many_is_the_row_alone():
    """A sum or a scale that sees the rows beside it."""
    ops, _ = emulated_ops()
    w = ops.pack(twins.random_rows("Q4_K", 33, 512), "Q4_K", 512)
    x, weight = normal((17, 512), 3), ops.upload(normal(512, 5))

    def product(rows):
        m = len(rows)
        xq, out = scratch(ops, m, "q256", "int8x2", 512), ops.zeros((m, 33), np.float32)
        ops.norm_quantize(xq, ops.zeros((m, 512), np.float32), ops.upload(rows), weight, 1e-6, False)
        ops.matmul(out, xq, w)
        return ops.download(out)

    whole = product(x)
    for row in (0, 5, 16):
        assert_same_bits(product(x[row:row + 1]), whole[row:row + 1])


def test_rows_that_do_not_fit_are_refused():
    """A launch that reads past the end of a row, or by 16 bytes where it may not."""
    for ops in (emulated_ops()[0], cpu):
        xq = ops.quantized_rows(3, 256, "q256", "int8")
        good, short = ops.zeros((3, 256), np.float32), ops.zeros((2, 256), np.float32)
        with pytest.raises(UsageError):
            ops.norm_quantize(xq, good, short, None, 1e-6, False)
        with pytest.raises(UsageError):
            ops.norm_quantize(xq, good, good, None, 0.0, False)
        with pytest.raises(UsageError):
            ops.swiglu_quantize(xq, good, good, short)
    ops, _ = emulated_ops()
    xq, flat = ops.quantized_rows(3, 256, "q256", "int8"), ops.zeros((3, 260), np.float32)
    with pytest.raises(UsageError, match="aligned"):
        ops.geglu_quantize(xq, flat[:, 4:], flat[:, 1:257], flat[:, 4:])
