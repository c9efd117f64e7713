"""Special functions: one formula, the same bits as float, as 16 lanes and in the NumPy model."""

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.ops.cpu import jit, runtime, special
from tests.helpers.exact_f32 import Arithmetic, fma
from tests.helpers.ops_checks import assert_same_bits, poisoned

EDGES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1e-45, -1e-40, 1.1754944e-38, -87.0, -87.00001,
         88.72283, 88.72284, 87.0, 0.625, -0.625, 0.62499994, 3.4e38, -3.4e38, 1e-20, 44.0, 104.0]

# largest error in ulp of the result that the table in special.py states, and the range it holds on
MEASURED = {
    "exp": (1.06, -87.0, 88.72283, np.exp),
    "sigmoid": (2.4, -86.0, 104.0, lambda x: 1 / (1 + np.exp(-x))),
    "silu": (2.4, -86.0, 104.0, lambda x: x / (1 + np.exp(-x))),
    "tanh": (1.4, -104.0, 104.0, np.tanh),
    "softplus": (2.6, -86.0, 104.0,
                 lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))),
}


def arguments(seed=0, n=4000):
    """Edges, a uniform range and all magnitudes; a multiple of 16 values."""
    rng = np.random.default_rng(seed)
    wide = np.exp(rng.uniform(-90, 88, n)) * rng.choice([-1, 1], n)
    x = np.concatenate([EDGES, rng.uniform(-110, 110, n), rng.uniform(-3, 3, n), wide])
    return x[:len(x) // 16 * 16].astype(np.float32)


def _build(name):
    """Kernel that applies the float and the vector form: args [x, as floats, as vectors, n]."""

    def build():
        from cudflash.ops.cpu import simd as S
        from cudflash.ops.cpu import special_kernel

        one, sixteen = getattr(special_kernel, name), getattr(special_kernel, "v" + name)

        def apply(args, tid, n_threads):
            x, a, b = S.peek_i64(args), S.peek_i64(args + 8), S.peek_i64(args + 16)
            n = S.peek_i64(args + 24)
            if tid == 0:
                for i in range(0, 4 * n, 4):
                    S.poke_f32(a + i, one(S.peek_f32(x + i)))
                for i in range(0, 4 * n, 64):
                    S.store_f32(b + i, sixteen(S.load_f32(x + i)))

        return apply

    return build


@pytest.mark.parametrize("name", sorted(special.FUNCTIONS))
def test_float_lanes_and_model_have_the_same_bits(name):
    """Catches a contraction, another order, or a form of the formula that took its own way."""
    x = ops.upload(arguments())
    as_floats, as_lanes = poisoned(x.shape), poisoned(x.shape)
    kernel = jit.register(f"test_special_{name}", _build(name))
    runtime.submit(kernel, [x, as_floats, as_lanes, len(x)], reads=[x],
                   writes=[as_floats, as_lanes])
    expected = special.FUNCTIONS[name](Arithmetic, x)
    number = ~np.isnan(expected)
    assert_same_bits(as_floats[number], expected[number])
    assert_same_bits(as_lanes[number], expected[number])
    assert np.isnan(as_floats[~number]).all() and np.isnan(as_lanes[~number]).all()


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_error_stays_within_the_stated_ulp(name):
    """Catches a mistyped coefficient or a range reduction that loses bits."""
    bound, low, high, exact = MEASURED[name]
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(low, high, 200_000), rng.uniform(-2, 2, 200_000),
                        np.exp(rng.uniform(-80, 4.4, 100_000)) * rng.choice([-1, 1], 100_000)])
    x = x[(x >= low) & (x <= high)].astype(np.float32)
    found = special.FUNCTIONS[name](Arithmetic, x).astype(np.float64)
    true = exact(x.astype(np.float64))
    normal = np.abs(true) > 1.2e-38
    error = np.abs(found - true)[normal] / np.spacing(np.abs(true[normal]).astype(np.float32))
    assert error.max() <= bound, f"{error.max():.3f} ulp at {x[normal][error.argmax()]!r}"


def test_gelu_error_stays_within_its_bound():
    """Catches a wrong constant: 3 + 6 |u| ulp: 2 u has six roundings of 2^-24.

    Where exp(-2 u) overflows, the result is 0 and the true value below 1e-36.
    """
    x = np.random.default_rng(2).uniform(-20, 20, 400_000).astype(np.float32)
    wide = x.astype(np.float64)
    u = np.sqrt(2 / np.pi) * wide * (1 + 0.044715 * wide**2)
    true = wide / (1 + np.exp(-2 * u))
    found = special.gelu_tanh(Arithmetic, x).astype(np.float64)
    bound = (3 + 6 * np.abs(u)) * np.spacing(np.abs(true).astype(np.float32)) + 1e-36
    assert (np.abs(found - true) <= bound).all()


def test_exp_at_its_edges():
    """Catches a subnormal or garbage exponent where the result leaves the normal range."""
    x = np.array([-np.inf, -87.00001, -87.0, 88.72283, 88.72284, np.inf, 0.0, -0.0], np.float32)
    found = special.exp(Arithmetic, x)
    assert_same_bits(found[[0, 1, 4, 5, 6, 7]], np.float32([0, 0, np.inf, np.inf, 1, 1]))
    assert 1.6e-38 < found[2] < 1.7e-38 and 3.4e38 < found[3] < np.inf
    bits = special.exp(Arithmetic, np.float32([np.nan])).view(np.uint32)
    assert bits[0] == 0x7FC00000


def test_tanh_is_odd_and_bounded():
    """Catches a sign lost between the two branches."""
    x = np.abs(arguments(3))
    up, down = special.tanh(Arithmetic, x), special.tanh(Arithmetic, -x)
    assert_same_bits(-up, down)
    assert (up <= 1).all()


def test_model_fma_rounds_once():
    """Catches a model that rounds twice: 1 + 2^-24 + 2^-60 must round up."""
    x = np.float32([1 + 2.0**-23, 2.0**-12])
    y = np.float32([1.0, 2.0**-12 * (1 + 2.0**-23)])
    z = np.float32([2.0**-24 * (1 + 2.0**-23), 1.0])
    exact = [1 + 2.0**-22, 1 + 2.0**-23]  # just above the midpoint between two floats
    assert_same_bits(fma(x, y, z), np.float32(exact))
