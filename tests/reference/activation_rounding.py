"""Imitate what int8 activations cost, to derive how far a packed product may stray.

Each function rounds the rows of a product's input the way the numerics contract says the engine
does and returns floats again; the product itself stays exact. The engine's bits are *not*
reproduced (its scales are float32, its exponent rule may differ in ties): only the size of the
error is, which is what `tests/tolerances.py` needs.
"""

import numpy as np

_SUPER_BLOCK_TYPES = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}
_FLOAT_TYPES = {"F32", "F16", "BF16"}


def int8(x, type_name):
    """One int8 term per value. x (M, K) -> (M, K)."""
    if type_name in _FLOAT_TYPES:
        return x
    step = _super_block_steps(x) if type_name in _SUPER_BLOCK_TYPES else _block_steps(x, 32)
    return _round_to(x, step)


def int8x2(x, type_name):
    """Two int8 terms: the second holds what the first left, on a grid 254 times finer."""
    if type_name in _FLOAT_TYPES:
        return x
    block = 256 if type_name in _SUPER_BLOCK_TYPES else 32
    return _round_to(x, _block_steps(x, block) / 254.0)


def _block_steps(x, block):
    """Largest magnitude / 127 of each run of `block` values, repeated: (M, K) -> (M, K)."""
    peak = np.abs(x.reshape(len(x), -1, block)).max(axis=2)  # (M, K / block)
    return np.repeat(peak / 127.0, block, axis=1)


def _super_block_steps(x):
    """One step per 256, halved at most 3 times per 32 values while those still fit in int8."""
    peak_256 = _block_steps(x, 256)
    peak_32 = _block_steps(x, 32)
    with np.errstate(divide="ignore", invalid="ignore"):
        halvings = np.floor(np.log2(peak_256 / peak_32))
    halvings = np.clip(np.nan_to_num(halvings, nan=0.0, posinf=3.0), 0, 3)
    return peak_256 / 2.0**halvings


def _round_to(x, step):
    safe = np.where(step > 0, step, 1.0)
    return np.rint(x / safe) * safe
