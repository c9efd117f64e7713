"""Kernel of ``delta_rule``; the order is in ``recurrent.delta_rule``.

One unit of work is 16 value columns of one head: a tile of d_k vectors (8 KiB for d_k = 128) that
stays in the first-level cache while the rows of a block pass over it. A small block reads and
writes the stored state once, however many rows there are; a larger one once for every 16 rows, out
of the second-level cache. Rows of q, k, v lie far apart and are brought together first: otherwise
they would come from beyond the caches again for every tile.
"""

import numpy as np

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu.recurrent_kernel import (
    AT_ZERO,
    KEEP_TAPE,
    N_TAPE,
    READ,
    SOUND,
    SOURCE,
    TARGET,
    WRITE,
)

MAX_K_DIM = MAX_V_DIM = 256
MAX_BLOCK = 32  # rows of a block that goes to the tape, at most
CHUNK_BLOCK = 16  # rows of a larger block that pass over a head's tiles together
LANES = 8  # partial sums over the key dimension


def _dot_function():
    """Compiled helper: 16 sums over i of state[i] * k[i]."""
    from numba import njit

    f32 = np.float32

    @njit(inline="always")
    def dot(state, k, d_k):
        s0 = s1 = s2 = s3 = S.splat_f32(f32(0.0))
        for i in range(0, d_k, LANES):
            at, x = state + 64 * i, k + 4 * i
            s0 = S.vfma(S.load_f32(at), S.splat_f32(S.peek_f32(x)), s0)
            s1 = S.vfma(S.load_f32(at + 64), S.splat_f32(S.peek_f32(x + 4)), s1)
            s2 = S.vfma(S.load_f32(at + 128), S.splat_f32(S.peek_f32(x + 8)), s2)
            s3 = S.vfma(S.load_f32(at + 192), S.splat_f32(S.peek_f32(x + 12)), s3)
        t0 = t1 = t2 = t3 = S.splat_f32(f32(0.0))
        for i in range(4, d_k, LANES):
            at, x = state + 64 * i, k + 4 * i
            t0 = S.vfma(S.load_f32(at), S.splat_f32(S.peek_f32(x)), t0)
            t1 = S.vfma(S.load_f32(at + 64), S.splat_f32(S.peek_f32(x + 4)), t1)
            t2 = S.vfma(S.load_f32(at + 128), S.splat_f32(S.peek_f32(x + 8)), t2)
            t3 = S.vfma(S.load_f32(at + 192), S.splat_f32(S.peek_f32(x + 12)), t3)
        s0, s1, s2, s3 = S.vadd(s0, t0), S.vadd(s1, t1), S.vadd(s2, t2), S.vadd(s3, t3)
        return S.vadd(S.vadd(s0, s2), S.vadd(s1, s3))

    return dot


def _update_function():
    """Compiled helper: state' = decay state + k d and 16 sums over i of state'[i] * q[i]."""
    from numba import njit

    f32 = np.float32

    @njit(inline="always")
    def renew(target, state, k, decay, d, at):
        new = S.vfma(S.splat_f32(S.peek_f32(k + 4 * at)), d,
                     S.vmul(decay, S.load_f32(state + 64 * at)))
        S.store_f32(target + 64 * at, new)
        return new

    @njit(inline="always")
    def weigh(new, q, at, acc):
        return S.vfma(new, S.splat_f32(S.peek_f32(q + 4 * at)), acc)

    @njit(inline="always")
    def update(target, state, k, q, decay, d, d_k):
        """``target`` may be ``state``; a row of four is finished before the next is read."""
        s0 = s1 = s2 = s3 = S.splat_f32(f32(0.0))
        for i in range(0, d_k, LANES):
            s0 = weigh(renew(target, state, k, decay, d, i), q, i, s0)
            s1 = weigh(renew(target, state, k, decay, d, i + 1), q, i + 1, s1)
            s2 = weigh(renew(target, state, k, decay, d, i + 2), q, i + 2, s2)
            s3 = weigh(renew(target, state, k, decay, d, i + 3), q, i + 3, s3)
        t0 = t1 = t2 = t3 = S.splat_f32(f32(0.0))
        for i in range(4, d_k, LANES):
            t0 = weigh(renew(target, state, k, decay, d, i), q, i, t0)
            t1 = weigh(renew(target, state, k, decay, d, i + 1), q, i + 1, t1)
            t2 = weigh(renew(target, state, k, decay, d, i + 2), q, i + 2, t2)
            t3 = weigh(renew(target, state, k, decay, d, i + 3), q, i + 3, t3)
        s0, s1, s2, s3 = S.vadd(s0, t0), S.vadd(s1, t1), S.vadd(s2, t2), S.vadd(s3, t3)
        return S.vadd(S.vadd(s0, s2), S.vadd(s1, s3))

    return update


