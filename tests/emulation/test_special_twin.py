"""The header of special functions against ``cudflash.ops.cpu.special``, step by step and in bits."""

import re

import numpy as np
import pytest

from cudflash.ops.cpu import special
from tests.emulation.host_module import HERE, KERNELS, HostModule, aligned, to_device, unavailable
from tests.helpers.exact_f32 import Arithmetic
from tests.helpers.ops_checks import assert_same_bits
from tests.ops.test_special import arguments

CONSTANTS = (special.LOG2E, -special.LN2_HIGH, -special.LN2_LOW, special.EXP_LOW, special.EXP_HIGH,
             special.ROUND, special.TANH_SPLIT, special.GELU_CUBIC, special.GELU_SCALE,
             *special.EXP_Q, *special.TANH_P, *special.LOG1P_P)


def test_header_holds_every_constant_and_no_other():
    """A mistyped digit that a few thousand arguments do not show."""
    text = (KERNELS / "common" / "special.cuh").read_text()
    code = "\n".join(line.split("//")[0] for line in text.splitlines())
    found = {float.fromhex(v) if "x" in v else float(v)
             for v in re.findall(r"-?(?:0x1\.[0-9a-f]+p[+-]\d+|\d+\.\d+)(?=f\b)", code)}
    assert found - {0.0, 1.0, 2.0} == {float(c) for c in CONSTANTS}


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("name", sorted(special.FUNCTIONS))
def test_function_has_the_bits_of_its_formula(name):
    """Steps in another order, a contraction, an edge that is not the stated one."""
    x = arguments(1, 20000)
    found = aligned(x.shape, np.float32)
    kernel = HostModule(HERE / "special_probe.cu").get_function(f"probe_{name}")
    kernel((-(-len(x) // 256),), (256,), (to_device(x), found, np.int32(len(x))))
    expected = special.FUNCTIONS[name](Arithmetic, x)
    number = ~np.isnan(expected)
    assert_same_bits(found[number], expected[number])
    assert np.isnan(found[~number]).all()
