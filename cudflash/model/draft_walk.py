"""Drawing from a selector's lattice on the host: one walk, and what it was truly drawn from."""

import numpy as np


def sample_walk(candidate_ids, scores, temperature, uniform):
    """Draw one path through the candidates, left to right.

    Parameters
    ----------
    candidate_ids : ndarray of shape (n, K), int32
        From ``DraftRunner.lattice``.
    scores : ndarray of shape (n, K, K), float32
        As above.
    temperature : float, positive
    uniform : callable
        Returns a float in [0, 1); called once per row, in order.

    Returns
    -------
    tokens : tuple of int
    probs : ndarray of shape (n, K), float64
        Row t: the probabilities of ``candidate_ids[t]`` that token t was drawn from, given the
        tokens before it; all other ids had none.

    Notes
    -----
    softmax(score / temperature) in float64, the largest score subtracted before the division; the
    first candidate whose cumulative probability exceeds the draw, so one of probability 0 is never
    taken.
    """
    tokens, rows, previous = [], [], 0
    for ids, table in zip(candidate_ids, scores, strict=True):
        z = table[previous].astype(np.float64)
        with np.errstate(over="ignore"):  # a difference over a tiny temperature is -inf: no chance
            p = np.exp((z - z.max()) / temperature)
        p /= p.sum()
        above = np.flatnonzero(np.cumsum(p) > uniform())
        # rounding may leave the last sum below the draw
        previous = int(above[0]) if len(above) else int(np.flatnonzero(p)[-1])
        tokens.append(int(ids[previous]))
        rows.append(p)
    return tuple(tokens), np.stack(rows)
