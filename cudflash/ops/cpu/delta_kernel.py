"""Kernel of ``delta_rule``; the order is in ``recurrent.delta_rule``.

One unit of work is 16 value columns of one head: a tile of d_k vectors (8 KiB for d_k = 128) that
stays in the first-level cache while all rows of a block pass over it. The stored state is read once
and written once per call, however many rows there are.
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

MAX_K_DIM = 256
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


def build():
    """Python function of the kernel ``delta_rule``.

    ``args`` is ``[out, out_stride, q, q_stride, k, k_stride, v, v_stride, decay, decay_stride,
    beta, beta_stride, states, tape_k, tape_d, tape_decay, plan, n_rows, n_k_heads, n_v_heads, d_k,
    d_v, block_rows, scale]``.
    """
    from numba import njit

    f32 = np.float32
    dot, update, replay = _dot_function(), _update_function(), _replay_function()
    tile = S.stack(64 * MAX_K_DIM)

    @njit(inline="always")
    def keep_inputs(tape_k, k, k_stride, row_k, tape_decay, decay, decay_stride, row_v, n_rows,
                    d_k, has_k):
        """Copy what the replay of these rows needs: the head's decay, and k for its first user."""
        for r in range(n_rows):
            S.poke_f32(tape_decay + r * row_v, S.peek_f32(decay + r * decay_stride))
            if has_k:
                for i in range(d_k):
                    S.poke_f32(tape_k + r * row_k + 4 * i, S.peek_f32(k + r * k_stride + 4 * i))

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
        read, write = (np.int64(S.peek_i32(plan + 4 * READ)) * block_rows,
                       np.int64(S.peek_i32(plan + 4 * WRITE)) * block_rows)
        work = tile()
        n_tiles = d_v // 16
        n_units = n_v * n_tiles
        for unit in range(n_units * tid // n_threads, n_units * (tid + 1) // n_threads):
            h, column = unit // n_tiles, 4 * d_v * (unit // n_tiles) + 64 * (unit % n_tiles)
            shift_k = 4 * d_k * (h % n_k)
            if not sound:
                for r in range(n_rows):
                    S.store_f32(out0 + r * out_stride + column, S.splat_f32(f32(np.nan)))
                continue
            now, target = source0 + 64 * d_k * unit, target0 + 64 * d_k * unit
            if at_zero:
                now = work
                for i in range(0, 64 * d_k, 64):
                    S.store_f32(work + i, S.splat_f32(f32(0.0)))
            if n_tape > 0 or n_rows == 0:
                replay(target, now, d_k, n_tape, tape_k + read * row_k + shift_k, row_k,
                       tape_d + column, row_d, tape_decay + read * row_v + 4 * h, row_v)
                now = target
            into = work if keep else target
            for r in range(n_rows):
                q, k = q0 + r * q_stride + shift_k, k0 + r * k_stride + shift_k
                decay = S.splat_f32(S.peek_f32(decay0 + r * decay_stride + 4 * h))
                beta = S.splat_f32(S.peek_f32(beta0 + r * beta_stride + 4 * h))
                d = S.vmul(S.vsub(S.load_f32(v0 + r * v_stride + column),
                                  S.vmul(decay, dot(now, k, d_k))), beta)
                S.store_f32(out0 + r * out_stride + column,
                            S.vmul(update(into, now, k, q, decay, d, d_k), scale))
                now = into
                if keep:
                    S.store_f32(tape_d + r * row_d + column, d)
            if keep and unit % n_tiles == 0:
                keep_inputs(tape_k + write * row_k + shift_k, k0 + shift_k, k_stride, row_k,
                            tape_decay + write * row_v + 4 * h, decay0 + 4 * h, decay_stride,
                            row_v, n_rows, d_k, h < n_k)

    return delta_rule