def _replay_function():
    """Compiled helper: carry one tile over the kept rows of the tape."""
    from numba import njit

    @njit(inline="always")
    def replay(target, state, d_k, n, k, k_stride, d, d_stride, decay, decay_stride):
        for i in range(d_k):
            s = S.load_f32(state + 64 * i)
            for t in range(n):
                s = S.vfma(S.splat_f32(S.peek_f32(k + t * k_stride + 4 * i)),
                           S.load_f32(d + t * d_stride),
                           S.vmul(S.splat_f32(S.peek_f32(decay + t * decay_stride)), s))
            S.store_f32(target + 64 * i, s)

    return replay


def _pack_function():
    """Compiled helper: rows of one head side by side, so that a tile's loop stays in the cache."""
    from numba import njit

    @njit(inline="always")
    def pack(to, rows, stride, n_rows, n_bytes):
        for r in range(n_rows):
            for i in range(0, n_bytes, 32):
                for j in range(0, 32, 8):
                    S.poke_i64(to + r * n_bytes + i + j, S.peek_i64(rows + r * stride + i + j))

    return pack


def _tile_rows_function():
    """Compiled helper: carry one tile over the packed rows of a block."""
    from numba import njit

    dot, update = _dot_function(), _update_function()

    @njit(inline="always")
    def tile_rows(now, into, q, k, v, v_step, gates, n_rows, d_k, out, out_stride, scale, tape_d,
                  row_d):
        """``gates`` holds decay and beta of every row; tape_d is 0 where d is not kept."""
        for r in range(n_rows):
            row_k = k + 4 * d_k * r
            decay = S.splat_f32(S.peek_f32(gates + 8 * r))
            beta = S.splat_f32(S.peek_f32(gates + 8 * r + 4))
            d = S.vmul(S.vsub(S.load_f32(v + v_step * r), S.vmul(decay, dot(now, row_k, d_k))),
                       beta)
            o = update(into, now, row_k, q + 4 * d_k * r, decay, d, d_k)
            S.store_f32(out + r * out_stride, S.vmul(o, scale))
            now = into
            if tape_d != 0:
                S.store_f32(tape_d + r * row_d, d)

    return tile_rows


