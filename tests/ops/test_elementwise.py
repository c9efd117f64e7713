"""Elementwise ops against their formulas, bit for bit; they share one loop and its tails."""

from functools import partial

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from cudflash.ops.cpu import special
from tests.helpers import exact_f32 as F
from tests.helpers.ops_checks import (
    assert_same_bits,
    check_row_independence,
    check_writes_only,
    poisoned,
    replay,
)

M = F.Arithmetic
# name -> (call with x, y, bias; formula)
OPS = {
    "copy": (lambda o, x, y, b: ops.copy(o, x), lambda x, y, b: x),
    "add": (lambda o, x, y, b: ops.add(o, x, y), lambda x, y, b: F.add(x, y)),
    "add_bias": (lambda o, x, y, b: ops.add_bias(o, x, b), lambda x, y, b: F.add(x, b)),
    "scale": (lambda o, x, y, b: ops.scale(o, x, 0.3),
              lambda x, y, b: F.mul(x, np.float32(0.3))),
    "softcap": (lambda o, x, y, b: ops.softcap(o, x, 30.0),
                lambda x, y, b: special.softcap(M, x, np.float32(30))),
    "swiglu": (lambda o, x, y, b: ops.swiglu(o, x, y),
               lambda x, y, b: F.mul(special.silu(M, x), y)),
    "geglu": (lambda o, x, y, b: ops.geglu(o, x, y),
              lambda x, y, b: F.mul(special.gelu_tanh(M, x), y)),
    "sigmoid_gate": (lambda o, x, y, b: ops.sigmoid_gate(o, x, y),
                     lambda x, y, b: F.mul(x, special.sigmoid(M, y))),
}


def case(m, n):
    rng = np.random.default_rng([m, n])
    x, y = (ops.upload((rng.standard_normal((m, n)) * 6).astype(np.float32)) for _ in range(2))
    x[0, :4] = [1e-39, -0.0, 1.5e-38, -95.0]
    y[0, :4] = [1e-39, -0.0, -1.2e-38, 0.25]
    return x, y, ops.upload(rng.standard_normal(n).astype(np.float32))


@pytest.mark.parametrize("name", sorted(OPS))
def test_elementwise_op(name):
    """Catches a wrong formula, a wrong tail, and a row, thread or graph that changes the bits."""
    call, formula = OPS[name]
    for n in (1, 15, 16, 300, 1549):
        inputs = [ops.upload(a[..., :n]) for a in case(2, max(n, 4))]
        out = poisoned((2, n))
        replay(partial(call, out, *inputs))
        assert_same_bits(out, formula(*inputs).astype(np.float32))
    x, y, bias = case(33, 530)

    def run(rows):
        out = poisoned(x[rows].shape)
        call(out, x[rows], y[rows], bias)
        return out

    check_row_independence(run)
    found = check_writes_only(lambda out: call(out, x, y, bias), x.shape)
    expected = formula(x, y, bias)
    assert_same_bits(found, expected)
    call(x, x, y, bias)
    assert_same_bits(x, expected)


def test_copy_keeps_every_bit():
    """Catches a copy through arithmetic: subnormals and NaN payloads must survive."""
    bits = np.random.default_rng(0).integers(0, 2**32, (3, 50), dtype=np.uint32)
    x = ops.upload(bits.view(np.float32))
    out = poisoned((3, 2, 50))
    ops.copy(out[:, 1], x)
    assert_same_bits(out[:, 1].copy().view(np.uint32), bits)
    assert np.isnan(out[:, 0]).all()


def test_recorded_strided_writes_are_ordered():
    """Catches a missing barrier: a strided view overlaps all rows between its ends."""
    x = ops.upload(np.ones((64, 4096), np.float32))  # large: small launches need no barrier
    taps = ops.empty((64, 3, 4096), np.float32)
    total = ops.empty((64, 4096), np.float32)
    with ops.capture() as graph:
        ops.scale(taps[:, 2], x, 2.0)
        ops.add(total, x, taps[:, 2])
    assert graph.n_barriers == 1
    graph.launch()
    assert (total == 3).all()


def test_wrong_arguments_are_refused():
    """Catches silent broadcasting and another dtype."""
    x, y, bias = case(3, 20)
    with pytest.raises(UsageError, match=r"shape \(2, 20\), expected \(3, 20\)"):
        ops.add(poisoned(x.shape), x, y[:2])
    with pytest.raises(UsageError, match="float64"):
        ops.add(poisoned(x.shape), x, y.astype(np.float64))
    with pytest.raises(UsageError, match="contiguous"):
        ops.add(poisoned((3, 10)), x[:, ::2], y[:, ::2])
    with pytest.raises(UsageError, match="cap is 0"):
        ops.softcap(poisoned(x.shape), x, 0.0)
