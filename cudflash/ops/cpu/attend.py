"""Key/value caches and attention: the op-level functions.

Letters: M query rows, H query heads, Hkv key/value heads, D head_dim; G = H / Hkv heads share one
key/value head.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import empty, submit, zeros

# Keys of one step of the online softmax: absolute positions [128 c, 128 c + 127].
CHUNK = 128
KV_TYPES = {"f16": np.float16, "f32": np.float32}
_MAX_HEAD_DIM = 256
# Chunks are shared out between threads while there are few blocks of query rows, and while the
# partial results fit here; otherwise blocks are. The bits are the same.
_FEW_BLOCKS = 16
_MAX_WORKSPACE_BYTES = 32 << 20

_workspace = {"buffer": None}


def kv_cache(n_kv_heads, head_dim, capacity, kv_type):
    """Zero-filled caches of one layer.

    Parameters
    ----------
    n_kv_heads, head_dim, capacity : int
        ``capacity`` is a multiple of CHUNK; position p lies in slot p % capacity.
    kv_type : {"f16", "f32"}

    Returns
    -------
    cache_k : ndarray of shape (Hkv, capacity / 16, D, 16)
        16 neighbouring keys lie side by side for every d.
    cache_v : ndarray of shape (Hkv, capacity, D)
    """
    if kv_type not in KV_TYPES:
        raise UsageError(
            f"key/value type is {kv_type!r}, expected one of {', '.join(KV_TYPES)}")
    if capacity <= 0 or capacity % CHUNK:
        raise UsageError(f"cache capacity is {capacity}, expected a multiple of {CHUNK}")
    if head_dim % 16 or not 0 < head_dim <= _MAX_HEAD_DIM:
        raise UsageError(
            f"head_dim is {head_dim}, expected a multiple of 16 up to {_MAX_HEAD_DIM}")
    dtype = KV_TYPES[kv_type]
    return (zeros((n_kv_heads, capacity // 16, head_dim, 16), dtype),
            zeros((n_kv_heads, capacity, head_dim), dtype))


def _check_caches(op, cache_k, cache_v, n_kv_heads, d):
    capacity = cache_v.shape[1]
    if cache_k.dtype != cache_v.dtype or cache_k.dtype not in KV_TYPES.values():
        raise UsageError(
            f"{op}: caches are {cache_k.dtype} and {cache_v.dtype}, expected float16 or float32")
    check_shape(op, "cache_k", cache_k, (n_kv_heads, capacity // 16, d, 16))
    check_shape(op, "cache_v", cache_v, (n_kv_heads, capacity, d))
    if capacity % CHUNK or not (cache_k.flags.c_contiguous and cache_v.flags.c_contiguous):
        raise UsageError(f"{op}: caches of capacity {capacity} do not come from kv_cache")
    return capacity


def _kv_name(cache):
    return "f16" if cache.dtype == np.float16 else "f32"


def kv_write(cache_k, cache_v, k, v, positions):
    """Store key and value rows at their positions' slots.

    Parameters
    ----------
    cache_k, cache_v : ndarray
        From :func:`kv_cache`; their dtype decides the rounding.
    k, v : ndarray of shape (M, Hkv, D), float32
    positions : ndarray of shape (M,), int32
        Slots of one call must differ. A negative position is not stored.

    Notes
    -----
    float16: rounded to nearest even, subnormals kept, 65520 and more become infinity (attention
    then gives a NaN, which ``check_finite`` reports). float32: copied.
    """
    m, n_kv_heads, d = k.shape
    for name, array in (("k", k), ("v", v)):
        check_rows("kv_write", name, array)
    check_shape("kv_write", "v", v, k.shape)
    check_rows("kv_write", "positions", positions, np.int32)
    check_shape("kv_write", "positions", positions, (m,))
    capacity = _check_caches("kv_write", cache_k, cache_v, n_kv_heads, d)
    if m > capacity:
        raise UsageError(f"kv_write: {m} rows do not fit a cache of {capacity}")
    if m == 0:
        return
    kv = _kv_name(cache_k)

    def build():
        from cudflash.ops.cpu.attend_kernel import build_kv_write

        return build_kv_write(kv)

    submit(jit.register(f"kv_write_{kv}", build),
           [cache_k, cache_v, k, stride(k), v, stride(v), positions, m, n_kv_heads, d, capacity],
           reads=[extent(k), extent(v), positions], writes=[cache_k, cache_v],
           touched=4 * (k.nbytes + v.nbytes))


def attention(out, q, cache_k, cache_v, positions, window, scale, softcap):
    """Softmax attention of every query row over the cached keys it may see.

    The row at position p sees positions max(0, p - window + 1) .. p, or 0 .. p for window 0.

    Parameters
    ----------
    out, q : ndarray of shape (M, H, D), float32
    cache_k, cache_v : ndarray
        From :func:`kv_cache`, with the rows of this call already written.
    positions : ndarray of shape (M,), int32
    window : int
    scale : float
        Factor on the product of query and key.
    softcap : float
        0 for none.

    Notes
    -----
    Keys go in chunks of 128 absolute positions. Score: fma over d = 0 .. D - 1 from 0, times
    scale, then softcap * tanh(score / softcap). Chunk: m_c = largest score; p = exp(score - m_c);
    l_c = 16 lanes by key index modulo 16, each adding its keys in ascending order from 0, then the
    halving tree; acc_c[d] = fma over keys in ascending order from 0. Merge, in ascending order from
    m = -inf, l = 0, acc = 0: m' = max(m, m_c); a = exp(m - m'); b = exp(m_c - m');
    l = fma(l, a, l_c * b); acc = fma(acc, a, acc_c * b). out = acc / l. Keys out of sight are never
    touched, chunks without a visible key are left out. So the bits depend on absolute positions
    alone. A negative position, or one that sees more keys than the cache holds, gives NaN rows.
    """
    m, n_heads, d = q.shape
    check_rows("attention", "q", q)
    check_rows("attention", "out", out)
    check_shape("attention", "out", out, q.shape)
    check_rows("attention", "positions", positions, np.int32)
    check_shape("attention", "positions", positions, (m,))
    n_kv_heads = cache_v.shape[0]
    capacity = _check_caches("attention", cache_k, cache_v, n_kv_heads, d)
    if n_heads % n_kv_heads:
        raise UsageError(
            f"attention: {n_heads} query heads cannot share {n_kv_heads} key/value heads")
    if window < 0 or softcap < 0.0:
        raise UsageError(f"attention: window {window} and softcap {softcap} must not be negative")
    if m == 0:
        return
    group = n_heads // n_kv_heads
    pairs = m * group
    block = _block_size(pairs)
    kv = _kv_name(cache_k)
    shape = f"{kv}_d{d}_b{block}"
    values = [out, stride(out), q, stride(q), cache_k, cache_v, positions, m, n_heads, n_kv_heads,
              capacity, window, float(scale), float(softcap)]
    reads = [extent(q), cache_k, cache_v, positions]
    n_blocks = n_kv_heads * -(-pairs // block)
    slots = capacity // CHUNK + 1
    n_floats = m * n_heads * slots * (d + 16)
    if n_blocks >= _FEW_BLOCKS or 4 * n_floats > _MAX_WORKSPACE_BYTES:
        submit(_kernel("attention_blocks", shape, kv, d, block), [*values, 0, 0], reads=reads,
               writes=[extent(out)])
        return
    workspace = _get_workspace(n_floats)[:n_floats]
    shares = row_shares(m, group, block)
    submit(_kernel("attention_chunks", shape, kv, d, block), [*values, workspace, slots, shares],
           reads=reads, writes=[workspace], rows=shares, by_rows=[q, workspace])
    submit(_kernel("attention_merge", f"d{d}", kv, d, block), [*values, workspace, slots],
           reads=[workspace, positions], writes=[extent(out)], touched=4 * n_floats,
           rows=m * n_heads, by_rows=[workspace, out])


def row_shares(m, group, block):
    """Parts of whole rows that blocks of (row, head) pairs can be shared out by; 0 if they cannot."""
    return m * group // block if block % group == 0 and m * group % block == 0 else 0


def _block_size(pairs):
    """(row, head) pairs that share one pass over keys and values."""
    return next((size for size in (1, 2, 3, 4) if pairs <= size), 8)


def _kernel(name, suffix, kv, d, block):
    def build():
        from cudflash.ops.cpu.attend_kernel import BUILDERS

        return BUILDERS[name](kv, d, block)

    return jit.register(f"{name}_{suffix}", build)


def _get_workspace(n_floats):
    """Scratch that all attention calls share; programs run one at a time and order its use."""
    found = _workspace["buffer"]
    if found is None or found.size < n_floats:
        found = _workspace["buffer"] = empty((n_floats,), np.float32)
    return found
