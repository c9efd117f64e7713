"""Packed products of many tokens against the CPU's, bit for bit, and against the narrow kernels'.

The shipped .cu files run in emulation; see README.md.
"""

import numpy as np
import pytest

from tests.emulation import device_ops as device
from tests.emulation.host_module import unavailable
from tests.emulation.test_matmul_twin import ACTIVATIONS, PACKED, on_cpu, width
from tests.helpers.ops_checks import assert_same_bits
from tests.ops.test_matmul import activations_with_outliers, random_rows

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", PACKED)
def test_product_of_many_tokens_has_the_cpus_bits(name, activations):
    """Slices that are summed in another order, a token of the third or fourth tile elsewhere."""
    k = width(name, 2560, 608)
    raw, x = random_rows(name, 37, k), activations_with_outliers(40, k)
    expected = on_cpu(raw, name, x, activations)
    found = device.prefill(x, device.retile(raw, name, k), activations, schedule="random", seed=1)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_bits_do_not_depend_on_the_tile_or_on_m(name):
    """A prompt in one piece and in two that differ; a last row group that reads past the matrix."""
    k = width(name, 1280, 352)
    raw, x = random_rows(name, 65, k, seed=1), activations_with_outliers(40, k, seed=1)
    w, expected = device.retile(raw, name, k), on_cpu(raw, name, x, "int8x2")
    tiles = [(4, 1, 4, "in order"), (2, 2, 1, "reverse"), (1, 1, 3, "random")]
    for m in (1, 2, 4, 7, 8, 9, 16, 17, 40):
        for token_tiles, row_tiles, row_groups, schedule in tiles if m in (9, 40) else tiles[:1]:
            found = device.prefill(x[:m], w, "int8x2", token_tiles, row_tiles, row_groups,
                                   schedule=schedule, seed=m)
            assert_same_bits(found, expected[:m])


@pytest.mark.parametrize("name,k", [("Q6_K", 16384), ("Q4_1", 16384), ("Q4_K", 6656)])
def test_product_of_many_tokens_at_real_widths(name, k):
    """Eight slices where there are sixteen."""
    raw, x = random_rows(name, 3, k), activations_with_outliers(17, k)
    w = device.retile(raw, name, k)
    assert_same_bits(device.prefill(x, w, "int8x2"), on_cpu(raw, name, x, "int8x2"))


@pytest.mark.parametrize("name,k", [("Q4_K", 512), ("Q6_K", 256), ("Q8_0", 96), ("Q5_1", 64)])
def test_product_of_many_tokens_is_clean(name, k):
    """A fragment, header or scale read past the last tile or group."""
    raw, x = random_rows(name, 37, k), activations_with_outliers(33, k)
    how = {"mode": "check", "schedule": "random", "seed": 5}
    w = device.retile(raw, name, k, **how)
    assert_same_bits(device.prefill(x, w, "int8", **how), on_cpu(raw, name, x, "int8"))


def test_damaged_token_does_not_spread():
    """A NaN that reaches the tokens beside it in a tile."""
    raw, x = random_rows("Q4_K", 5, 512), activations_with_outliers(20, 512)
    x[18, 300] = np.inf
    found = device.prefill(x, device.retile(raw, "Q4_K", 512), "int8x2")
    rest = np.arange(20) != 18
    assert np.isnan(found[18]).all()
    assert_same_bits(found[rest], on_cpu(raw, "Q4_K", x, "int8x2")[rest])
