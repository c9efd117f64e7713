"""The alternative to a tape: a delta rule that writes the state after every row.

Only ``bench_rollback.py`` uses it. It has the steps, and so the bits, of ``delta_rule``; slot r + 1
of ``rows`` takes the state after row r, and the slot named by ``kept`` is where a block starts.
"""

import hashlib
from pathlib import Path

import numpy as np

from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import extent, stride
from cudflash.ops.cpu.runtime import submit


def _build():
    from numba import njit

    from cudflash.ops.cpu import simd as S
    from cudflash.ops.cpu.delta_kernel import (
        MAX_BLOCK,
        MAX_K_DIM,
        MAX_V_DIM,
        _pack_function,
        _tile_rows_function,
    )

    f32 = np.float32
    pack, tile_rows = _pack_function(), _tile_rows_function()
    q_slot, k_slot = (S.stack(4 * MAX_BLOCK * MAX_K_DIM) for _ in range(2))
    v_slot, gate_slot = S.stack(4 * MAX_BLOCK * MAX_V_DIM), S.stack(8 * MAX_BLOCK)

    @njit(inline="always")
    def word(args, i):
        return S.peek_i64(args + 8 * i)

    def history(args, tid, n_threads):
        out0, out_stride, q0, k0, qk_stride = (word(args, 0), word(args, 1), word(args, 2),
                                               word(args, 3), word(args, 4))
        v0, v_stride, decay0, beta0, gate_stride = (word(args, 5), word(args, 6), word(args, 7),
                                                    word(args, 8), word(args, 9))
        rows, kept = word(args, 10), np.int64(S.peek_i32(word(args, 11)))
        n_rows, n_k, n_v, d_k, d_v = (word(args, 12), word(args, 13), word(args, 14),
                                      word(args, 15), word(args, 16))
        scale = S.splat_f32(f32(S.peek_f64(args + 136)))
        slot_bytes, n_tiles = 4 * n_v * d_v * d_k, d_v // 16
        q, k, v, gates = q_slot(), k_slot(), v_slot(), gate_slot()
        for h in range(n_v * tid // n_threads, n_v * (tid + 1) // n_threads):
            shift = 4 * d_k * (h % n_k)
            pack(q, q0 + shift, qk_stride, n_rows, 4 * d_k)
            pack(k, k0 + shift, qk_stride, n_rows, 4 * d_k)
            pack(v, v0 + 4 * d_v * h, v_stride, n_rows, 4 * d_v)
            for r in range(n_rows):
                S.poke_f32(gates + 8 * r, S.peek_f32(decay0 + r * gate_stride + 4 * h))
                S.poke_f32(gates + 8 * r + 4, S.peek_f32(beta0 + r * gate_stride + 4 * h))
            for t in range(n_tiles):
                tile = rows + 64 * d_k * (h * n_tiles + t)
                out, now = out0 + 4 * d_v * h + 64 * t, tile + kept * slot_bytes
                for r in range(n_rows):
                    into = tile + (r + 1) * slot_bytes
                    tile_rows(now, into, q + 4 * d_k * r, k + 4 * d_k * r,
                              v + 4 * d_v * r + 64 * t, 4 * d_v, gates + 8 * r, 1, d_k,
                              out + r * out_stride, out_stride, scale, 0, 0)
                    now = into

    return history


_TEXT = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
_KERNEL = jit.register(f"delta_rule_history_{_TEXT}", _build)


def delta_rule_history(out, q, k, v, decay, beta, scale, rows, kept):
    """As ``delta_rule``, from slot ``kept[0]`` of ``rows`` into its slots 1 .. M."""
    n_rows, n_k, d_k = q.shape
    _, n_v, d_v = out.shape
    submit(_KERNEL,
           [out, stride(out), q, k, stride(q), v, stride(v), decay, beta, stride(decay), rows, kept,
            n_rows, n_k, n_v, d_k, d_v, float(scale)],
           reads=[extent(a) for a in (q, k, v, decay, beta)] + [kept],
           writes=[extent(out), rows])
