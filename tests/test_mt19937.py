"""The generator against g++ 12: words, reals, snapshots."""

import math

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.sampling import Mt19937, MtState
from tests.helpers.sampling_cases import arrays

SEEDS = sorted({int(name.split("_")[1]) for name in arrays("mt19937") if name.startswith("u32_")})


@pytest.mark.parametrize("seed", SEEDS)
def test_words_equal_std_mt19937(seed):
    """Catches a wrong initialisation, twist (block borders included) or tempering."""
    rng = Mt19937(seed)
    expected = arrays("mt19937")[f"u32_{seed}"]
    assert [rng.next_u32() for _ in expected] == expected.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_doubles_equal_libstdcxx(seed):
    """Catches swapped words, another 53-bit scheme, or a rounding of the conversion."""
    rng = Mt19937(seed)
    expected = arrays("mt19937")[f"double_{seed}"]
    got = np.array([rng.uniform_double() for _ in expected])
    np.testing.assert_array_equal(got.view(np.int64), expected.view(np.int64))


@pytest.mark.parametrize("seed", SEEDS)
def test_floats_equal_libstdcxx(seed):
    """Catches a float made from the double, or from the wrong number of words."""
    rng = Mt19937(seed)
    expected = arrays("mt19937")[f"float_{seed}"]
    got = np.array([rng.uniform_float() for _ in expected])
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def test_documented_values():
    """Catches a docstring that promises another stream than the class gives."""
    rng = Mt19937(42)
    assert [rng.next_u32() for _ in range(4)] == [1608637542, 3421126067, 4083286876, 787846414]
    standard = Mt19937(5489)
    assert [standard.next_u32() for _ in range(10000)][-1] == 4123659995


def test_words_equal_numpy_legacy():
    """Catches errors past the recorded 2000 words: an independent implementation, 20,000 words."""
    other = np.random.RandomState(20261129)
    rng = Mt19937(20261129)
    expected = other.randint(0, 2**32, 20000, dtype=np.uint32)
    assert [rng.next_u32() for _ in range(20000)] == expected.tolist()


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 731, 1248])
def test_snapshot_replays_the_stream(drawn):
    """Catches a snapshot that shares memory with the generator or is off by a block."""
    rng = Mt19937(0x12345678)
    for _ in range(drawn):
        rng.next_u32()
    state = rng.state()
    first = [rng.next_u32() for _ in range(1500)]
    rng.set_state(state)
    assert [rng.next_u32() for _ in range(1500)] == first
    other = Mt19937(1)
    other.set_state(MtState(state.key.copy(), state.position))
    assert [other.next_u32() for _ in range(1500)] == first


@pytest.mark.parametrize(
    ("key", "position"),
    [
        (np.ones(623, np.uint32), 0),
        (np.ones(624, np.uint32), 625),
        (np.ones(624, np.uint32), -1),
        (np.zeros(624, np.uint32), 0),
        (np.full(624, 2**32, np.uint64), 0),
    ],
)
def test_damaged_snapshot_is_refused(key, position):
    """Catches acceptance of a state that no generator can be in."""
    with pytest.raises(UsageError, match="generator state"):
        Mt19937(1).set_state(MtState(key, position))


@pytest.mark.parametrize("seed", [None, -1, 0xFFFFFFFF])
def test_random_seed_is_recorded(seed):
    """Catches a run that cannot be repeated because its seed was not kept."""
    rng = Mt19937(seed)
    assert 0 <= rng.seed < 0xFFFFFFFF
    assert Mt19937(rng.seed).next_u32() == rng.next_u32()
    assert len({Mt19937(seed).seed for _ in range(20)}) > 1


@pytest.mark.parametrize("seed", [-2, 2**32, 1.5, "1", True])
def test_bad_seed_is_refused(seed):
    """Catches a seed silently reduced modulo 2**32 or rounded."""
    with pytest.raises(UsageError, match="seed"):
        Mt19937(seed)


def test_uniform_below_one_at_the_largest_words():
    """Catches a missing clamp: both largest words round to 1.0."""
    rng = Mt19937(1)
    rng.next_u32()
    rng._words = [0xFFFFFFFF] * 624
    assert rng.uniform_double() == math.nextafter(1.0, 0.0)
    assert rng.uniform_float() == np.nextafter(np.float32(1), np.float32(0))
