"""Kernels of ``kv_write`` and ``attention``; the order is in ``attend.attention``.

One block is R (row, head) pairs of one key/value head. Scores and weighted sums are the same outer
product: R broadcast floats times C vectors of 16 keys (scores) or 16 head dimensions (sums), R * C
accumulators in registers, so keys and values are loaded and converted once per block.
"""

import numpy as np
from llvmlite import ir
from numba import types

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu import special_kernel as F

CHUNK = 128
# Blocks of pairs that visit a chunk together in ``attention_blocks``.
_BLOCKS = 4

# Argument block of the attention kernels, 8 bytes each: out, out_stride, q, q_stride, cache_k,
# cache_v, positions, m, n_heads, n_kv_heads, capacity, window, scale, softcap, workspace, slots.


def build_kv_write(kv):
    """Python function of the kernel ``kv_write_<kv>``.

    ``args`` is ``[cache_k, cache_v, k, k_stride, v, v_stride, positions, m, n_kv_heads, d,
    capacity]``.
    """
    from numba import njit

    half = kv == "f16"
    size = 2 if half else 4

    @njit(inline="always")
    def put(address, value):
        if half:
            S.poke_f16(address, value)
        else:
            S.poke_i32(address, S.bits_f32(value))

    @njit(inline="always")
    def put16(address, values):
        if half:
            S.store_f16(address, values)
        else:
            S.store_i32(address, S.vbits_f32(values))

    def kv_write(args, tid, n_threads):
        cache_k, cache_v = S.peek_i64(args), S.peek_i64(args + 8)
        k0, k_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        v0, v_stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        positions = S.peek_i64(args + 48)
        m, n_kv, d, capacity = (S.peek_i64(args + 56), S.peek_i64(args + 64),
                                S.peek_i64(args + 72), S.peek_i64(args + 80))
        # by heads first: neighbouring positions of one share cache lines
        for i in range(m * n_kv * tid // n_threads, m * n_kv * (tid + 1) // n_threads):
            h, r = i // m, i % m
            p = np.int64(S.peek_i32(positions + 4 * r))
            if p >= 0:
                slot = p % capacity
                k, v = k0 + r * k_stride + 4 * d * h, v0 + r * v_stride + 4 * d * h
                to_k = cache_k + size * (((h * capacity + slot) // 16 * d) * 16 + slot % 16)
                to_v = cache_v + size * d * (h * capacity + slot)
                for j in range(d):
                    put(to_k + 16 * size * j, S.peek_f32(k + 4 * j))
                for j in range(0, d, 16):
                    put16(to_v + size * j, S.load_f32(v + 4 * j))

    return kv_write


def outer(rows, vectors, half, from_zero, within=False):
    """Intrinsic: ``acc[r][c] = fma(w[i][c], x[r][i], acc[r][c])`` for i = 0 .. n - 1 in order.

    Arguments: n, x, x_stride (bytes between rows of x), w, w_step (bytes from i to i + 1),
    w_stride (bytes between the vectors c), acc, acc_stride. ``half``: w is float16.
    ``from_zero``: start from zeros instead of what ``acc`` holds. ``within``: two more arguments,
    ranges and first; row r takes those i alone of which first + i lies in [lo, hi), int64 each at
    ranges + 16 r.
    """
    raw = ir.VectorType(S.I16, 16) if half else S.V16F
    i64 = types.int64
    zero = S.const_splat(S.F32, 0.0, 16)

    def widen(b, v):
        return b.fpext(b.bitcast(v, ir.VectorType(ir.HalfType(), 16)), S.V16F) if half else v

    def edges(b, ranges):
        """lo and hi of every row."""
        return [[S.load(b, S.offset(b, ranges, 16 * r + 8 * side), S.I64) for side in (0, 1)]
                for r in range(rows)]

    def emit(b, n, x, x_stride, w, w_step, w_stride, acc, acc_stride, ranges=None, first=None):
        bounds = edges(b, ranges) if within else None
        tiles = [(r, c) for r in range(rows) for c in range(vectors)]
        at = {(r, c): S.offset(b, b.add(acc, b.mul(acc_stride, ir.Constant(S.I64, r))), 64 * c)
              for r, c in tiles}
        start = [zero if from_zero else S.load(b, at[t], S.V16F) for t in tiles]
        x_rows = [b.add(x, b.mul(x_stride, ir.Constant(S.I64, r))) for r in range(rows)]
        w_columns = [b.mul(w_stride, ir.Constant(S.I64, c)) for c in range(vectors)]
        before = b.block
        head = b.append_basic_block("outer.head")
        body = b.append_basic_block("outer.body")
        done = b.append_basic_block("outer.done")
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(S.I64)
        i.add_incoming(ir.Constant(S.I64, 0), before)
        w_now = b.phi(S.I64)
        w_now.add_incoming(w, before)
        sums = [b.phi(S.V16F) for _ in tiles]
        for phi, value in zip(sums, start):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", i, n), body, done)
        b.position_at_end(body)
        w_vectors = [widen(b, S.load(b, b.add(w_now, column), raw)) for column in w_columns]
        at_x = b.shl(i, ir.Constant(S.I64, 2))
        for r in range(rows):
            value = S.splat(b, S.load(b, b.add(x_rows[r], at_x), S.F32))
            if within:
                key = b.add(first, i)
                taken = b.and_(b.icmp_signed(">=", key, bounds[r][0]),
                               b.icmp_signed("<", key, bounds[r][1]))
            for c in range(vectors):
                phi = sums[r * vectors + c]
                total = S.vector_fma(b, w_vectors[c], value, phi)
                phi.add_incoming(b.select(taken, total, phi) if within else total, body)
        i.add_incoming(b.add(i, ir.Constant(S.I64, 1)), body)
        w_now.add_incoming(b.add(w_now, w_step), body)
        b.branch(head)
        b.position_at_end(done)
        for t, phi in zip(tiles, sums):
            S.store(b, phi, at[t])

    return S._define("outer", types.none(*[i64] * (10 if within else 8)), emit)


def _chunk_function(kv, d, block):
    """Compiled helper: one chunk for one block of pairs, see its docstring."""
    from numba import njit

    f32 = np.float32
    half = kv == "f16"
    size = 2 if half else 4
    most = 8 if block == 1 else 4 if block <= 4 else 2
    c_k = most
    c_v = next(c for c in (most, 4, 2, 1) if c <= most and d // 16 % c == 0)
    scores_of = outer(block, c_k, half, True)
    scores_of_16 = outer(block, 1, half, True)
    sums_of = outer(block, c_v, half, False)
    sums_within = outer(block, c_v, half, False, within=True)
    minus_inf = f32(-np.inf)

    @njit(inline="always")
    def softmax(scores, lo, hi, scale, cap):
        """Scores to weights in keys lo .. hi - 1 of one pair; returns (m_c, l_c)."""
        wide_scale, wide_cap = S.splat_f32(scale), S.splat_f32(cap)
        least = S.splat_f32(minus_inf)
        top = least
        first = lo // 16 * 16
        for g in range(first, hi, 16):
            s = S.vmul(S.load_f32(scores + 4 * g), wide_scale)
            if cap > f32(0.0):
                s = F.vsoftcap(s, wide_cap)
            s = S.vkeep_range(s, least, np.int32(lo - g), np.int32(hi - g))
            S.store_f32(scores + 4 * g, s)
            top = S.vmax(s, top)
        m_c = S.vmax_tree(top)
        wide_m = S.splat_f32(m_c)
        total = S.splat_f32(f32(0.0))
        for g in range(first, hi, 16):
            p = F.vexp(S.vsub(S.load_f32(scores + 4 * g), wide_m))
            S.store_f32(scores + 4 * g, p)
            total = S.vadd(total, p)
        return m_c, S.vsum_tree(total)

    @njit
    def chunk(q, k, v, ranges, scores, m_l, acc, scale, cap):
        """Partial result of one chunk.

        q (block, d) floats; k, v: the chunk's first key and value; ranges (block, 2) int64: the
        visible keys lo .. hi - 1 of every pair, counted in the chunk, empty if hi <= lo. Writes
        scores (block, 128), m_l (block, 2) and acc (block, d); pairs with an empty range get
        unspecified values.
        """
        # first .. last - 1: keys some pair sees; common .. end - 1: keys every pair sees
        first, last, common, end = CHUNK, 0, 0, CHUNK
        for r in range(block):
            lo, hi = S.peek_i64(ranges + 16 * r), S.peek_i64(ranges + 16 * r + 8)
            if lo < hi:
                first, last = min(first, lo), max(last, hi)
                common, end = max(common, lo), min(end, hi)
        if last == 0:
            return
        if common >= end:
            common, end = last, last
        group = 16 * c_k
        start = 16 if c_k <= 2 else group  # with two vectors no group reaches past the chunk
        for g in range(first // start * start, last, group):
            if last - g <= 16:
                scores_of_16(d, q, 4 * d, k + size * d * g, 16 * size, 16 * size * d,
                             scores + 4 * g, 4 * CHUNK)
            else:
                scores_of(d, q, 4 * d, k + size * d * g, 16 * size, 16 * size * d,
                          scores + 4 * g, 4 * CHUNK)
        for r in range(block):
            lo, hi = S.peek_i64(ranges + 16 * r), S.peek_i64(ranges + 16 * r + 8)
            if lo < hi:
                m_c, l_c = softmax(scores + 4 * CHUNK * r, lo, hi, scale, cap)
                S.poke_f32(m_l + 8 * r, m_c)
                S.poke_f32(m_l + 8 * r + 4, l_c)
        for i in range(0, 4 * d * block, 64):
            S.store_f32(acc + i, S.splat_f32(f32(0.0)))
        row = size * d
        for e in range(0, d, 16 * c_v):
            column, sums = v + size * e, acc + 4 * e
            if first < common:
                sums_within(common - first, scores + 4 * first, 4 * CHUNK, column + row * first,
                            row, 16 * size, sums, 4 * d, ranges, first)
            sums_of(end - common, scores + 4 * common, 4 * CHUNK, column + row * common, row,
                    16 * size, sums, 4 * d)
            if end < last:
                sums_within(last - end, scores + 4 * end, 4 * CHUNK, column + row * end, row,
                            16 * size, sums, 4 * d, ranges, end)

    return chunk


def _merge_function(d):
    """Compiled helper: fold one chunk's (m, l, acc) into a running one."""
    from numba import njit

    f32 = np.float32

    @njit(inline="always")
    def merge(m_l, acc, new_m_l, new_acc):
        m, m_c = S.peek_f32(m_l), S.peek_f32(new_m_l)
        if m == f32(-np.inf) and S.peek_f32(m_l + 4) == f32(0.0):  # the first: a = 0, b = 1
            S.poke_f32(m_l, m_c)
            S.poke_f32(m_l + 4, S.peek_f32(new_m_l + 4))
            zero = S.splat_f32(f32(0.0))
            for i in range(0, 4 * d, 64):  # 0 * 0 + x turns -0 into 0
                S.store_f32(acc + i, S.vadd(S.load_f32(new_acc + i), zero))
            return
        # one of the two differences is 0, and exp(0) is 1
        top, a, b = m_c, f32(1.0), f32(1.0)
        if m > m_c:
            top, b = m, F.exp(m_c - m)
        else:
            a = F.exp(m - m_c)
        S.poke_f32(m_l, top)
        S.poke_f32(m_l + 4, S.fma(S.peek_f32(m_l + 4), a, S.peek_f32(new_m_l + 4) * b))
        wide_a, wide_b = S.splat_f32(a), S.splat_f32(b)
        for i in range(0, 4 * d, 64):
            scaled = S.vmul(S.load_f32(new_acc + i), wide_b)
            S.store_f32(acc + i, S.vfma(S.load_f32(acc + i), wide_a, scaled))

    return merge


def _start_function(d):
    from numba import njit

    f32 = np.float32

    @njit(inline="always")
    def start(m_l, acc):
        """m = -inf, l = 0, acc = 0."""
        S.poke_f32(m_l, f32(-np.inf))
        S.poke_f32(m_l + 4, f32(0.0))
        for i in range(0, 4 * d, 64):
            S.store_f32(acc + i, S.splat_f32(f32(0.0)))

    return start


def _finish_function(d):
    from numba import njit

    @njit(inline="always")
    def finish(out, m_l, acc):
        """out = acc / l."""
        total = S.splat_f32(S.peek_f32(m_l + 4))
        for i in range(0, 4 * d, 64):
            S.store_f32(out + i, S.vdiv(S.load_f32(acc + i), total))

    return finish


def _visible_function():
    from numba import njit

    @njit(inline="always")
    def visible(positions, r, window, capacity):
        """First and one past the last visible position of row r; equal if there is none."""
        p = np.int64(S.peek_i32(positions + 4 * r))
        lo = np.int64(0)
        if window > 0 and p >= window:
            lo = p - window + 1
        if p < 0 or p - lo >= capacity:
            return np.int64(0), np.int64(0)
        return lo, p + 1

    return visible


def _load_block_function(d, block):
    """Compiled helper: queries and visible positions of one block of pairs."""
    from numba import njit

    visible = _visible_function()

    @njit(inline="always")
    def load_block(q0, q_stride, positions, m, group, h, pair0, window, capacity, q, bounds):
        """Fill q (block, d) and bounds (block, 2); returns the chunks [first, last) to visit."""
        first, last = np.int64(1) << 40, np.int64(0)
        for i in range(block):
            pair = pair0 + i
            lo, hi = np.int64(0), np.int64(0)
            if pair < m * group:
                r = pair // group
                source = q0 + r * q_stride + 4 * d * (h * group + pair % group)
                for j in range(0, 4 * d, 64):
                    S.store_f32(q + 4 * d * i + j, S.load_f32(source + j))
                lo, hi = visible(positions, r, window, capacity)
                if lo < hi:
                    first, last = min(first, lo // CHUNK), max(last, (hi - 1) // CHUNK + 1)
            S.poke_i64(bounds + 16 * i, lo)
            S.poke_i64(bounds + 16 * i + 8, hi)
        return first, last

    return load_block


def _ranges_function(block):
    from numba import njit

    @njit(inline="always")
    def chunk_ranges(bounds, c, ranges):
        """Visible keys of every pair inside chunk c."""
        for i in range(block):
            lo = max(S.peek_i64(bounds + 16 * i) - CHUNK * c, np.int64(0))
            hi = min(S.peek_i64(bounds + 16 * i + 8) - CHUNK * c, np.int64(CHUNK))
            S.poke_i64(ranges + 16 * i, lo)
            S.poke_i64(ranges + 16 * i + 8, hi)

    return chunk_ranges


def build_blocks(kv, d, block):
    """Kernel ``attention_blocks``: threads share out groups of up to four blocks of pairs.

    The blocks of a group visit a chunk one after the other, while it is in the first cache.
    """
    size = 2 if kv == "f16" else 4
    chunk, merge, start = _chunk_function(kv, d, block), _merge_function(d), _start_function(d)
    finish, load_block = _finish_function(d), _load_block_function(d, block)
    chunk_ranges = _ranges_function(block)
    f32 = np.float32
    tile_bytes = 4 * d * block
    queries, sums, one_tile = (S.stack(_BLOCKS * tile_bytes), S.stack(_BLOCKS * tile_bytes),
                               S.stack(tile_bytes))
    score_slot, small, states = (S.stack(4 * CHUNK * block), S.stack(24 * block),
                                 S.stack(24 * block * _BLOCKS))

    def attention_blocks(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        q0, q_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        cache_k, cache_v, positions = (S.peek_i64(args + 32), S.peek_i64(args + 40),
                                       S.peek_i64(args + 48))
        m, n_heads, n_kv = S.peek_i64(args + 56), S.peek_i64(args + 64), S.peek_i64(args + 72)
        capacity, window = S.peek_i64(args + 80), S.peek_i64(args + 88)
        scale, cap = f32(S.peek_f64(args + 96)), f32(S.peek_f64(args + 104))
        group = n_heads // n_kv
        n_blocks = (m * group + block - 1) // block
        # Fewer blocks to a group where the threads would otherwise go idle.
        step = max(1, min(_BLOCKS, n_kv * n_blocks // (4 * n_threads)))
        n_groups = (n_blocks + step - 1) // step
        q, acc, acc_c, scores = queries(), sums(), one_tile(), score_slot()
        ranges, bounds = small(), states()
        m_l_c, m_l = ranges + 16 * block, bounds + 16 * block * _BLOCKS
        for item in range(tid, n_kv * n_groups, n_threads):
            h, block0 = item // n_groups, item % n_groups * step
            pair0 = block0 * block
            count = min(step, n_blocks - block0)
            first, last = np.int64(1) << 40, np.int64(0)
            for b in range(count):
                lo, hi = load_block(q0, q_stride, positions, m, group, h, pair0 + b * block,
                                    window, capacity, q + tile_bytes * b, bounds + 16 * block * b)
                first, last = min(first, lo), max(last, hi)
            for i in range(count * block):
                start(m_l + 8 * i, acc + 4 * d * i)
            for c in range(first, last):
                slot = h * capacity + CHUNK * c % capacity
                for b in range(count):
                    chunk_ranges(bounds + 16 * block * b, c, ranges)
                    chunk(q + tile_bytes * b, cache_k + size * d * slot, cache_v + size * d * slot,
                          ranges, scores, m_l_c, acc_c, scale, cap)
                    for i in range(block):
                        if S.peek_i64(ranges + 16 * i) < S.peek_i64(ranges + 16 * i + 8):
                            merge(m_l + 8 * (b * block + i), acc + 4 * d * (b * block + i),
                                  m_l_c + 8 * i, acc_c + 4 * d * i)
            for i in range(min(count * block, m * group - pair0)):
                pair = pair0 + i
                finish(out0 + pair // group * out_stride + 4 * d * (h * group + pair % group),
                       m_l + 8 * i, acc + 4 * d * i)

    return attention_blocks


def build_chunks(kv, d, block):
    """Kernel ``attention_chunks``: threads share out (block, chunk); results go to workspace.

    Record of a pair and a chunk: m, l, 14 unused, acc (d); the chunk counted from the first one
    that the pair's row sees.
    """
    size = 2 if kv == "f16" else 4
    chunk, load_block = _chunk_function(kv, d, block), _load_block_function(d, block)
    chunk_ranges, visible = _ranges_function(block), _visible_function()
    f32 = np.float32
    tile, tile2 = S.stack(4 * d * block), S.stack(4 * d * block)
    score_slot, small = S.stack(4 * CHUNK * block), S.stack(64 * block)

    def attention_chunks(args, tid, n_threads):
        q0, q_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        cache_k, cache_v, positions = (S.peek_i64(args + 32), S.peek_i64(args + 40),
                                       S.peek_i64(args + 48))
        m, n_heads, n_kv = S.peek_i64(args + 56), S.peek_i64(args + 64), S.peek_i64(args + 72)
        capacity, window = S.peek_i64(args + 80), S.peek_i64(args + 88)
        scale, cap = f32(S.peek_f64(args + 96)), f32(S.peek_f64(args + 104))
        workspace, slots = S.peek_i64(args + 112), S.peek_i64(args + 120)
        row_shares = S.peek_i64(args + 128)
        group = n_heads // n_kv
        n_blocks = (m * group + block - 1) // block
        first, last = np.int64(1) << 40, np.int64(0)
        for r in range(m):
            lo, hi = visible(positions, r, window, capacity)
            if lo < hi:
                first, last = min(first, lo // CHUNK), max(last, (hi - 1) // CHUNK + 1)
        n_chunks = max(last - first, np.int64(0))
        own, base, part, parts = n_blocks, np.int64(0), tid, n_threads
        if row_shares > 0 and row_shares % n_threads == 0:  # as ``program.Op.placed`` decides
            own, part, parts = n_blocks // n_threads, np.int64(0), np.int64(1)
            base = own * tid
        items = n_kv * own * n_chunks
        q, acc, scores, bounds = tile(), tile2(), score_slot(), small()
        ranges, m_l = bounds + 16 * block, bounds + 32 * block
        loaded = np.int64(-1)
        for item in range(items * part // parts, items * (part + 1) // parts):
            hb, c = item // n_chunks, first + item % n_chunks
            h, pair0 = hb // own, (base + hb % own) * block
            if hb != loaded:
                load_block(q0, q_stride, positions, m, group, h, pair0, window, capacity, q, bounds)
                loaded = hb
            chunk_ranges(bounds, c, ranges)
            slot = h * capacity + CHUNK * c % capacity
            chunk(q, cache_k + size * d * slot, cache_v + size * d * slot, ranges, scores, m_l,
                  acc, scale, cap)
            for i in range(block):
                if S.peek_i64(ranges + 16 * i) < S.peek_i64(ranges + 16 * i + 8):
                    pair = pair0 + i
                    row_head = pair // group * n_heads + h * group + pair % group
                    place = c - S.peek_i64(bounds + 16 * i) // CHUNK
                    record = workspace + 4 * (d + 16) * (row_head * slots + place)
                    S.poke_f32(record, S.peek_f32(m_l + 8 * i))
                    S.poke_f32(record + 4, S.peek_f32(m_l + 8 * i + 4))
                    for j in range(0, 4 * d, 64):
                        S.store_f32(record + 64 + j, S.load_f32(acc + 4 * d * i + j))

    return attention_chunks


def build_merge(kv, d, block):
    """Kernel ``attention_merge``: fold the records of every pair in ascending chunk order."""
    merge, start, finish = _merge_function(d), _start_function(d), _finish_function(d)
    visible = _visible_function()
    tile, small = S.stack(4 * d), S.stack(64)

    def attention_merge(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        positions = S.peek_i64(args + 48)
        m, n_heads = S.peek_i64(args + 56), S.peek_i64(args + 64)
        capacity, window = S.peek_i64(args + 80), S.peek_i64(args + 88)
        workspace, slots = S.peek_i64(args + 112), S.peek_i64(args + 120)
        acc, m_l = tile(), small()
        for i in range(m * n_heads * tid // n_threads, m * n_heads * (tid + 1) // n_threads):
            r = i // n_heads
            lo, hi = visible(positions, r, window, capacity)
            start(m_l, acc)
            n_chunks = (hi - 1) // CHUNK - lo // CHUNK + 1 if lo < hi else 0
            for place in range(n_chunks):
                record = workspace + 4 * (d + 16) * (i * slots + place)
                merge(m_l, acc, record, record + 64)
            finish(out0 + r * out_stride + 4 * d * (i % n_heads), m_l, acc)

    return attention_merge


BUILDERS = {"attention_blocks": build_blocks, "attention_chunks": build_chunks,
            "attention_merge": build_merge}
