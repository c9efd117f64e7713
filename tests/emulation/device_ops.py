"""Launches of the shipped kernels in emulation: grids, scratch, outputs poisoned with NaNs.

Each function mirrors an op of ``cudflash.ops.cpu`` on NumPy arrays. ``how`` goes to the launch:
``schedule`` and ``seed``; ``mode`` picks the checking build.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from cudflash.ops.cpu.formats import FORMATS, n_slices
from tests.emulation.host_module import KERNELS, HostModule, aligned, to_device

# bytes of a tile of 32 x 32 or 16 x 256 values; common/formats32.cuh and formats256.cuh
TILE_BYTES = {"Q4_0": 576, "Q4_1": 640, "Q5_0": 704, "Q5_1": 768, "Q8_0": 1088, "IQ4_NL": 576,
              "Q2_K": 1344, "Q3_K": 1792, "Q4_K": 2304, "Q5_K": 2816, "Q6_K": 3360, "IQ4_XS": 2176}


@cache
def module(name, *defines, mode="fast"):
    """One build of ``raw_kernels/<name>.cu``."""
    return HostModule(KERNELS / f"{name}.cu", defines, mode)


def kernel(name, *defines, mode="fast"):
    """The kernel of the same name as its file."""
    return module(name, *defines, mode=mode).get_function(name)


@dataclass(frozen=True)
class Tiles:
    """A packed matrix in the card's order."""

    type: str
    n: int
    k: int
    data: np.ndarray

    @property
    def layout(self):
        """Form of activations this matrix multiplies."""
        return FORMATS[self.type].layout


