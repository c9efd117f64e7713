"""A cache op set in plain NumPy with small chunks, and writing rows without a model."""

from types import SimpleNamespace

import numpy as np
from cudflash.loader.config import LayerConfig

from cudflash.model.buffers import Allocator
from cudflash.model.cache import TargetCache

HEAD_DIM, N_KV_HEADS, CHUNK = 2, 2, 16


def _kv_cache(n_kv_heads, head_dim, capacity, kv_type):
    dtype = {"f16": np.float16, "f32": np.float32}[kv_type]
    return (
        np.full((n_kv_heads, capacity // 16, head_dim, 16), np.nan, dtype),
        np.full((n_kv_heads, capacity, head_dim), np.nan, dtype),
    )


OPS = SimpleNamespace(CHUNK=CHUNK, kv_cache=_kv_cache, download=np.array)


def make_cache(windows, n_ctx=200, max_rows=9, kv_type="f32"):
    """A cache with one layer per window (None: full)."""
    layers = tuple(LayerConfig(N_KV_HEADS, N_KV_HEADS, 1, window, None) for window in windows)
    config = SimpleNamespace(layers=layers, head_dim=HEAD_DIM, recurrent=False)
    return TargetCache(OPS, config, n_ctx, kv_type, max_rows, Allocator(OPS))


def write_block(cache, values):
    """Open a block and write one number per row into every layer, as a forward pass would."""
    first = cache.begin(len(values))
    for layer in cache.layers:
        for i, value in enumerate(values):
            slot = (first + i) % layer.capacity
            layer.k[:, slot // 16, :, slot % 16] = value
            layer.v[:, slot] = -value


def read_rows(cache, index, positions):
    """The numbers of some rows of a layer; checks that keys and values agree in all places."""
    k, v = cache.rows(index, positions)
    np.testing.assert_array_equal(k, -v)
    assert np.all(k == k[:1, :, :1]) or np.isnan(k).any()
    return k[0, :, 0].tolist()
