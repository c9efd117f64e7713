"""What rounds and their parts have cost lately on an engine, and what they have brought.

Owns the figures; answers of an engine share the costs. Must not know decisions, drafters or clocks:
it is given times.
"""

from collections import deque

KEPT = 0.97  # weight of a round against the next one: about the last 33 rounds count
PRIOR = 2.0  # rounds by which a position counts as the one before it, until it is known better
MIN_ROWS = 16  # of a prompt's pass, before its time per row is a bound for a block's


def median(values):
    """Of a sequence that is not empty. The module statistics takes 1 % of a warm start."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2


class Meter:
    """Median of the newest times."""

    def __init__(self, size=9, skip=0):
        self._ms = deque(maxlen=size)
        self._former = None  # median before the times were forgotten
        self._left = skip  # first ones that do not count: they may contain preparations

    def add(self, ms):
        """Take a time in milliseconds."""
        if self._left:
            self._left -= 1
        else:
            self._ms.append(ms)

    def extend(self, times):
        """Take times that are known to contain no preparations."""
        self._ms.extend(times)

    def clear(self):
        """Forget all times; what they came to holds until there are new ones."""
        self._former = self.ms
        self._ms.clear()

    @property
    def count(self):
        """Times that count."""
        return len(self._ms)

    @property
    def ms(self):
        """Median, None before there is one."""
        return median(self._ms) if self._ms else self._former


class RoundCosts:
    """Costs of an engine; shared by its answers.

    Attributes
    ----------
    plain : Meter
        Of plain rounds.
    prepare_ms : float or None
        What preparing a pass of a new shape takes, at least (recording it).
    row_ms : float or None
        Per row of a long pass, at least; no row of a shorter one costs less.
    """

    def __init__(self):
        self.plain = Meter(skip=1)
        self.prepare_ms = self.row_ms = None
        self._drafting = {}
        self._best = {}
        self._draft_ms, self._verify_ms = {}, {}

    def meter(self, drafter, length):
        """The Meter of rounds in which a drafter drafted ``length`` tokens."""
        return self._drafting.setdefault((drafter, length), Meter())

    def best(self, drafter):
        """The length that paid most when this was last known, else None."""
        return self._best.get(drafter)

    def remember(self, drafter, length):
        """Take down the length that pays most."""
        self._best[drafter] = length

    # -- parts of a round, measured outside of rounds -----------------------------------------

    def note_preparation(self, ms):
        """Take the time that preparing a pass has taken."""
        self.prepare_ms = ms if self.prepare_ms is None else min(ms, self.prepare_ms)

    def note_rows(self, n_rows, ms):
        """Take the time of a long pass."""
        if n_rows >= MIN_ROWS:
            per_row = ms / n_rows
            self.row_ms = per_row if self.row_ms is None else min(per_row, self.row_ms)

    def note_draft(self, drafter, ms):
        """Take the time of a drafter's pass."""
        self._draft_ms[drafter] = ms

    def note_verify(self, length, ms):
        """Take the time of a target pass that verifies ``length`` drafts."""
        self._verify_ms[length] = ms

    def draft_ms(self, drafter):
        """Of a drafter's pass; None if it was not measured by itself."""
        return self._draft_ms.get(drafter)

    def verify_ms(self, length):
        """Of the target pass of a round that drafts so many; None if not measured by itself."""
        return self._verify_ms.get(length)


class Gains:
    """What rounds of an answer emit, from the acceptance of late at each position.

    Parameters
    ----------
    length : int
        Positions.

    Attributes
    ----------
    weight : float
        Rounds that count.
    """

    def __init__(self, length):
        self.weight = 0.0
        self._tested, self._accepted = [0.0] * length, [0.0] * length

    def see(self, drafted, accepted):
        """Take note of a round."""
        self.age(KEPT)
        self.weight += 1
        for position in range(min(accepted + 1, drafted)):
            self._tested[position] += 1
            self._accepted[position] += position < accepted

    def age(self, factor):
        """Let what was seen so far count that much of what it did."""
        self.weight *= factor
        self._tested = [factor * n for n in self._tested]
        self._accepted = [factor * n for n in self._accepted]

    def of(self, length):
        """Tokens that a round of ``length`` drafts is expected to emit."""
        total, survive, rate = 1.0, 1.0, 1.0
        for tested, accepted in zip(self._tested[:length], self._accepted[:length]):
            rate = (accepted + PRIOR * rate) / (tested + PRIOR)
            survive *= rate
            total += survive
        return total
