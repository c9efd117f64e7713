"""RoPE tables against direct float64 formulas."""

import math

import numpy as np
import pytest
from cudflash.loader.config import RopeConfig, YarnConfig

from cudflash.model.rope import pair_frequencies, rope_table, table_bytes


def rope(n_dims=8, base=10000.0, scale=1.0, yarn=None, attn_factor=1.0):
    return RopeConfig("interleaved", n_dims, base, scale, yarn, attn_factor)


def yarn(factor=4.0, original=64, ext=1.0, attn=1.0, fast=32.0, slow=1.0, log_multiplier=0.0):
    return YarnConfig(factor, original, ext, attn, fast, slow, log_multiplier)


@pytest.mark.parametrize("base, scale", [(10000.0, 1.0), (1e6, 0.125)])
def test_table_is_the_rounded_float64_formula(base, scale):
    """Catches angles accumulated in float32, a wrong pair exponent, or scaling left out."""
    table = rope_table(rope(64, base, scale), 5000)
    assert table.shape == (5000, 32, 2) and table.dtype == np.float32
    for position in (0, 1, 77, 4095, 4096, 4999):
        for pair in (0, 1, 31):
            angle = position * scale * base ** (-2 * pair / 64)
            assert table[position, pair, 0] == pytest.approx(math.cos(angle), abs=1e-7)
            assert table[position, pair, 1] == pytest.approx(math.sin(angle), abs=1e-7)


def test_table_does_not_depend_on_its_length():
    """Catches a row that changes when the context grows (slabs, vector tails)."""
    short, long = rope_table(rope(), 100), rope_table(rope(), 9001)
    np.testing.assert_array_equal(short.view(np.uint32), long[:100].view(np.uint32))
    assert table_bytes(rope(), 100) == short.nbytes


def test_frequency_factors_divide_the_angles():
    """Catches factors multiplied in, or applied after linear scaling only."""
    factors = np.array([1, 2, 4, 8], np.float32)
    plain, _ = pair_frequencies(rope(scale=0.5))
    scaled, _ = pair_frequencies(rope(scale=0.5), factors)
    np.testing.assert_allclose(scaled, plain / factors, rtol=1e-15)


def test_attention_factor_multiplies_cosine_and_sine():
    """Catches a magnitude applied to one of the two, or not at all."""
    table = rope_table(rope(attn_factor=1.25), 3)
    np.testing.assert_allclose(np.hypot(table[..., 0], table[..., 1]), 1.25, rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_scales_slow_ones():
    """Catches the blend turned round, or limits taken from the wrong context length."""
    config = rope(64, 10000.0, 0.25, yarn(original=4096))
    frequencies, magnitude = pair_frequencies(config)
    unscaled = 10000.0 ** (-np.arange(32) / 32)
    turns = 4096 * unscaled / (2 * np.pi)  # turns of a pair in the original context
    np.testing.assert_allclose(frequencies[turns > 40], unscaled[turns > 40], rtol=1e-12)
    np.testing.assert_allclose(frequencies[turns < 0.7], unscaled[turns < 0.7] / 4, rtol=1e-12)
    between = (turns > 1.5) & (turns < 25)
    assert np.all(frequencies[between] < unscaled[between])
    assert np.all(frequencies[between] > unscaled[between] / 4)
    assert magnitude == pytest.approx(1 + 0.1 * math.log(4))


def test_yarn_follows_llama_cpp_pair_by_pair():
    """Catches floor and ceil of the limits swapped or left out: a direct transcription."""
    n_dims, base, factor, original = 16, 5000.0, 8.0, 512
    config = rope(n_dims, base, 1 / factor, yarn(factor, original, 0.75))
    frequencies, _ = pair_frequencies(config)

    def limit(beta):
        return n_dims * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(limit(32))), min(n_dims - 1, math.ceil(limit(1)))
    for pair in range(n_dims // 2):
        extrapolated = base ** (-2 * pair / n_dims)
        ramp = min(1, max(0, (pair - low) / max(0.001, high - low)))
        mix = 0.75 * (1 - ramp)
        expected = extrapolated / factor * (1 - mix) + extrapolated * mix
        assert frequencies[pair] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"factor": 4.0}, 1 + 0.1 * math.log(4)),
        ({"factor": 0.5}, 1.0),
        ({"factor": 4.0, "log_multiplier": 1.0}, 1.0),
        ({"factor": 4.0, "log_multiplier": 0.5}, (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))),
        ({"factor": 4.0, "attn": 3.0}, 1 + 0.1 * math.log(4)),  # llama.cpp recomputes it
        ({"factor": 4.0, "ext": 0.0, "attn": 3.0}, 3.0),
    ],
)
def test_yarn_magnitude(settings, expected):
    """Catches the logarithmic magnitude applied twice, dropped, or with the wrong multiplier."""
    config = rope(yarn=yarn(**settings), scale=1 / settings["factor"], attn_factor=2.0)
    assert pair_frequencies(config)[1] == pytest.approx(2.0 * expected)
