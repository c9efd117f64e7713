"""Rotary position encoding: one cosine/sine table per kind of layer, made on the host.

Owns angles and magnitudes (plain, linear scaling, YaRN, per-pair frequency factors). Must not know
how pairs are laid out in a head; the ``rope`` op does that. Invariant: everything is computed in
float64 and rounded to float32 once, so a table does not depend on its length, on the machine's
vector library or on other positions.

llama.cpp multiplies angles up in float32 from pair to pair (``ggml-cpu/ops.cpp``); its rounding is
not reproduced, it is below the tolerance of every comparison with it.
"""

import math

import numpy as np

_SLAB = 4096  # positions per step: bounds the float64 temporaries of a long table


def pair_frequencies(rope, freq_factors=None):
    """Return the angle per position of every rotated pair, and the factor on cosine and sine.

    Plain: ``freq_scale * freq_base**(-2 i / n_dims) / factor_i``. YaRN blends that with the
    unscaled frequency, by how many turns pair i makes in the original context.

    Parameters
    ----------
    rope : RopeConfig
    freq_factors : ndarray of shape (n_dims / 2,), float32, optional
        Divisors per pair (``rope_freqs.weight``).

    Returns
    -------
    frequencies : ndarray of shape (n_dims / 2,), float64
        Radians per position.
    magnitude : float

    Source
    ------
    llama.cpp 0c1e57098bba: ``ggml/src/ggml-cpu/ops.cpp`` (rope_yarn), ``ggml/src/ggml.c``
    (ggml_rope_yarn_corr_dims), ``src/llama-context.cpp`` (attention factor).
    """
    n_pairs = rope.n_dims // 2
    pair = np.arange(n_pairs, dtype=np.float64)
    unscaled = np.float64(rope.freq_base) ** (-2.0 * pair / rope.n_dims)
    if rope.sections is not None:
        unscaled = unscaled * rotated_by_text(rope.sections, n_pairs)
    if freq_factors is not None:
        unscaled = unscaled / np.asarray(freq_factors, np.float64)
    scaled = unscaled * rope.freq_scale
    if rope.yarn is None:
        return scaled, float(rope.attn_factor)
    yarn = rope.yarn
    if yarn.ext_factor == 0.0:
        return scaled, float(yarn.attn_factor * rope.attn_factor)
    low, high = _blend_limits(rope)
    ramp = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    keep = yarn.ext_factor * (1.0 - ramp)  # share of the unscaled frequency
    return scaled * (1.0 - keep) + unscaled * keep, _yarn_magnitude(rope)


def rotated_by_text(sections, n_pairs):
    """Which pairs follow a position that text advances.

    Pairs are dealt to time, height and width in turn, up to three times the size of each section;
    in text all three positions are equal. A pair that is left over follows a fourth position, which
    stays 0.

    Parameters
    ----------
    sections : tuple of 4 int
    n_pairs : int

    Returns
    -------
    ndarray of shape (n_pairs,), bool

    Source
    ------
    llama.cpp 0c1e57098bba: ``ggml/src/ggml-cpu/ops.cpp`` (ggml_mrope_cache_init, interleaved).
    """
    sector = np.arange(n_pairs) % sum(sections)
    return sector < 3 * np.asarray(sections[:3])[sector % 3]


def _blend_limits(rope):
    """Pairs between which YaRN goes over from unscaled to scaled."""
    yarn = rope.yarn

    def pair_turning(times):
        span = math.log(yarn.original_context / (times * 2.0 * math.pi))
        return rope.n_dims * span / (2.0 * math.log(rope.freq_base))

    low = max(0.0, math.floor(pair_turning(yarn.beta_fast)))
    high = min(rope.n_dims - 1.0, math.ceil(pair_turning(yarn.beta_slow)))
    return low, high


def _yarn_magnitude(rope):
    yarn = rope.yarn

    def grown(multiplier):
        if yarn.factor <= 1.0:
            return 1.0
        return 1.0 + 0.1 * multiplier * math.log(yarn.factor)

    magnitude = grown(1.0)
    if yarn.log_multiplier != 0.0:
        magnitude /= grown(yarn.log_multiplier)
    return magnitude * rope.attn_factor


def rope_table(rope, n_positions, freq_factors=None):
    """Compute cosine and sine of every position and pair.

    Parameters
    ----------
    rope : RopeConfig
    n_positions : int
    freq_factors : ndarray of shape (n_dims / 2,), float32, optional

    Returns
    -------
    ndarray of shape (n_positions, n_dims / 2, 2), float32
        ``[..., 0]`` cosine, ``[..., 1]`` sine, both times the magnitude.
    """
    frequencies, magnitude = pair_frequencies(rope, freq_factors)
    table = np.empty((n_positions, len(frequencies), 2), np.float32)
    for start in range(0, n_positions, _SLAB):
        stop = min(start + _SLAB, n_positions)
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * frequencies[None, :]
        table[start:stop, :, 0] = np.cos(angles) * magnitude
        table[start:stop, :, 1] = np.sin(angles) * magnitude
    return table


def table_bytes(rope, n_positions):
    """Bytes of ``rope_table``."""
    return n_positions * (rope.n_dims // 2) * 2 * 4
