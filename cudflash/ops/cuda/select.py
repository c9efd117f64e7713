"""Choosing from logits: argmax, top-k, finiteness, greedy acceptance.

Ties go to the lowest id. Kernels: ``argmax.cu``, ``top_k.cu``, ``check_finite.cu``, each of which
looks at spans of a row first and then at what the spans gave; ``accept.cu``.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_rows, check_shape
from cudflash.ops.cuda.launch import Long

SPAN = 8192  # columns of a block: SPAN in argmax.cu and check_finite.cu
TOP_K_SPAN = 4096  # SPAN in top_k.cu
MAX_TOP_K_SPANS = 1024  # MAX_SPANS in top_k.cu
MAX_DRAFTS = 31  # of one acceptance: a lane each, and one for the token after them


def argmax(self, out_ids, logits):
    """Id of the largest logit of every row; the lowest id on ties; as ``ops.cpu.argmax``.

    Parameters
    ----------
    out_ids : array of shape (M,), int32
    logits : array of shape (M, V), float32
        Rows contiguous. A row of NaNs gives id 0.
    """
    check_rows("argmax", "out_ids", out_ids, np.int32)
    check_rows("argmax", "logits", logits)
    m, n = logits.shape
    check_shape("argmax", "out_ids", out_ids, (m,))
    if m == 0:
        return
    spans = -(-n // SPAN)
    values, ids = self.workspace(((m, spans), np.float32), ((m, spans), np.int32))
    self.start("argmax", (), "argmax_spans", (spans, m), (256,),
               (logits, Long(logits.strides[0] // 4), values, ids, n))
    self.start("argmax", (), "argmax_merge", (m,), (32,), (values, ids, out_ids, spans))


def top_k(self, out_ids, out_values, logits):
    """The k largest logits of every row: value descending, lowest id first on ties.

    Parameters
    ----------
    out_ids : array of shape (M, k), int32
    out_values : array of shape (M, k), float32
    logits : array of shape (M, V), float32
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
    spans = -(-n // TOP_K_SPAN)
    if spans > MAX_TOP_K_SPANS:
        raise UsageError(
            f"top_k: rows have {n} values, the kernel takes {TOP_K_SPAN * MAX_TOP_K_SPANS}")
    if m == 0:
        return
    shape = (m, spans, min(k, TOP_K_SPAN))
    values, ids = self.workspace((shape, np.float32), (shape, np.int32))
    self.start("top_k", (), "top_k_spans", (spans, m), (256,),
               (logits, Long(logits.strides[0] // 4), values, ids, n, k))
    self.start("top_k", (), "top_k_merge", (m,), (32,),
               (out_ids, Long(out_ids.strides[0] // 4), out_values,
                Long(out_values.strides[0] // 4), values, ids, spans, k))


def check_finite(self, flag, x):
    """flag = 1 if every value of x is finite, else 0.

    Parameters
    ----------
    flag : array of shape (1,), int32
    x : array of shape (M, N), float32
        Rows contiguous.
    """
    check_rows("check_finite", "flag", flag, np.int32)
    check_shape("check_finite", "flag", flag, (1,))
    check_rows("check_finite", "x", x)
    m, n = x.shape
    spans = -(-n // SPAN)
    (parts,) = self.workspace(((max(1, m * spans),), np.int32))
    if x.size:
        self.start("check_finite", (), "finite_spans", (spans, m), (256,),
                   (x, Long(x.strides[0] // 4), parts, n))
    self.start("check_finite", (), "finite_merge", (1,), (256,),
               (flag, parts, m * spans if x.size else 0))


def accept_greedy(self, outcome, drafts, best, finite, stop_ids):
    """Decide a drafted block by the target's own most likely tokens; as ``ops.cpu.accept_greedy``.

    Parameters
    ----------
    outcome : array of shape (5 + n,), int32
    drafts : array of shape (n,), int32
        At most 31.
    best : array of shape (n + 1,), int32
    finite : array of shape (1,), int32
    stop_ids : array of shape (S,), int32
        Ids below 0 are none.
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
    self.start("accept", (), "accept_greedy", (1,), (32,),
               (outcome, drafts, best, finite, stop_ids, n, len(stop_ids)))
