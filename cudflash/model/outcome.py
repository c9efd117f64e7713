"""What a pass with logits tells the host: one int32 buffer, of which one copy takes the beginning.

Owns the order of its parts: what every pass tells comes first, what few passes tell comes last.
Must not know what the numbers decide. A round is told by one copy, whatever it consists of:

============ ====================================== ==============================================
part         words                                  meaning
============ ====================================== ==============================================
finite       1                                      whether all logits are finite
next_ids     rows                                   most likely id of each row
decision     5 + drafts                             from ``ops.accept_greedy``
box          up to BOX_WORDS                        what the drafter tells of its drafts
candidates   2 * CANDIDATES for each row            ids, then values of the largest logits
============ ====================================== ==============================================
"""

from dataclasses import dataclass

import numpy as np

CANDIDATES = 65  # of a row: enough for top_k 64 and the one that would come next
BOX_WORDS = 128
DECISION_WORDS = 4  # before the tokens
STOP_IDS = 32  # that a decision on the device can heed


@dataclass(frozen=True, eq=False)
class DraftSource:
    """Where a drafter leaves its drafts on the device, and what it tells the host about them.

    Attributes
    ----------
    ids : buffer of shape (n,), int32
        Most drafts that there can be; the first ones count.
    box : buffer of shape (at most BOX_WORDS,), int32
    """

    ids: object
    box: object

    @property
    def fits(self):
        """Whether a copy of the outcome has room for it."""
        return len(self.box) <= BOX_WORDS


def outcome_words(rows):
    """int32 words of an Outcome."""
    return 1 + rows + DECISION_WORDS + rows + BOX_WORDS + rows * 2 * CANDIDATES


class Outcome:
    """The buffer of a workspace.

    Parameters
    ----------
    allocator : Allocator
    rows : int
        Rows of logits, at most.
    """

    def __init__(self, allocator, rows):
        self._rows = rows
        self._buffer = allocator.empty("io", (outcome_words(rows),), np.int32)
        self._box_at = 1 + rows + DECISION_WORDS + rows
        self._candidates_at = self._box_at + BOX_WORDS
        self.finite = self._buffer[:1]
        self.next_ids = self._buffer[1 : 1 + rows]

    def decision(self, n_drafts):
        """Buffer (5 + n_drafts,) for ``accept_greedy``."""
        start = 1 + self._rows
        return self._buffer[start : start + DECISION_WORDS + 1 + n_drafts]

    def box(self, n_words):
        """Buffer (n_words,) for what a drafter tells."""
        return self._buffer[self._box_at : self._box_at + n_words]

    def candidates(self, n_rows, k):
        """Buffers (n_rows, k) of ids, int32, and of values, float32, largest first."""
        flat = self._buffer[self._candidates_at :].reshape(self._rows, 2 * CANDIDATES)[:n_rows]
        return flat[:, :k], flat.view(np.float32)[:, CANDIDATES : CANDIDATES + k]

    def read(self, ops, n_rows, k=0, drafted=False):
        """Copy what a pass has told.

        Parameters
        ----------
        n_rows : int
            Rows of logits.
        k : int
            Candidates of each row that the pass was recorded with.
        drafted : bool
            Whether it evaluated drafts that the host did not know.

        Returns
        -------
        Told
        """
        end = 1 + n_rows
        if drafted:
            end = self._candidates_at
        if k:
            end = self._candidates_at + n_rows * 2 * CANDIDATES
        return Told(self, ops.download(self._buffer[:end]), n_rows, k)


class Told:
    """Host copy of what one pass has told."""

    def __init__(self, outcome, words, n_rows, k):
        self._outcome, self._words, self._n_rows, self._k = outcome, words, n_rows, k

    @property
    def finite(self):
        """Whether all logits are finite."""
        return bool(self._words[0])

    @property
    def next_ids(self):
        """Most likely id of each row."""
        return self._words[1 : 1 + self._n_rows]

    @property
    def decision(self):
        """(drafts accepted, how it ended, tokens) of ``accept_greedy``."""
        start = 1 + self._outcome._rows
        _, accepted, n, end = self._words[start : start + DECISION_WORDS].tolist()
        return accepted, end, self._words[start + DECISION_WORDS :][:n].tolist()

    @property
    def box(self):
        """What the drafter has told, with whatever lies behind it."""
        return self._words[self._outcome._box_at : self._outcome._candidates_at]

    def candidates(self, row):
        """(ids, values) of the largest logits of a row, largest first; None if none were asked for."""
        if not self._k:
            return None
        start = self._outcome._candidates_at + row * 2 * CANDIDATES
        words = self._words[start : start + 2 * CANDIDATES]
        return words[: self._k], words[CANDIDATES:].view(np.float32)[: self._k]
