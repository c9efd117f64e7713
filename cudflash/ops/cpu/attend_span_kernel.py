"""Kernel of ``attention_span``; the order is in ``attend_span.attention_span``."""

import numpy as np

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu.attend_kernel import (
    CHUNK,
    _chunk_function,
    _finish_function,
    _merge_function,
    _ranges_function,
    _start_function,
)

# Argument block, 8 bytes each: out, out_stride, q, q_stride, cache_k, cache_v, sink_k, sink_v,
# n_sink (addresses, 0 without a sink), ranges, m, n_heads, n_kv_heads, capacity, sink_capacity,
# scale, softcap, row_shares.


def _load_block_function(d, block):
    """Compiled helper: queries and unpinned visible positions of one block of pairs."""
    from numba import njit

    @njit(inline="always")
    def load_block(q0, q_stride, spans, m, group, h, pair0, pinned, capacity, q, bounds, sound):
        """Fill q (block, d), bounds (block, 2) and sound (block,); returns chunks [first, last).

        A pair whose row cannot be served, or that pads the block, gets empty bounds and sound 0.
        """
        first, last = np.int64(1) << 40, np.int64(0)
        for i in range(block):
            pair = pair0 + i
            lo, hi, fit = np.int64(0), np.int64(0), np.int64(0)
            if pair < m * group:
                r = pair // group
                source = q0 + r * q_stride + 4 * d * (h * group + pair % group)
                for j in range(0, 4 * d, 64):
                    S.store_f32(q + 4 * d * i + j, S.load_f32(source + j))
                least = np.int64(S.peek_i32(spans + 8 * r))
                lo, hi = max(least, pinned), np.int64(S.peek_i32(spans + 8 * r + 4))
                if least >= 0 and hi - lo <= capacity:
                    fit = np.int64(1)
                if fit == 0 or hi <= lo:
                    lo, hi = np.int64(0), np.int64(0)
                else:
                    first, last = min(first, lo // CHUNK), max(last, (hi - 1) // CHUNK + 1)
            S.poke_i64(bounds + 16 * i, lo)
            S.poke_i64(bounds + 16 * i + 8, hi)
            S.poke_i64(sound + 8 * i, fit)
        return first, last

    return load_block


def build_span(kv, d, block):
    """Python function of the kernel ``attention_span_<kv>_d<d>_b<block>``."""
    from numba import njit

    size = 2 if kv == "f16" else 4
    chunk, merge, start = _chunk_function(kv, d, block), _merge_function(d), _start_function(d)
    finish, load_block = _finish_function(d), _load_block_function(d, block)
    chunk_ranges = _ranges_function(block)
    f32 = np.float32
    tile, tile2, tile3 = (S.stack(4 * d * block) for _ in range(3))
    score_slot, small = S.stack(4 * CHUNK * block), S.stack(64 * block)

    @njit(inline="always")
    def merge_all(ranges, m_l, acc, m_l_c, acc_c):
        """Fold one chunk's results into those of the pairs that see a key of it."""
        for i in range(block):
            if S.peek_i64(ranges + 16 * i) < S.peek_i64(ranges + 16 * i + 8):
                merge(m_l + 8 * i, acc + 4 * d * i, m_l_c + 8 * i, acc_c + 4 * d * i)

    def attention_span(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        q0, q_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        cache_k, cache_v = S.peek_i64(args + 32), S.peek_i64(args + 40)
        sink_k, sink_v = S.peek_i64(args + 48), S.peek_i64(args + 56)
        n_sink, spans = S.peek_i64(args + 64), S.peek_i64(args + 72)
        m, n_heads, n_kv = S.peek_i64(args + 80), S.peek_i64(args + 88), S.peek_i64(args + 96)
        capacity, sink_capacity = S.peek_i64(args + 104), S.peek_i64(args + 112)
        scale, cap = f32(S.peek_f64(args + 120)), f32(S.peek_f64(args + 128))
        row_shares = S.peek_i64(args + 136)
        pinned = np.int64(S.peek_i32(n_sink)) if n_sink != 0 else np.int64(0)
        # a sink of another size than stated makes every row NaN: no range fits into -1 slots
        room = capacity
        if pinned < 0 or pinned > sink_capacity:
            pinned, room = np.int64(0), np.int64(-1) << 40
        group = n_heads // n_kv
        n_blocks = (m * group + block - 1) // block
        q, acc_c, acc = tile(), tile2(), tile3()
        scores, bounds = score_slot(), small()
        ranges, m_l_c, m_l = bounds + 16 * block, bounds + 32 * block, bounds + 40 * block
        sound = bounds + 48 * block
        own, base, start_at, step = n_blocks, np.int64(0), tid, n_threads
        if row_shares > 0 and row_shares % n_threads == 0:  # as ``program.Op.placed`` decides
            own, start_at, step = n_blocks // n_threads, np.int64(0), np.int64(1)
            base = own * tid
        for item in range(start_at, n_kv * own, step):
            h, pair0 = item // own, (base + item % own) * block
            first, last = load_block(q0, q_stride, spans, m, group, h, pair0, pinned, room, q,
                                     bounds, sound)
            for i in range(block):
                start(m_l + 8 * i, acc + 4 * d * i)
            for c in range((pinned + CHUNK - 1) // CHUNK):
                for i in range(block):
                    seen = min(pinned - CHUNK * c, CHUNK) * S.peek_i64(sound + 8 * i)
                    S.poke_i64(ranges + 16 * i, np.int64(0))
                    S.poke_i64(ranges + 16 * i + 8, seen)
                slot = h * sink_capacity + CHUNK * c
                chunk(q, sink_k + size * d * slot, sink_v + size * d * slot, ranges, scores,
                      m_l_c, acc_c, scale, cap)
                merge_all(ranges, m_l, acc, m_l_c, acc_c)
            for c in range(first, last):
                chunk_ranges(bounds, c, ranges)
                slot = h * capacity + CHUNK * c % capacity
                chunk(q, cache_k + size * d * slot, cache_v + size * d * slot, ranges, scores,
                      m_l_c, acc_c, scale, cap)
                merge_all(ranges, m_l, acc, m_l_c, acc_c)
            for i in range(min(block, m * group - pair0)):
                pair = pair0 + i
                finish(out0 + pair // group * out_stride + 4 * d * (h * group + pair % group),
                       m_l + 8 * i, acc + 4 * d * i)

    return attention_span
