"""The list of candidates that samplers shorten, reorder and rescale.

Owns ids, logits, probabilities, the order flag and the two list operations that several samplers
share (sort, softmax). Must not know any sampler. Invariant: an array put into the list is never
changed in place afterwards, so a caller's logits and a pending `Ordering` stay valid.
"""

from dataclasses import dataclass

import numpy as np

from cudflash.sampling.floatmath import expf
from cudflash.sampling.sorting import Ordering


@dataclass(frozen=True)
class Distribution:
    """What is left after the chain, in list order: the order a draw walks.

    ``ids`` (n,) int32; ``probs`` (n,) float32, normalised; ``weights`` (n,) float32, exp(logit -
    max), what the ``dist`` sampler sums.
    """

    ids: np.ndarray
    probs: np.ndarray
    weights: np.ndarray

    def draw(self, uniform: float) -> int:
        """Return the id that the ``dist`` sampler picks for a double ``uniform`` in [0, 1)."""
        return int(self.ids[draw_index(self.weights, uniform)])


class Candidates:
    """A mutable list of (id, logit, p), as llama.cpp's ``llama_token_data_array``.

    Parameters
    ----------
    logits : ndarray of shape (n,), float32
        Kept by reference, never written.
    ids : ndarray of shape (n,), int32
        0 to n - 1.
    maxima : ndarray or None
        ``sorting.column_maxima(logits)`` where it is known already.
    """

    __slots__ = (
        "_ids",
        "_maxima",
        "_offset",
        "_ordering",
        "_source",
        "fresh",
        "logits",
        "p",
        "selected",
        "sorted",
    )  # fmt: skip

    def __init__(self, logits, ids, maxima=None):
        self._ids = ids
        self.logits = logits
        self._maxima = maxima
        self.p = None
        self.sorted = False
        self.fresh = True  # ids[i] == i still holds
        self.selected = None
        self._source = None  # ids before the last sort; None: the identity
        self._ordering = None  # ties of the last sort not settled yet
        self._offset = 0  # position of the first candidate within that ordering

    @classmethod
    def of_largest(cls, logits, ids):
        """The list that ``sort`` leaves of a row whose largest logits these are, none of them tied."""
        found = cls(logits, ids)
        found.sorted, found.fresh = True, False
        return found

    def __len__(self):
        return len(self.logits)

    @property
    def ids(self):
        """Ids in list order, every tie settled; (n,) int32."""
        self.settle(0, len(self))
        return self._ids

    def id_at(self, index) -> int:
        """Id of one candidate; settles only the tie it is in."""
        self.settle(index, index + 1)
        return int(self._ids[index])

    def settle(self, start, stop):
        """Put the right one of several equal candidates at each place from start to stop."""
        ordering = self._ordering
        if ordering is None:
            return
        self._settle_at(ordering.tied(start + self._offset, stop + self._offset) - self._offset)
        if start == 0 and stop == len(self):
            self._ordering = None

    def _settle_at(self, places):
        if len(places):
            exact = self._ordering.exact(places + self._offset)
            self._ids = self._ids.copy()
            self._ids[places] = exact if self._source is None else self._source[exact]

    def replace_logits(self, logits):
        """Give every candidate another logit; order and flag stay."""
        self.logits = logits
        self._maxima = None

    def shorten(self, n):
        """Keep the first n."""
        if n < len(self):
            self.logits = self.logits[:n]
            self._maxima = None
            self._ids = self._ids[:n]
            if self.p is not None:
                self.p = self.p[:n]

    def drop_front(self, n):
        """Drop the first n."""
        self._ids, self.logits, self.p = self._ids[n:], self.logits[n:], self.p[n:]
        self._offset += n
        self.fresh, self._maxima = False, None

    def take(self, positions):
        """Keep the candidates at ``positions``, in that order."""
        if self._ordering is not None:
            tied = self._ordering.tied(self._offset, self._offset + len(self)) - self._offset
            self._settle_at(tied[np.isin(tied, positions)])
            self._ordering = None
        self._ids, self.logits = self._ids[positions], self.logits[positions]
        if self.p is not None:
            self.p = self.p[positions]
        self.fresh, self._maxima = False, None

    def sort(self, k):
        """Order by descending logit and keep the first k; ties as libstdc++ leaves them."""
        self.adopt(self.ordering(k))

    def ordering(self, k):
        """Order of the k largest, without applying it."""
        return Ordering(self.logits, k, self._maxima)

    def adopt(self, ordering):
        """Keep what ``ordering``, made from this list, keeps."""
        if self._ordering is not None:
            self.settle(0, len(self))
        self._source = None if self.fresh else self._ids
        self._ids = ordering.order if self.fresh else self._ids[ordering.order]
        self.logits = ordering.values
        if self.p is not None:
            self.p = self.p[ordering.order]
        self._ordering, self._offset = ordering, 0
        self.sorted, self.fresh, self._maxima = True, False, None

    def softmax(self, sort):
        """Set p to the float32 softmax, summed in list order; sort first if asked and needed."""
        if sort and not self.sorted:
            self.sort(len(self))
        maximum = self.logits[0] if self.sorted else self.logits.max()
        weights = expf(self.logits - maximum)
        self.p = weights / np.add.accumulate(weights)[-1]

    def distribution(self) -> Distribution:
        """Return ids and probabilities as the ``dist`` sampler leaves them."""
        weights = self.weights()
        total = np.add.accumulate(weights.astype(np.float64))[-1]
        return Distribution(self.ids.astype(np.int32), normalised(weights, total), weights)

    def weights(self):
        """exp(logit - max), float32, in list order."""
        if len(self) == 1:
            return np.ones(1, np.float32)
        maximum = self.logits[0] if self.sorted else self.logits.max()
        return expf(self.logits - maximum)


def normalised(weights, total):
    """float32 of the float64 quotient, as the ``dist`` sampler stores p."""
    return (weights.astype(np.float64) / total).astype(np.float32)


def draw_index(weights, uniform) -> int:
    """First index whose running float64 sum of weights reaches ``uniform`` times the whole sum.

    Parameters
    ----------
    weights : ndarray of shape (n,), float32
        Not negative, not all zero; n >= 1.
    uniform : float
        In [0, 1).
    """
    running = np.add.accumulate(weights, dtype=np.float64)
    return min(int(np.searchsorted(running, running[-1] * uniform)), len(weights) - 1)
