"""Kernels of ``select.py``: spans of a row in parallel, then a merge in ascending order."""

import numpy as np

from cudflash.ops.cpu import simd as S

_EXPONENT = 0x7F800000


def build_argmax_spans():
    """``args`` of both argmax kernels: ``[out, logits, stride, m, n, span, values, ids]``."""
    f32 = np.float32
    slot = S.stack(128)

    def argmax_spans(args, tid, n_threads):
        logits, stride = S.peek_i64(args + 8), S.peek_i64(args + 16)
        m, n, span = S.peek_i64(args + 24), S.peek_i64(args + 32), S.peek_i64(args + 40)
        values, ids = S.peek_i64(args + 48), S.peek_i64(args + 56)
        spans = (n + span - 1) // span
        lanes = slot()
        for i in range(m * spans * tid // n_threads, m * spans * (tid + 1) // n_threads):
            x = logits + i // spans * stride
            first = i % spans * span
            last = min(n, first + span)
            whole = last - (last - first) % 16
            top = S.splat_f32(f32(-np.inf))
            found = S.splat_i32(np.int32(first))
            at = S.viadd(S.vlane_ids(), S.splat_i32(np.int32(first)))
            for j in range(first, whole, 16):
                v = S.load_f32(x + 4 * j)
                found = S.vipick_gt(v, top, at, found)
                top = S.vmax(v, top)
                at = S.viadd(at, S.splat_i32(np.int32(16)))
            S.store_f32(lanes, top)
            S.store_i32(lanes + 64, found)
            best, best_id = S.peek_f32(lanes), S.peek_i32(lanes + 64)
            for j in range(4, 64, 4):
                v, at_id = S.peek_f32(lanes + j), S.peek_i32(lanes + 64 + j)
                if v > best or (v == best and at_id < best_id):
                    best, best_id = v, at_id
            for j in range(whole, last):
                v = S.peek_f32(x + 4 * j)
                if v > best:
                    best, best_id = v, np.int32(j)
            S.poke_f32(values + 4 * i, best)
            S.poke_i32(ids + 4 * i, best_id)

    return argmax_spans


def build_argmax_merge():
    """See :func:`build_argmax_spans`."""

    def argmax_merge(args, tid, n_threads):
        out = S.peek_i64(args)
        m, n, span = S.peek_i64(args + 24), S.peek_i64(args + 32), S.peek_i64(args + 40)
        values, ids = S.peek_i64(args + 48), S.peek_i64(args + 56)
        spans = (n + span - 1) // span
        for r in range(m * tid // n_threads, m * (tid + 1) // n_threads):
            best = S.peek_f32(values + 4 * r * spans)
            best_id = S.peek_i32(ids + 4 * r * spans)
            for i in range(r * spans + 1, (r + 1) * spans):
                if S.peek_f32(values + 4 * i) > best:
                    best, best_id = S.peek_f32(values + 4 * i), S.peek_i32(ids + 4 * i)
            S.poke_i32(out + 4 * r, best_id)

    return argmax_merge


def _insert_function():
    from numba import njit

    @njit(inline="always")
    def insert(values, ids, count, k, v, at_id):
        """Put a candidate in its place in a list sorted by value; later ones go behind equals."""
        place = count if count < k else k - 1
        while place > 0 and v > S.peek_f32(values + 4 * (place - 1)):
            S.poke_f32(values + 4 * place, S.peek_f32(values + 4 * (place - 1)))
            S.poke_i32(ids + 4 * place, S.peek_i32(ids + 4 * (place - 1)))
            place -= 1
        S.poke_f32(values + 4 * place, v)
        S.poke_i32(ids + 4 * place, at_id)
        return min(count + 1, k)

    @njit(inline="always")
    def wanted(values, count, k, v):
        """Whether a candidate belongs in the list; never a NaN."""
        if count < k:
            return v == v
        return v > S.peek_f32(values + 4 * (k - 1))

    @njit(inline="always")
    def fill(values, ids, count, k):
        for j in range(count, k):
            S.poke_f32(values + 4 * j, np.float32(-np.inf))
            S.poke_i32(ids + 4 * j, np.int32(-1))

    return insert, wanted, fill


def build_top_k_spans():
    """``args`` of both top-k kernels: ``[ids, ids_stride, values, values_stride, logits, stride,
    m, n, span, k, span values, span ids]``.
    """
    insert, wanted, fill = _insert_function()

    def top_k_spans(args, tid, n_threads):
        logits, stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        m, n, span, k = (S.peek_i64(args + 48), S.peek_i64(args + 56), S.peek_i64(args + 64),
                         S.peek_i64(args + 72))
        values0, ids0 = S.peek_i64(args + 80), S.peek_i64(args + 88)
        spans = (n + span - 1) // span
        for i in range(m * spans * tid // n_threads, m * spans * (tid + 1) // n_threads):
            x = logits + i // spans * stride
            values, ids = values0 + 4 * i * k, ids0 + 4 * i * k
            j = i % spans * span
            last = min(n, j + span)
            count = np.int64(0)
            while j < last:
                if count == k:  # skip whole vectors without a candidate
                    limit = S.splat_f32(S.peek_f32(values + 4 * (k - 1)))
                    while j + 16 <= last and S.vmask_gt(S.load_f32(x + 4 * j), limit) == 0:
                        j += 16
                for at in range(j, min(j + 16, last)):
                    v = S.peek_f32(x + 4 * at)
                    if wanted(values, count, k, v):
                        count = insert(values, ids, count, k, v, np.int32(at))
                j += 16
            fill(values, ids, count, k)

    return top_k_spans


def build_top_k_merge():
    """See :func:`build_top_k_spans`."""
    insert, wanted, fill = _insert_function()

    def top_k_merge(args, tid, n_threads):
        ids_out, ids_stride = S.peek_i64(args), S.peek_i64(args + 8)
        values_out, values_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        m, n, span, k = (S.peek_i64(args + 48), S.peek_i64(args + 56), S.peek_i64(args + 64),
                         S.peek_i64(args + 72))
        values0, ids0 = S.peek_i64(args + 80), S.peek_i64(args + 88)
        spans = (n + span - 1) // span
        for r in range(m * tid // n_threads, m * (tid + 1) // n_threads):
            ids, values = ids_out + r * ids_stride, values_out + r * values_stride
            count = np.int64(0)
            for i in range(r * spans, (r + 1) * spans):
                for j in range(i * k, (i + 1) * k):
                    v, at_id = S.peek_f32(values0 + 4 * j), S.peek_i32(ids0 + 4 * j)
                    if at_id < 0 or not wanted(values, count, k, v):
                        break  # the rest of this span's list is no larger
                    count = insert(values, ids, count, k, v, at_id)
            fill(values, ids, count, k)

    return top_k_merge


def build_finite_start():
    """``args`` of both finiteness kernels: ``[flag, x, stride, m, n, span]``."""

    def finite_start(args, tid, n_threads):
        if tid == 0:
            S.poke_i32(S.peek_i64(args), np.int32(1))

    return finite_start


def build_finite_check():
    """See :func:`build_finite_start`; any thread may clear the flag, none sets it."""

    def finite_check(args, tid, n_threads):
        flag, x0, stride = S.peek_i64(args), S.peek_i64(args + 8), S.peek_i64(args + 16)
        m, n, span = S.peek_i64(args + 24), S.peek_i64(args + 32), S.peek_i64(args + 40)
        spans = (n + span - 1) // span
        mask = S.splat_i32(np.int32(_EXPONENT))
        for i in range(m * spans * tid // n_threads, m * spans * (tid + 1) // n_threads):
            x = x0 + i // spans * stride
            first = i % spans * span
            last = min(n, first + span)
            whole = last - (last - first) % 16
            top = S.splat_i32(np.int32(0))
            for j in range(first, whole, 16):
                top = S.vimax(S.viand(S.load_i32(x + 4 * j), mask), top)
            largest = S.vimax_all(top)
            for j in range(whole, last):
                largest = max(largest, S.peek_i32(x + 4 * j) & np.int32(_EXPONENT))
            if largest == _EXPONENT:
                S.poke_i32(flag, np.int32(0))

    return finite_check


def build_accept_greedy():
    """``args`` is ``[outcome, drafts, best, finite, stop_ids, n_drafts, n_stop]``.

    A few words that depend on one another: the first thread decides alone.
    """

    def accept_greedy(args, tid, n_threads):
        outcome, drafts, best = S.peek_i64(args), S.peek_i64(args + 8), S.peek_i64(args + 16)
        finite, stops = S.peek_i64(args + 24), S.peek_i64(args + 32)
        n, n_stop = S.peek_i64(args + 40), S.peek_i64(args + 48)
        if tid == 0 and S.peek_i32(finite) == 0:
            for i in range(0, 16, 4):
                S.poke_i32(outcome + i, np.int32(0))
        if tid == 0 and S.peek_i32(finite) != 0:
            accepted, tokens, end = n, n + 1, np.int64(1 if n > 0 else 0)
            for i in range(n):
                token = S.peek_i32(best + 4 * i)
                stopped = False
                for j in range(n_stop):
                    if S.peek_i32(stops + 4 * j) == token:
                        stopped = True
                if token != S.peek_i32(drafts + 4 * i):
                    accepted, tokens, end = i, i + 1, np.int64(2)
                    break
                if stopped:
                    accepted, tokens, end = i + 1, i + 1, np.int64(3)
                    break
            for i in range(tokens):
                S.poke_i32(outcome + 16 + 4 * i, S.peek_i32(best + 4 * i))
            S.poke_i32(outcome, np.int32(1))
            S.poke_i32(outcome + 4, np.int32(accepted))
            S.poke_i32(outcome + 8, np.int32(tokens))
            S.poke_i32(outcome + 12, np.int32(end))

    return accept_greedy


BUILDERS = {
    "argmax_spans": build_argmax_spans, "argmax_merge": build_argmax_merge,
    "top_k_spans": build_top_k_spans, "top_k_merge": build_top_k_merge,
    "finite_start": build_finite_start, "finite_check": build_finite_check,
    "accept_greedy": build_accept_greedy,
}