def retile(raw, name, k, *, mode="fast", **how):
    """Tiles of raw rows (n, row_bytes)."""
    fmt, n = FORMATS[name], len(raw)
    rows = 32 if fmt.layout == "q32" else 16
    units, tiles = k // fmt.block, -(-n // rows)
    data = aligned((tiles, units, TILE_BYTES[name] // 4), np.uint32)
    run = kernel("retile", f"FORMAT={name}", f"TILE_ROWS={rows}", mode=mode)
    raw = to_device(raw)
    run((units, tiles), (128,), (raw, np.int64(raw.shape[1]), data, np.int32(n)), **how)
    return Tiles(name, n, k, data)


def quantize(x, layout, activations, token_tiles, *, mode="fast", **how):
    """Arrays of ``quantize_q32`` or ``quantize_q256``, by name."""
    m, k = x.shape
    planes, tokens = {"int8": 1, "int8x2": 2}[activations], 8 * token_tiles
    groups, unit = -(-m // tokens), 32 if layout == "q32" else 256
    xq = {"codes": aligned((groups, k // 32, token_tiles, 32, 2 * planes), np.uint32),
          "d": aligned((groups, k // unit, tokens), np.float32)}
    if layout == "q32":
        xq["start"] = aligned((groups, k // 32, tokens), np.int32)
        xq["sum"] = aligned((groups, k // 32, tokens), np.float32)
    else:
        xq["exponents"] = aligned((groups, k // 256, tokens), np.uint16)
        xq["sums"] = aligned((groups, k // 256, token_tiles, 32, 2 * planes), np.uint32)
    run = kernel(f"quantize_{layout}", f"PLANES={planes}", f"TOKEN_TILES={token_tiles}", mode=mode)
    x = to_device(x)
    run((-(-k // 1024), groups * tokens), (128,),
        (x, np.int64(k), *xq.values(), np.int32(m), np.int32(k)), **how)
    return xq


def matmul(x, w, activations, token_tiles=1, row_tiles=2, row_groups=1, *, mode="fast", **how):
    """Product of float rows and tiles, quantised first; (m, n) float32."""
    m = len(x)
    xq = quantize(x, w.layout, activations, token_tiles, mode=mode, **how)
    planes = {"int8": 1, "int8x2": 2}[activations]
    defines = [f"FORMAT={w.type}", f"PLANES={planes}", f"TOKEN_TILES={token_tiles}",
               f"ROW_GROUPS={row_groups}", f"SLICES={n_slices(w.k)}"]
    rows = 32 * row_groups
    if w.layout == "q256":
        defines.append(f"ROW_TILES={row_tiles}")
        rows = 16 * row_tiles * row_groups
    out = aligned((m, w.n), np.float32)
    run = kernel(f"matmul_{w.layout}", *defines, mode=mode)
    run((-(-w.n // rows), -(-m // (8 * token_tiles))), (256 * row_groups,),
        (out, np.int64(w.n), w.data, *xq.values(), np.int32(m), np.int32(w.n), np.int32(w.k)),
        **how)
    return out


def prefill(x, w, activations, token_tiles=4, row_tiles=1, row_groups=4, *, mode="fast", **how):
    """The product of :func:`matmul` by the kernels for many tokens."""
    m = len(x)
    xq = quantize(x, w.layout, activations, token_tiles, mode=mode, **how)
    planes = {"int8": 1, "int8x2": 2}[activations]
    defines = [f"FORMAT={w.type}", f"PLANES={planes}", f"TOKEN_TILES={token_tiles}",
               f"ROW_GROUPS={row_groups}", f"SLICES={n_slices(w.k)}"]
    rows = 32 * row_groups
    if w.layout == "q256":
        defines.append(f"ROW_TILES={row_tiles}")
        rows = 16 * row_tiles * row_groups
    out = aligned((m, w.n), np.float32)
    run = kernel(f"prefill_{w.layout}", *defines, mode=mode)
    run((-(-w.n // rows), -(-m // (8 * token_tiles))), (32 * row_groups,),
        (out, np.int64(w.n), w.data, *xq.values(), np.int32(m), np.int32(w.n), np.int32(w.k)),
        **how)
    return out


def matmul_float(x, raw, name, tokens, *, mode="fast", **how):
    """Product of float rows and a matrix of F32, F16 or BF16 rows (n, row_bytes)."""
    m, k = x.shape
    size = FORMATS[name].block_bytes
    bits, per_step = {2: np.uint16, 4: np.uint32}[size], 16 // size
    raw = to_device(np.ascontiguousarray(raw).view(bits))
    n, steps, tiles = len(raw), -(-k // per_step), -(-len(raw) // 32)
    defines = [f"FORMAT={name}", f"TOKENS={tokens}", f"SLICES={n_slices(k)}"]
    built = module("matmul_float", *defines, mode=mode)
    data = aligned((tiles, steps, 32, per_step), bits)
    built.get_function("retile_float")((steps, tiles), (32 * per_step,),
                                       (raw, data, np.int32(n), np.int32(k)), **how)
    out = aligned((m, n), np.float32)
    built.get_function("matmul_float")(
        (tiles, -(-m // tokens)), (256,),
        (out, np.int64(n), data, to_device(x), np.int64(k), np.int32(m), np.int32(n), np.int32(k)),
        **how)
    return out


def rms_norm(x, weight, eps, *, mode="fast", **how):
    """RMS norm of the rows of x."""
    n_rows, d = x.shape
    out, built = aligned(x.shape, np.float32), module("rms_norm", mode=mode)
    head = (out, np.int64(d), to_device(x), np.int64(d),
            None if weight is None else to_device(weight))
    if d <= 256:
        built.get_function("rms_norm_short")(
            (-(-n_rows // 8),), (256,), (*head, np.int32(n_rows), np.int32(d), np.float32(eps)),
            **how)
    else:
        built.get_function("rms_norm_long")(
            (n_rows,), (256,), (*head, np.int32(d), np.float32(eps)), **how)
    return out


def rope(x, positions, table, style, n_dims, *, mode="fast", **how):
    """Rotated copy of x (M, H, D)."""
    m, n_heads, d = x.shape
    out = to_device(x)
    run = kernel("rope", f"SPLIT_HALF={int(style == 'split_half')}", mode=mode)
    run((-(-n_heads * n_dims // 2 // 128), m), (128,),
        (out, np.int64(n_heads * d), to_device(positions), to_device(table), np.int32(len(table)),
         np.int32(n_heads), np.int32(d), np.int32(n_dims)), **how)
    return out


def elementwise(name, x, y=None, number=0.0, *, mode="fast", **how):
    """One of the kernels of elementwise.cu on (M, N) rows."""
    m, n = x.shape
    out = aligned(x.shape, np.float32)
    y_stride = 0 if y is None or y.ndim == 1 else n
    module("elementwise", mode=mode).get_function(f"{name}_rows")(
        (-(-n // 256), m), (256,),
        (out, np.int64(n), to_device(x), np.int64(n), None if y is None else to_device(y),
         np.int64(y_stride), np.int32(n), np.float32(number)), **how)
    return out


def kv_write(cache_k, cache_v, k, v, positions, *, mode="fast", **how):
    """Store rows (M, Hkv, D) in caches made by :func:`to_device`."""
    m, n_kv_heads, d = k.shape
    run = kernel("kv_write", f"KV_BITS={8 * cache_k.itemsize}", mode=mode)
    stride = np.int64(n_kv_heads * d)
    run((-(-n_kv_heads * d // 128), m), (128,),
        (_bits(cache_k), _bits(cache_v), to_device(k), stride, to_device(v), stride,
         to_device(positions), np.int32(n_kv_heads), np.int32(d), np.int32(cache_v.shape[1])),
        **how)


def _bits(cache):
    return cache.view(np.uint16) if cache.dtype == np.float16 else cache


def attention(q, cache_k, cache_v, positions, window, scale, softcap, *, threads=256, mode="fast",
              **how):
    """Attention of q (M, H, D) over caches on the device."""
    m, n_heads, d = q.shape
    n_kv_heads, capacity = cache_v.shape[:2]
    slots = capacity // 128 + 1
    built = module("attention", f"HEAD_DIM={d}", f"KV_BITS={8 * cache_k.itemsize}", mode=mode)
    records, out = aligned((m, n_heads, slots, d + 4), np.float32), aligned(q.shape, np.float32)
    positions, stride = to_device(positions), np.int64(n_heads * d)
    built.get_function("attention_chunks")(
        (slots, n_kv_heads), (threads,),
        (to_device(q), stride, _bits(cache_k), _bits(cache_v), positions, records, np.int32(m),
         np.int32(n_heads), np.int32(capacity), np.int32(window), np.float32(scale),
         np.float32(softcap)), **how)
    built.get_function("attention_merge")(
        (n_heads, m), (d,), (out, stride, records, positions, np.int32(slots), np.int32(capacity),
                             np.int32(window)), **how)
    return out


def argmax(logits, *, mode="fast", **how):
    """Ids of the largest logits."""
    m, n = logits.shape
    spans = -(-n // 8192)
    built = module("argmax", mode=mode)
    values, ids = aligned((m, spans), np.float32), aligned((m, spans), np.int32)
    out = aligned((m,), np.int32)
    built.get_function("argmax_spans")(
        (spans, m), (256,), (to_device(logits), np.int64(n), values, ids, np.int32(n)), **how)
    built.get_function("argmax_merge")((m,), (32,), (values, ids, out, np.int32(spans)), **how)
    return out


def embed_rows(raw, name, k, ids, scale, *, mode="fast", **how):
    """Expanded rows of a packed table."""
    out = aligned((len(ids), k), np.float32)
    raw = to_device(raw)
    kernel("embed_rows", f"FORMAT={name}", mode=mode)(
        (-(-k // 256), len(ids)), (256,),
        (out, np.int64(k), raw, np.int64(raw.shape[1]), np.int32(len(raw)), to_device(ids),
         np.int32(k), np.float32(scale)), **how)
    return out


def attention_prefill(q, cache_k, cache_v, positions, window, scale, softcap, *, mode="fast",
                      **how):
    """Attention of many rows q (M, H, D) over caches on the device."""
    m, n_heads, d = q.shape
    n_kv_heads, capacity = cache_v.shape[:2]
    out, stride = aligned(q.shape, np.float32), np.int64(n_heads * d)
    pairs = 64 if d <= 128 else 32
    kernel("attention_prefill", f"HEAD_DIM={d}", f"KV_BITS={8 * cache_k.itemsize}", mode=mode)(
        (-(-m * (n_heads // n_kv_heads) // pairs), n_kv_heads), (256,),
        (out, stride, to_device(q), stride, _bits(cache_k), _bits(cache_v), to_device(positions),
         np.int32(m), np.int32(n_heads), np.int32(capacity), np.int32(window), np.float32(scale),
         np.float32(softcap)), **how)
    return out


def attention_span(q, cache, sink, ranges, n_sink, scale, softcap, *, threads=256, mode="fast",
                   **how):
    """Attention of q (M, H, D) over pinned rows and spans; ``sink`` is a pair of caches or None."""
    m, n_heads, d = q.shape
    n_kv_heads, capacity = cache[1].shape[:2]
    pinned = 0 if sink is None else sink[1].shape[1]
    slots = capacity // 128 + 1 + pinned // 128
    built = module("attention_span", f"HEAD_DIM={d}", f"KV_BITS={8 * cache[0].itemsize}", mode=mode)
    records, out = aligned((m, n_heads, slots, d + 4), np.float32), aligned(q.shape, np.float32)
    ranges, stride = to_device(np.asarray(ranges, np.int32)), np.int64(n_heads * d)
    count = None if sink is None else to_device(np.array([n_sink], np.int32))
    sinks = (None, None) if sink is None else map(_bits, sink)
    built.get_function("span_chunks")(
        (slots, n_kv_heads), (threads,),
        (to_device(q), stride, *map(_bits, cache), *sinks, ranges, count, records, np.int32(m),
         np.int32(n_heads), np.int32(capacity), np.int32(pinned), np.float32(scale),
         np.float32(softcap)), **how)
    built.get_function("span_merge")(
        (n_heads, m), (d,), (out, stride, records, ranges, count, np.int32(slots),
                             np.int32(capacity), np.int32(pinned)), **how)
    return out


def dynamic_conv(x, dyn, base, side, group, *, mode="fast", **how):
    """Convolved rows of x (B, C)."""
    (n_rows, width), n_taps = x.shape, base.shape[1]
    out = aligned(x.shape, np.float32)
    kernel("dynamic_conv", mode=mode)(
        (-(-width // 256), n_rows), (256,),
        (out, np.int64(width), to_device(x), np.int64(width), to_device(dyn),
         np.int64(dyn.shape[1]), to_device(base), np.int32(width), np.int32(n_taps),
         np.int32(side * n_taps), np.int32(group)), **how)
    return out


def selector_lattice(succ, pred, gate, unary, *, mode="fast", **how):
    """Scores (T, K, K) of all pairs of candidates."""
    n_rows, k, rank = succ.shape
    out = aligned((n_rows, k, k), np.float32)
    module("selector", mode=mode).get_function("selector_lattice")(
        (k, n_rows), (256,),
        (out, *map(to_device, (succ, pred, gate, unary)), np.int32(k), np.int32(rank)), **how)
    return out


def selector_walk(lattice, candidate_ids, *, mode="fast", **how):
    """(tokens, index, scores, confidence) of the greedy walk."""
    n_rows, k = candidate_ids.shape
    outputs = [aligned((n_rows,), dtype) for dtype in (np.int32, np.int32, np.float32, np.float32)]
    module("selector", mode=mode).get_function("selector_walk")(
        (1,), (32,), (*outputs, to_device(lattice), to_device(candidate_ids), np.int32(n_rows),
                      np.int32(k)), **how)
    return outputs


def top_k(logits, k, *, mode="fast", **how):
    """(ids, values) of the k largest logits of every row."""
    m, n = logits.shape
    spans, kept = -(-n // 4096), min(k, 4096)
    built = module("top_k", mode=mode)
    values, ids = aligned((m, spans, kept), np.float32), aligned((m, spans, kept), np.int32)
    built.get_function("top_k_spans")(
        (spans, m), (256,), (to_device(logits), np.int64(n), values, ids, np.int32(n), np.int32(k)),
        **how)
    out_ids, out_values = aligned((m, k), np.int32), aligned((m, k), np.float32)
    built.get_function("top_k_merge")(
        (m,), (32,), (out_ids, np.int64(k), out_values, np.int64(k), values, ids, np.int32(spans),
                      np.int32(k)), **how)
    return out_ids, out_values


def check_finite(x, *, mode="fast", **how):
    """1 if all of x (M, N) is finite, else 0."""
    m, n = x.shape
    spans = -(-n // 8192)
    built = module("check_finite", mode=mode)
    parts, flag = aligned((m * spans,), np.int32), aligned((1,), np.int32)
    if x.size:
        built.get_function("finite_spans")(
            (spans, m), (256,), (to_device(x), np.int64(n), parts, np.int32(n)), **how)
    built.get_function("finite_merge")((1,), (256,), (flag, parts, np.int32(m * spans)), **how)
    return int(flag[0])


def accept_greedy(drafts, best, finite, stop_ids, *, mode="fast", **how):
    """(finite, accepted, end, tokens) of a verified block."""
    n = len(drafts)
    outcome = aligned((5 + n,), np.int32)
    stops = to_device(np.array([-1, *sorted(stop_ids)], np.int32))
    module("accept", mode=mode).get_function("accept_greedy")(
        (1,), (32,), (outcome, to_device(np.array(drafts, np.int32)),
                      to_device(np.array(best, np.int32)), to_device(np.array([finite], np.int32)),
                      stops, np.int32(n), np.int32(len(stops))), **how)
    head, tokens = outcome[:4].tolist(), outcome[4:4 + outcome[2]].tolist()
    return head[0], head[1], head[3], tokens
