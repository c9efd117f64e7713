"""Attention over explicit spans of positions, with pinned first rows: the op-level function."""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.attend import _block_size, _check_caches, row_shares
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit


def attention_span(
    out, q, cache_k, cache_v, sink_k, sink_v, ranges, n_sink, scale, softcap
):
    """Softmax attention of every query row over pinned rows and its own span of positions.

    Row r sees the pinned positions 0 .. n_sink - 1, and of its span [lo, hi) what is not pinned:
    max(lo, n_sink) .. hi - 1. The span may reach past the row itself.

    Parameters
    ----------
    out, q : ndarray of shape (M, H, D), float32
    cache_k, cache_v : ndarray
        From ``kv_cache``: position p in slot p % capacity.
    sink_k, sink_v : ndarray or None
        From ``kv_cache``, same dtype: position p in slot p. None: nothing is pinned.
    ranges : ndarray of shape (M, 2), int32
        lo and hi of every row, absolute positions.
    n_sink : ndarray of shape (1,), int32, or None
        Pinned rows that exist; None together with ``sink_k``.
    scale : float
        Factor on the product of query and key.
    softcap : float
        0 for none.

    Notes
    -----
    Scores, chunks and merging as in ``attention``. Order: the chunks [128 c, 128 c + 127] of the
    pinned positions in ascending order, then those of the others; a chunk that holds positions of
    both kinds is merged twice, first its pinned part. So the bits depend on n_sink, lo, hi and
    absolute positions alone, never on a capacity or on what lies in unseen slots. NaN rows: an
    empty row, lo < 0, more positions than the cache holds, n_sink outside the sink.
    """
    m, n_heads, d = q.shape
    op = "attention_span"
    check_rows(op, "q", q)
    check_rows(op, "out", out)
    check_shape(op, "out", out, q.shape)
    check_rows(op, "ranges", ranges, np.int32)
    check_shape(op, "ranges", ranges, (m, 2))
    n_kv_heads = cache_v.shape[0]
    capacity = _check_caches(op, cache_k, cache_v, n_kv_heads, d)
    if n_heads % n_kv_heads:
        raise UsageError(f"{op}: {n_heads} query heads cannot share {n_kv_heads} key/value heads")
    if softcap < 0.0:
        raise UsageError(f"{op}: softcap {softcap} must not be negative")
    sinks, sink_capacity = _check_sink(op, sink_k, sink_v, n_sink, cache_k, (n_kv_heads, d))
    if m == 0:
        return
    group = n_heads // n_kv_heads
    block = _block_size(m * group)
    shares = row_shares(m, group, block)
    kv = "f16" if cache_k.dtype == np.float16 else "f32"

    def build():
        from cudflash.ops.cpu.attend_span_kernel import build_span

        return build_span(kv, d, block)

    submit(jit.register(f"attention_span_{kv}_d{d}_b{block}", build),
           [out, stride(out), q, stride(q), cache_k, cache_v, *(sinks or (0, 0, 0)), ranges,
            m, n_heads, n_kv_heads, capacity, sink_capacity, float(scale), float(softcap), shares],
           reads=[extent(q), cache_k, cache_v, ranges, *sinks], writes=[extent(out)],
           rows=shares, by_rows=[q, out])


def _check_sink(op, sink_k, sink_v, n_sink, cache_k, shape):
    """The sink's arrays, none or all three, and its capacity."""
    given = [array for array in (sink_k, sink_v, n_sink) if array is not None]
    if not given:
        return (), 0
    if len(given) != 3:
        raise UsageError(f"{op}: sink_k, sink_v and n_sink come together or not at all")
    if sink_k.dtype != cache_k.dtype:
        raise UsageError(f"{op}: the sink is {sink_k.dtype}, the cache {cache_k.dtype}")
    check_rows(op, "n_sink", n_sink, np.int32)
    check_shape(op, "n_sink", n_sink, (1,))
    return (sink_k, sink_v, n_sink), _check_caches(op, sink_k, sink_v, *shape)
