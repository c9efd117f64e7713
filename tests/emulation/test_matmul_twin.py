"""Packed products on the card against the CPU's, bit for bit: the same raw rows, the same floats.

The shipped .cu files run in emulation; see README.md.
"""

import subprocess
import sys

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.ops.cpu.formats import FORMATS
from tests.emulation import device_ops as device
from tests.emulation.host_module import KERNELS, unavailable
from tests.helpers.ops_checks import assert_same_bits, poisoned
from tests.ops.test_matmul import activations_with_outliers, random_rows

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

PACKED = sorted(device.TILE_BYTES)
ACTIVATIONS = ["int8", "int8x2"]


def on_cpu(raw, name, x, activations):
    """The twin's product."""
    k = x.shape[1]
    out = poisoned((len(x), len(raw)))
    xq = ops.quantized_rows(len(x), k, FORMATS[name].layout, activations)
    ops.quantize_rows(xq, x)
    ops.matmul(out, xq, ops.pack(raw, name, k))
    return out


def width(name, q256, q32):
    """K for a format's layout."""
    return q256 if FORMATS[name].layout == "q256" else q32


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", PACKED)
def test_product_has_the_cpus_bits_for_every_m(name, activations):
    """A wrong place in a tile, scale, exponent, sum, slice or float order; a row that knows M."""
    raw = random_rows(name, 37, width(name, 2560, 608))
    x = activations_with_outliers(16, width(name, 2560, 608))
    expected = on_cpu(raw, name, x, activations)
    w = device.retile(raw, name, x.shape[1])
    tiles = 2 if activations == "int8x2" else 1
    for m in (1, 7, 8, 9, 16):
        found = device.matmul(x[16 - m:], w, activations, tiles, schedule="random", seed=m)
        assert_same_bits(found, expected[16 - m:])


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_product_does_not_depend_on_tiles_groups_schedule_or_m(name):
    """A fast launch for another M, tile or grid that gives other bits; rows past a group's end."""
    raw = random_rows(name, 65, width(name, 768, 96), seed=1)
    x = activations_with_outliers(40, width(name, 768, 96), seed=1)
    w = device.retile(raw, name, x.shape[1])
    for activations, token_tiles, row_tiles, row_groups, how in (
            ("int8x2", 2, 2, 1, {}), ("int8x2", 1, 2, 1, {"schedule": "reverse"}),
            ("int8", 1, 2, 1, {"schedule": "reverse"}),
            ("int8", 2, 1, 2, {"schedule": "random", "seed": 7})):
        expected = on_cpu(raw, name, x, activations)
        for m in (2, 4, 17, 40):
            found = device.matmul(x[:m], w, activations, token_tiles, row_tiles, row_groups, **how)
            assert_same_bits(found, expected[:m])


@pytest.mark.parametrize("name", PACKED)
def test_product_of_extreme_codes_has_the_cpus_bits(name):
    """An int32 sum that overflows, a byte that changes its sign on the way."""
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
        w = device.retile(raw, name, k)
        for activations, tiles in (("int8", 1), ("int8x2", 2)):
            assert_same_bits(device.matmul(x, w, activations, tiles),
                             on_cpu(raw, name, x, activations))


@pytest.mark.parametrize("name,k", [("Q8_0", 16384), ("Q6_K", 16384), ("Q4_K", 6656),
                                    ("Q4_1", 6656), ("Q6_K", 33280)])
def test_product_has_the_cpus_bits_at_real_widths(name, k):
    """A width that falls through to another's constants; 16 slices from K = 16,384."""
    raw, x = random_rows(name, 3, k), activations_with_outliers(2, k)
    w = device.retile(raw, name, k)
    assert_same_bits(device.matmul(x, w, "int8x2", 2), on_cpu(raw, name, x, "int8x2"))


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_product_of_a_damaged_row_is_nan(name, bad):
    """A damaged activation that becomes a plausible number, or damages the rows beside it."""
    raw, x = random_rows(name, 5, 512), activations_with_outliers(3, 512)
    x[1, 300] = bad
    w = device.retile(raw, name, 512)
    for activations, tiles in (("int8", 1), ("int8x2", 2)):
        found, expected = device.matmul(x, w, activations, tiles), on_cpu(raw, name, x, activations)
        assert np.isnan(found[1]).all() and np.isnan(expected[1]).all()
        assert_same_bits(found[[0, 2]], expected[[0, 2]])
        xq = device.quantize(x, w.layout, activations, tiles)
        run = xq["codes"].view(np.int8).reshape(16, tiles, 8, -1)[300 // 32, 0, 1]
        assert not run.any() and np.isnan(xq["d"][0, 300 // (512 // len(xq["d"][0])), 1])


@pytest.mark.parametrize("layout", ["q32", "q256"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_scratch_holds_the_cpus_codes_in_fragment_order(layout, activations):
    """Scratch that only its own reader understands, or that leaves tokens past the last one as
    they were: the tests above would then depend on what was there before.
    """
    k, planes = 512, 1 if activations == "int8" else 2
    x = activations_with_outliers(11, k)
    cpu = ops.quantized_rows(11, k, layout, activations)
    ops.quantize_rows(cpu, x)
    found = device.quantize(x, layout, activations, 2)
    # (unit, tile, token, quarter, plane, half, value) -> (plane, token, unit, half, quarter, value)
    codes = found["codes"].view(np.int8).reshape(k // 32, 2, 8, 4, planes, 2, 4)
    codes = codes.transpose(4, 1, 2, 0, 5, 3, 6).reshape(planes, 16, k)
    assert np.array_equal(codes[:, :11], cpu.q[:, :11])
    assert not codes[:, 11:].any()
    assert_same_bits(found["d"][0].T[:11], cpu.d[:11])
    assert not found["d"][0].T[11:].any()
    if layout == "q32":
        assert np.array_equal(found["start"][0].T[:11], cpu.a[:11])
        assert_same_bits(found["sum"][0].T[:11], cpu.b[0, :11])
        return
    sums = found["sums"].view(np.int8).astype(np.int32).reshape(k // 256, 2, 8, 4, planes, 2, 4)
    sums = (sums[..., 0, :] + 256 * sums[..., 1, :]).transpose(4, 1, 2, 0, 3, 5)
    assert np.array_equal(sums.reshape(planes, 16, k // 16)[:, :11], cpu.b[:, :11])
    e = found["exponents"][0].T[..., None] >> (2 * np.arange(8)) & 3
    assert np.array_equal(e.reshape(16, -1)[:11], cpu.a[:11])


def extreme_products():
    """Largest codes, scales and activations, and a damaged row, in the build that stops at
    undefined behaviour; run in a process of its own.
    """
    x = np.where(np.arange(512) % 2, 1.0, -1.0).astype(np.float32)[None].repeat(3, 0)
    x[1], x[2, 5] = -3, np.nan
    for name in ("Q6_K", "Q5_0"):
        raw = random_rows(name, 3, 512)
        raw[:] = 0x7F if name == "Q6_K" else 0xFF
        w = device.retile(raw, name, 512, mode="undefined")
        for activations in ACTIVATIONS:
            device.matmul(x, w, activations, 2, mode="undefined")


def test_extreme_products_have_no_undefined_behaviour():
    """A signed overflow or a negative shift: the card and this processor may disagree on it."""
    done = subprocess.run([sys.executable, "-c", "import tests.emulation.test_matmul_twin as t\n"
                           "t.extreme_products()"], cwd=KERNELS.parent, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
