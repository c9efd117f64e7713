"""Kernels of the candidate selector; the order is in ``selector.py``."""

import numpy as np

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu import special_kernel as F


def build_lattice():
    """``args`` is ``[out, succ, pred, gate, unary, n_rows, k, rank]``; a unit is one (t, a)."""
    from numba import njit

    f32 = np.float32
    lanes = S.stack(64)

    @njit(inline="always")
    def bilinear(pred, gate, succ, rank, spare):
        """Sum over the codebook's width."""
        acc = S.splat_f32(f32(0.0))
        whole = rank - rank % 16
        for r in range(0, 4 * whole, 64):
            w = S.vmul(S.load_f32(pred + r), S.load_f32(gate + r))
            acc = S.vfma(w, S.load_f32(succ + r), acc)
        if whole < rank:
            S.store_f32(spare, acc)
            for r in range(whole, rank):
                lane = spare + 4 * (r - whole)
                w = S.peek_f32(pred + 4 * r) * S.peek_f32(gate + 4 * r)
                S.poke_f32(lane, S.fma(w, S.peek_f32(succ + 4 * r), S.peek_f32(lane)))
            acc = S.load_f32(spare)
        return S.vsum_tree(acc)

    def selector_lattice(args, tid, n_threads):
        out0, succ0, pred0 = S.peek_i64(args), S.peek_i64(args + 8), S.peek_i64(args + 16)
        gate0, unary0 = S.peek_i64(args + 24), S.peek_i64(args + 32)
        n_rows, k, rank = S.peek_i64(args + 40), S.peek_i64(args + 48), S.peek_i64(args + 56)
        spare = lanes()
        units = n_rows * k
        for i in range(units * tid // n_threads, units * (tid + 1) // n_threads):
            t = i // k
            pred, gate = pred0 + 4 * rank * i, gate0 + 4 * rank * t
            for b in range(k):
                succ = succ0 + 4 * rank * (t * k + b)
                total = bilinear(pred, gate, succ, rank, spare)
                S.poke_f32(out0 + 4 * (i * k + b), S.peek_f32(unary0 + 4 * (t * k + b)) + total)

    return selector_lattice


def build_walk():
    """``args`` is ``[tokens, index, scores, confidence, lattice, candidate_ids, n_rows, k]``.

    A few hundred values that depend on one another: the first thread walks alone.
    """
    f32 = np.float32

    def selector_walk(args, tid, n_threads):
        tokens, index = S.peek_i64(args), S.peek_i64(args + 8)
        scores, confidence = S.peek_i64(args + 16), S.peek_i64(args + 24)
        lattice, ids = S.peek_i64(args + 32), S.peek_i64(args + 40)
        n_rows, k = S.peek_i64(args + 48), S.peek_i64(args + 56)
        previous = np.int64(0)
        for t in range(n_rows if tid == 0 else 0):
            row = lattice + 4 * k * (t * k + previous)
            best, top = np.int64(0), S.peek_f32(row)
            for b in range(1, k):
                score = S.peek_f32(row + 4 * b)
                if score > top:
                    best, top = np.int64(b), score
            total = f32(0.0)
            for b in range(k):
                total = total + F.exp(S.peek_f32(row + 4 * b) - top)
            S.poke_i32(tokens + 4 * t, S.peek_i32(ids + 4 * (t * k + best)))
            S.poke_i32(index + 4 * t, np.int32(best))
            S.poke_f32(scores + 4 * t, top)
            S.poke_f32(confidence + 4 * t, S.div(f32(1.0), total))
            previous = best

    return selector_walk


BUILDERS = {"selector_lattice": build_lattice, "selector_walk": build_walk}
