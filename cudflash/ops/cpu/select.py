"""Choosing from logits: argmax, top-k, finiteness, greedy acceptance. The op-level functions.

Ties go to the lowest id, on every backend. A NaN is never chosen; ``check_finite`` comes first and
its flag is read before any decision.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import empty, submit

# Columns that one thread scans at a time; partial results are merged in ascending order.
SPAN = 8192
# The same for top-k, whose list starts empty in every span.
TOP_K_SPAN = 65536


def _kernel(name):
    def build():
        from cudflash.ops.cpu.select_kernel import BUILDERS

        return BUILDERS[name]()

    return jit.register(name, build)


_ARGMAX_SPANS, _ARGMAX_MERGE = _kernel("argmax_spans"), _kernel("argmax_merge")
_TOP_K_SPANS, _TOP_K_MERGE = _kernel("top_k_spans"), _kernel("top_k_merge")
_FINITE_START, _FINITE_CHECK = _kernel("finite_start"), _kernel("finite_check")
_ACCEPT_GREEDY = _kernel("accept_greedy")
MAX_DRAFTS = 31  # of one acceptance: a lane each, and one for the token after them


def _spans(n, span=SPAN):
    return -(-n // span)


def argmax(out_ids, logits):
    """Id of the largest logit of every row; the lowest id on ties.

    Parameters
    ----------
    out_ids : ndarray of shape (M,), int32
    logits : ndarray of shape (M, V), float32
        Rows contiguous. A row of NaNs gives id 0.
    """
    check_rows("argmax", "out_ids", out_ids, np.int32)
    check_rows("argmax", "logits", logits)
    m, n = logits.shape
    check_shape("argmax", "out_ids", out_ids, (m,))
    if m == 0:
        return
    values, ids = empty((m, _spans(n)), np.float32), empty((m, _spans(n)), np.int32)
    block = [out_ids, logits, stride(logits), m, n, SPAN, values, ids]
    submit(_ARGMAX_SPANS, block, reads=[extent(logits)], writes=[values, ids])
    submit(_ARGMAX_MERGE, block, reads=[values, ids], writes=[out_ids])


def top_k(out_ids, out_values, logits):
    """The k largest logits of every row: value descending, lowest id first on ties.

    Parameters
    ----------
    out_ids : ndarray of shape (M, k), int32
    out_values : ndarray of shape (M, k), float32
    logits : ndarray of shape (M, V), float32
        Rows contiguous. If fewer than k are numbers, id -1 and value -infinity fill the rest.
    """
    check_rows("top_k", "out_ids", out_ids, np.int32)
    check_rows("top_k", "out_values", out_values)
    check_rows("top_k", "logits", logits)
    m, n = logits.shape
    k = out_ids.shape[-1]
    check_shape("top_k", "out_ids", out_ids, (m, k))
    check_shape("top_k", "out_values", out_values, (m, k))
    if not 1 <= k <= n:
        raise UsageError(f"top_k: k is {k}, expected 1 to {n}")
    if m == 0:
        return
    values = empty((m, _spans(n, TOP_K_SPAN), k), np.float32)
    ids = empty((m, _spans(n, TOP_K_SPAN), k), np.int32)
    block = [out_ids, stride(out_ids), out_values, stride(out_values), logits, stride(logits),
             m, n, TOP_K_SPAN, k, values, ids]
    submit(_TOP_K_SPANS, block, reads=[extent(logits)], writes=[values, ids])
    submit(_TOP_K_MERGE, block, reads=[values, ids],
           writes=[extent(out_ids), extent(out_values)])


def check_finite(flag, x):
    """flag = 1 if every value of x is finite, else 0.

    Parameters
    ----------
    flag : ndarray of shape (1,), int32
    x : ndarray of shape (M, N), float32
        Rows contiguous.
    """
    check_rows("check_finite", "flag", flag, np.int32)
    check_shape("check_finite", "flag", flag, (1,))
    check_rows("check_finite", "x", x)
    m, n = x.shape
    block = [flag, x, stride(x) if m else 0, m, n, SPAN]
    submit(_FINITE_START, block, reads=[], writes=[flag])
    if x.size:
        submit(_FINITE_CHECK, block, reads=[extent(x)], writes=[flag])


def accept_greedy(outcome, drafts, best, finite, stop_ids):
    """Decide a drafted block by the target's own most likely tokens.

    Parameters
    ----------
    outcome : ndarray of shape (5 + n,), int32
        Overwritten: whether the rows are finite; if so drafts accepted, tokens decided, how it ended
        (0 no drafts, 1 bonus, 2 corrected, 3 stopped) and the tokens, else zeros. The places after
        the tokens are left alone.
    drafts : ndarray of shape (n,), int32
        At most 31.
    best : ndarray of shape (n + 1,), int32
        Row i follows the anchor and the first i drafts.
    finite : ndarray of shape (1,), int32
    stop_ids : ndarray of shape (S,), int32
        Tokens after which nothing is decided; ids below 0 are none.

    Notes
    -----
    The rule ``match`` of ``cudflash.spec.acceptance``.
    """
    op = "accept_greedy"
    (n,) = drafts.shape
    for name, array in (("outcome", outcome), ("drafts", drafts), ("best", best),
                        ("finite", finite), ("stop_ids", stop_ids)):
        check_rows(op, name, array, np.int32)
    for name, array, length in (("outcome", outcome, 5 + n), ("best", best, n + 1),
                                ("finite", finite, 1)):
        check_shape(op, name, array, (length,))
    if n > MAX_DRAFTS:
        raise UsageError(f"{op}: {n} drafts, expected at most {MAX_DRAFTS}")
    submit(_ACCEPT_GREEDY, [outcome, drafts, best, finite, stop_ids, n, len(stop_ids)],
           reads=[drafts, best, finite, stop_ids], writes=[outcome], touched=0)