def build():
    """Python function of the kernel ``delta_rule``.

    ``args`` is ``[out, out_stride, q, q_stride, k, k_stride, v, v_stride, decay, decay_stride,
    beta, beta_stride, states, tape_k, tape_d, tape_decay, plan, n_rows, n_k_heads, n_v_heads, d_k,
    d_v, block_rows, scale]``.
    """
    from numba import njit

    f32 = np.float32
    replay, pack, tile_rows = _replay_function(), _pack_function(), _tile_rows_function()
    tile, q_slot, k_slot, v_slot = (S.stack(64 * MAX_K_DIM), S.stack(4 * MAX_BLOCK * MAX_K_DIM),
                                    S.stack(4 * MAX_BLOCK * MAX_K_DIM),
                                    S.stack(4 * MAX_BLOCK * MAX_V_DIM))
    gate_slot = S.stack(8 * MAX_BLOCK)

    @njit(inline="always")
    def refuse(out, out_stride, n_rows, n_bytes):
        for r in range(n_rows):
            for i in range(0, n_bytes, 64):
                S.store_f32(out + r * out_stride + i, S.splat_f32(f32(np.nan)))

    @njit(inline="always")
    def start(source, target, work, at_zero, d_k, n_tape, tape_k, row_k, tape_d, row_d, tape_decay,
              row_v, n_rows):
        """Where a tile's state at the pass's position lies; it is brought there if need be."""
        now = source
        if at_zero:
            now = work
            for i in range(0, 64 * d_k, 64):
                S.store_f32(work + i, S.splat_f32(f32(0.0)))
        if n_tape > 0 or n_rows == 0:
            replay(target, now, d_k, n_tape, tape_k, row_k, tape_d, row_d, tape_decay, row_v)
            now = target
        return now

    @njit(inline="always")
    def load_gates(gates, decay, decay_stride, beta, beta_stride, n_rows):
        for r in range(n_rows):
            S.poke_f32(gates + 8 * r, S.peek_f32(decay + r * decay_stride))
            S.poke_f32(gates + 8 * r + 4, S.peek_f32(beta + r * beta_stride))

    def delta_rule(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        q0, q_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        k0, k_stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        v0, v_stride = S.peek_i64(args + 48), S.peek_i64(args + 56)
        decay0, decay_stride = S.peek_i64(args + 64), S.peek_i64(args + 72)
        beta0, beta_stride = S.peek_i64(args + 80), S.peek_i64(args + 88)
        states, tape_k, tape_d, tape_decay = (S.peek_i64(args + 96), S.peek_i64(args + 104),
                                              S.peek_i64(args + 112), S.peek_i64(args + 120))
        plan, n_rows = S.peek_i64(args + 128), S.peek_i64(args + 136)
        n_k, n_v = S.peek_i64(args + 144), S.peek_i64(args + 152)
        d_k, d_v, block_rows = (S.peek_i64(args + 160), S.peek_i64(args + 168),
                                S.peek_i64(args + 176))
        scale = S.splat_f32(f32(S.peek_f64(args + 184)))
        sound = S.peek_i32(plan + 4 * SOUND) != 0
        keep = S.peek_i32(plan + 4 * KEEP_TAPE) != 0
        at_zero = S.peek_i32(plan + 4 * AT_ZERO) != 0
        n_tape = np.int64(S.peek_i32(plan + 4 * N_TAPE))
        slot_bytes = 4 * n_v * d_v * d_k
        source0 = states + slot_bytes * np.int64(S.peek_i32(plan + 4 * SOURCE))
        target0 = states + slot_bytes * np.int64(S.peek_i32(plan + 4 * TARGET))
        row_k, row_d, row_v = 4 * n_k * d_k, 4 * n_v * d_v, 4 * n_v
        read = np.int64(S.peek_i32(plan + 4 * READ)) * block_rows
        write = np.int64(S.peek_i32(plan + 4 * WRITE)) * block_rows
        work, q, k, v, gates = tile(), q_slot(), k_slot(), v_slot(), gate_slot()
        n_tiles = d_v // 16
        first_unit = n_v * n_tiles * tid // n_threads
        last_unit = n_v * n_tiles * (tid + 1) // n_threads
        block = MAX_BLOCK if keep else CHUNK_BLOCK
        for h in range(first_unit // n_tiles, (last_unit + n_tiles - 1) // n_tiles):
            # of this head the thread has the tiles [t0, t1)
            t0, t1 = max(first_unit - h * n_tiles, 0), min(last_unit - h * n_tiles, n_tiles)
            column, shift_k = 4 * d_v * h, 4 * d_k * (h % n_k)
            if not sound:
                refuse(out0 + column + 64 * t0, out_stride, n_rows, 64 * (t1 - t0))
                continue
            for first in range(0, max(n_rows, 1), block):
                n = min(block, n_rows - first)
                pack(q, q0 + first * q_stride + shift_k, q_stride, n, 4 * d_k)
                pack(k, k0 + first * k_stride + shift_k, k_stride, n, 4 * d_k)
                pack(v, v0 + first * v_stride + column, v_stride, n, 4 * d_v)
                load_gates(gates, decay0 + first * decay_stride + 4 * h, decay_stride,
                           beta0 + first * beta_stride + 4 * h, beta_stride, n)
                for t in range(t0, t1):
                    state = 64 * d_k * (h * n_tiles + t)
                    target, at = target0 + state, column + 64 * t
                    now = target
                    if first == 0:
                        now = start(source0 + state, target, work, at_zero, d_k, n_tape,
                                    tape_k + read * row_k + shift_k, row_k, tape_d + at, row_d,
                                    tape_decay + read * row_v + 4 * h, row_v, n_rows)
                    tile_rows(now, work if keep else target, q, k, v + 64 * t, 4 * d_v, gates, n,
                              d_k, out0 + first * out_stride + at, out_stride, scale,
                              tape_d + at if keep else 0, row_d)
            if keep and t0 == 0:  # what the replay of these rows needs, by the first user of k
                for r in range(n_rows):
                    S.poke_f32(tape_decay + (write + r) * row_v + 4 * h, S.peek_f32(gates + 8 * r))
                    if h < n_k:
                        pack(tape_k + (write + r) * row_k + shift_k, k + 4 * d_k * r, 0, 1, 4 * d_k)

    return delta_rule
