"""Key/value caches and attention; kernels in ``kv_write.cu``, ``attention.cu``,
``attention_prefill.cu`` and ``attention_span.cu``.

Letters: M query rows, H query heads, Hkv key/value heads, D head_dim.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_rows, check_shape
from cudflash.ops.cuda.launch import Long

CHUNK = 128  # keys of one step of the online softmax: absolute positions [128 c, 128 c + 127]
KV_TYPES = {"f16": np.float16, "f32": np.float32}
MAX_HEAD_DIM = 256
# Up to here the work is split over chunks, and every chunk's result goes through scratch; longer
# calls have enough rows to fill a card without it. The bits are the same.
SPLIT_ROWS = 16
RECORD_EXTRA = 4  # floats of a chunk's record beside the weighted sum of values
_BLOCK = 256


def kv_cache(self, n_kv_heads, head_dim, capacity, kv_type):
    """Zero-filled caches of one layer; shapes as of ``ops.cpu.kv_cache``.

    Parameters
    ----------
    n_kv_heads, head_dim, capacity : int
        ``capacity`` is a multiple of CHUNK; position p lies in slot p % capacity.
    kv_type : {"f16", "f32"}

    Returns
    -------
    cache_k : array of shape (Hkv, capacity / 16, D, 16)
    cache_v : array of shape (Hkv, capacity, D)
    """
    if kv_type not in KV_TYPES:
        raise UsageError(
            f"key/value type is {kv_type!r}, expected one of {', '.join(KV_TYPES)}")
    if capacity <= 0 or capacity % CHUNK:
        raise UsageError(f"cache capacity is {capacity}, expected a multiple of {CHUNK}")
    if head_dim % 16 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise UsageError(
            f"head_dim is {head_dim}, expected a multiple of 16 up to {MAX_HEAD_DIM}")
    dtype = KV_TYPES[kv_type]
    return (self.zeros((n_kv_heads, capacity // 16, head_dim, 16), dtype),
            self.zeros((n_kv_heads, capacity, head_dim), dtype))


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


def _kv_bits(cache):
    return f"KV_BITS={8 * cache.dtype.itemsize}"


def _check_queries(op, out, q, cache_v):
    check_rows(op, "q", q)
    check_rows(op, "out", out)
    check_shape(op, "out", out, q.shape)
    n_heads, n_kv_heads = q.shape[1], cache_v.shape[0]
    if n_heads % n_kv_heads:
        raise UsageError(f"{op}: {n_heads} query heads cannot share {n_kv_heads} key/value heads")


def kv_write(self, cache_k, cache_v, k, v, positions):
    """Store key and value rows at their positions' slots; as ``ops.cpu.kv_write``.

    Parameters
    ----------
    cache_k, cache_v : array
        From :func:`kv_cache`; their dtype decides the rounding.
    k, v : array of shape (M, Hkv, D), float32
    positions : array of shape (M,), int32
        Slots of one call must differ. A negative position is not stored.
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
    self.start("kv_write", (_kv_bits(cache_k),), "kv_write", (-(-n_kv_heads * d // 128), m), (128,),
               (cache_k, cache_v, k, Long(k.strides[0] // 4), v, Long(v.strides[0] // 4), positions,
                n_kv_heads, d, capacity))


def attention(self, out, q, cache_k, cache_v, positions, window, scale, softcap):
    """Softmax attention of every query row over the cached keys it may see.

    The row at position p sees positions max(0, p - window + 1) .. p, or 0 .. p for window 0. Order
    and bits as ``ops.cpu.attention``.

    Parameters
    ----------
    out, q : array of shape (M, H, D), float32
    cache_k, cache_v : array
        From :func:`kv_cache`, with the rows of this call already written.
    positions : array of shape (M,), int32
    window : int
    scale : float
        Factor on the product of query and key.
    softcap : float
        0 for none.
    """
    m, n_heads, d = q.shape
    _check_queries("attention", out, q, cache_v)
    check_rows("attention", "positions", positions, np.int32)
    check_shape("attention", "positions", positions, (m,))
    n_kv_heads = cache_v.shape[0]
    capacity = _check_caches("attention", cache_k, cache_v, n_kv_heads, d)
    if window < 0 or softcap < 0.0:
        raise UsageError(f"attention: window {window} and softcap {softcap} must not be negative")
    if m == 0:
        return
    defines = f"HEAD_DIM={d}", _kv_bits(cache_k)
    q_stride, out_stride = Long(q.strides[0] // 4), Long(out.strides[0] // 4)
    rest = m, n_heads, capacity, window, float(scale), float(softcap)
    if m > SPLIT_ROWS:
        pairs = 64 if d <= 128 else 32  # PAIRS in attention_prefill.cu
        self.start("attention_prefill", defines, "attention_prefill",
                   (-(-m * (n_heads // n_kv_heads) // pairs), n_kv_heads), (_BLOCK,),
                   (out, out_stride, q, q_stride, cache_k, cache_v, positions, *rest))
        return
    slots = capacity // CHUNK + 1
    (records,) = self.workspace(((m, n_heads, slots, d + RECORD_EXTRA), np.float32))
    self.start("attention", defines, "attention_chunks", (slots, n_kv_heads), (_BLOCK,),
               (q, q_stride, cache_k, cache_v, positions, records, *rest))
    self.start("attention", defines, "attention_merge", (n_heads, m), (d,),
               (out, out_stride, records, positions, slots, capacity, window))


def attention_span(
    self, out, q, cache_k, cache_v, sink_k, sink_v, ranges, n_sink, scale, softcap
):
    """Softmax attention of every query row over pinned rows and its own span of positions.

    Row r sees the pinned positions 0 .. n_sink - 1, and of its span [lo, hi) what is not pinned.
    Order and bits as ``ops.cpu.attention_span``.

    Parameters
    ----------
    out, q : array of shape (M, H, D), float32
    cache_k, cache_v : array
        From ``kv_cache``: position p in slot p % capacity.
    sink_k, sink_v : array or None
        From ``kv_cache``, same dtype: position p in slot p. None: nothing is pinned.
    ranges : array of shape (M, 2), int32
        lo and hi of every row, absolute positions.
    n_sink : array of shape (1,), int32, or None
        Pinned rows that exist; None together with ``sink_k``.
    scale : float
        Factor on the product of query and key.
    softcap : float
        0 for none.
    """
    op = "attention_span"
    m, n_heads, d = q.shape
    _check_queries(op, out, q, cache_v)
    check_rows(op, "ranges", ranges, np.int32)
    check_shape(op, "ranges", ranges, (m, 2))
    n_kv_heads = cache_v.shape[0]
    capacity = _check_caches(op, cache_k, cache_v, n_kv_heads, d)
    if softcap < 0.0:
        raise UsageError(f"{op}: softcap {softcap} must not be negative")
    sink_capacity = _check_sink(op, sink_k, sink_v, n_sink, cache_k, (n_kv_heads, d))
    if m == 0:
        return
    defines = f"HEAD_DIM={d}", _kv_bits(cache_k)
    slots = capacity // CHUNK + 1 + sink_capacity // CHUNK
    (records,) = self.workspace(((m, n_heads, slots, d + RECORD_EXTRA), np.float32))
    self.start(op, defines, "span_chunks", (slots, n_kv_heads), (_BLOCK,),
               (q, Long(q.strides[0] // 4), cache_k, cache_v, sink_k, sink_v, ranges, n_sink,
                records, m, n_heads, capacity, sink_capacity, float(scale), float(softcap)))
    self.start(op, defines, "span_merge", (n_heads, m), (d,),
               (out, Long(out.strides[0] // 4), records, ranges, n_sink, slots, capacity,
                sink_capacity))


def _check_sink(op, sink_k, sink_v, n_sink, cache_k, shape):
    """Capacity of the sink: none or all three of its arrays are given."""
    given = [array for array in (sink_k, sink_v, n_sink) if array is not None]
    if not given:
        return 0
    if len(given) != 3:
        raise UsageError(f"{op}: sink_k, sink_v and n_sink come together or not at all")
    if sink_k.dtype != cache_k.dtype:
        raise UsageError(f"{op}: the sink is {sink_k.dtype}, the cache {cache_k.dtype}")
    check_rows(op, "n_sink", n_sink, np.int32)
    check_shape(op, "n_sink", n_sink, (1,))
    return _check_caches(op, sink_k, sink_v, *shape)
