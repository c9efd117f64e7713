"""Candidate selector of a draft: scores of all pairs, and the walk; kernels in ``selector.cu``.

Letters: T draft rows, K candidates of a row, R width of the codebooks.
"""

import numpy as np

from cudflash.ops.cuda.checks import check_contiguous, check_shape


def selector_lattice(self, out, succ, pred, gate, unary):
    """``out[t, a, b] = unary[t, b] + sum over r of pred[t, a, r] * gate[t, r] * succ[t, b, r]``.

    Parameters
    ----------
    out : array of shape (T, K, K), float32
        [row, predecessor candidate, successor candidate]
    succ, pred : array of shape (T, K, R), float32
    gate : array of shape (T, R), float32
    unary : array of shape (T, K), float32
        All contiguous.
    """
    op = "selector_lattice"
    n_rows, k, _ = out.shape
    rank = gate.shape[-1]
    expected = {"out": (out, (n_rows, k, k)), "succ": (succ, (n_rows, k, rank)),
                "pred": (pred, (n_rows, k, rank)), "gate": (gate, (n_rows, rank)),
                "unary": (unary, (n_rows, k))}
    for name, (array, shape) in expected.items():
        check_shape(op, name, array, shape)
        check_contiguous(op, name, array)
    if n_rows == 0:
        return
    self.start("selector", (), "selector_lattice", (k, n_rows), (256,),
               (out, succ, pred, gate, unary, k, rank))


def selector_walk(self, tokens, index, scores, confidence, lattice, candidate_ids):
    """Walk greedily through the rows: the best successor of the candidate chosen before.

    Parameters
    ----------
    tokens, index : array of shape (T,), int32
    scores, confidence : array of shape (T,), float32
    lattice : array of shape (T, K, K), float32
    candidate_ids : array of shape (T, K), int32
        All contiguous; as ``ops.cpu.selector_walk``.
    """
    op = "selector_walk"
    n_rows, k = candidate_ids.shape
    check_shape(op, "lattice", lattice, (n_rows, k, k))
    check_contiguous(op, "lattice", lattice)
    check_contiguous(op, "candidate_ids", candidate_ids, np.int32)
    outputs = [("tokens", tokens, np.int32), ("index", index, np.int32),
               ("scores", scores, np.float32), ("confidence", confidence, np.float32)]
    for name, array, dtype in outputs:
        check_shape(op, name, array, (n_rows,))
        check_contiguous(op, name, array, dtype)
    if n_rows == 0:
        return
    self.start("selector", (), "selector_walk", (1,), (32,),
               (tokens, index, scores, confidence, lattice, candidate_ids, n_rows, k))
