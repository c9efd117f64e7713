"""Candidate selector of a draft: scores of all pairs of candidates, and the walk through them.

Letters: T draft rows, K candidates of a row, R width of the codebooks.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape
from cudflash.ops.cpu.runtime import submit


def _kernel(name):
    def build():
        from cudflash.ops.cpu.selector_kernel import BUILDERS

        return BUILDERS[name]()

    return jit.register(name, build)


_LATTICE, _WALK = _kernel("selector_lattice"), _kernel("selector_walk")


def selector_lattice(out, succ, pred, gate, unary):
    """``out[t, a, b] = unary[t, b] + sum over r of pred[t, a, r] * gate[t, r] * succ[t, b, r]``.

    Parameters
    ----------
    out : ndarray of shape (T, K, K), float32
        [row, predecessor candidate, successor candidate]
    succ : ndarray of shape (T, K, R), float32
        Codebook rows of the candidates of row t.
    pred : ndarray of shape (T, K, R), float32
        Codebook rows of the candidates of row t - 1; of the anchor, K times, for row 0.
    gate : ndarray of shape (T, R), float32
    unary : ndarray of shape (T, K), float32
        Logits of the candidates of row t.
        All contiguous.

    Notes
    -----
    w[r] = pred[a, r] * gate[r], rounded. 16 lanes: lane l adds fma(w[r], succ[b, r], lane) for
    r = l, l + 16, ... from 0; then the halving tree (l, l + 8) .. (0, 1). out = unary + sum.
    """
    op = "selector_lattice"
    n_rows, k, _ = out.shape
    rank = gate.shape[-1]
    expected = {"out": (out, (n_rows, k, k)), "succ": (succ, (n_rows, k, rank)),
                "pred": (pred, (n_rows, k, rank)), "gate": (gate, (n_rows, rank)),
                "unary": (unary, (n_rows, k))}
    for name, (array, shape) in expected.items():
        check_shape(op, name, array, shape)
        _check_contiguous(op, name, array, np.float32)
    if n_rows == 0:
        return
    submit(_LATTICE, [out, succ, pred, gate, unary, n_rows, k, rank],
           reads=[succ, pred, gate, unary], writes=[out])


def selector_walk(tokens, index, scores, confidence, lattice, candidate_ids):
    """Walk greedily through the rows: the best successor of the candidate chosen before.

    Parameters
    ----------
    tokens, index : ndarray of shape (T,), int32
        Id and place in its row of every chosen candidate.
    scores, confidence : ndarray of shape (T,), float32
        Score of the chosen one, and its softmax probability among the K.
    lattice : ndarray of shape (T, K, K), float32
        From :func:`selector_lattice`.
    candidate_ids : ndarray of shape (T, K), int32
        All contiguous.

    Notes
    -----
    Row t looks at lattice[t, index[t - 1]], row 0 at lattice[0, 0]. The first of equal scores is
    taken; a NaN never is, unless it comes first. confidence = 1 / sum over b, ascending from 0, of
    exp(score_b - chosen score).
    """
    op = "selector_walk"
    n_rows, k = candidate_ids.shape
    check_shape(op, "lattice", lattice, (n_rows, k, k))
    _check_contiguous(op, "lattice", lattice, np.float32)
    _check_contiguous(op, "candidate_ids", candidate_ids, np.int32)
    outputs = [("tokens", tokens, np.int32), ("index", index, np.int32),
               ("scores", scores, np.float32), ("confidence", confidence, np.float32)]
    for name, array, dtype in outputs:
        check_shape(op, name, array, (n_rows,))
        _check_contiguous(op, name, array, dtype)
    if n_rows == 0:
        return
    submit(_WALK, [tokens, index, scores, confidence, lattice, candidate_ids, n_rows, k],
           reads=[lattice, candidate_ids], writes=[tokens, index, scores, confidence])


def _check_contiguous(op, name, array, dtype):
    check_rows(op, name, array, dtype)
    if not array.flags.c_contiguous:
        raise UsageError(f"{op}: {name} of shape {array.shape} is not contiguous")
