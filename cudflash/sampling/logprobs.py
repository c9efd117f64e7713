"""Log probabilities for `Result.logprobs`: of the raw target distribution, before the chain."""

from dataclasses import dataclass

import numpy as np

from cudflash.sampling.floatmath import expf
from cudflash.sampling.sorting import SELECT_MIN, column_maxima, kth_lower_bound


@dataclass(frozen=True)
class LogProbs:
    """Natural-log probabilities of one position; see `log_softmax_top`."""

    logits: np.ndarray  # (n_vocab,) float32
    log_sum: float  # log of the sum of exp(logits)
    top: list  # (id, logprob) pairs, most likely first, lower id first among equal ones

    def of(self, token: int) -> float:
        """Return the log probability of one token; -inf where the logit is."""
        return float(self.logits[token]) - self.log_sum


def log_softmax_top(logits, n) -> LogProbs:
    """Return log(softmax(logits)) of any token on demand and of the n most likely.

    These describe what the model said: temperature, penalties, bias and truncation play no part.
    exp is the sampler's (the same bits on every machine); the sum runs in float64 in id order.

    Parameters
    ----------
    logits : ndarray of shape (n_vocab,), float32
        No NaN or +inf, at least one finite; kept by reference.
    n : int
        Number of pairs in ``top``; 0 for none; more than n_vocab gives n_vocab.
    """
    largest = logits.max()
    with np.errstate(over="ignore"):
        weights = expf(logits - largest)
    total = np.add.accumulate(weights, dtype=np.float64)[-1]
    log_sum = float(largest) + float(np.log(total))
    top = _largest(logits, min(n, len(logits)))
    return LogProbs(logits, log_sum, [(int(i), float(logits[i]) - log_sum) for i in top])


def _largest(logits, n):
    if n <= 0:
        return []
    member = np.arange(len(logits))
    if len(logits) >= SELECT_MIN and n <= 256:
        member = np.flatnonzero(logits >= kth_lower_bound(column_maxima(logits), n))
    return member[np.argsort(-logits[member], kind="stable")][:n]
