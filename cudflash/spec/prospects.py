"""Targets so quick that preparing to draft can cost more than drafting may: what to find out first.

Owns the order in which parts of a round are measured before one is made, and what each step may
cost. Must not know the account, answers or clocks. All steps are plain steps: p, the time of one.

A round that drafts n tokens needs a pass of the draft and one of the target over n + 1 rows. Before
either is recorded, what it takes is bounded from below: a pass of n + 1 rows takes p at least, and
n + 1 times what a row takes in a long pass (the prompt's: no row of a shorter one costs less). So

    ceiling(n) = (n + 1) / (verify + draft)

is the speed-up when every draft is accepted, and what is measured only lowers it. Where no length
has a ceiling of ``WORTH``, no draft is worth a trial, and none is made. Of those that have one, the
likeliest is the one that is fastest when each draft is accepted with probability ``LIKELY``. Of a pass
that was never timed, each row but the first takes what one takes in a pass that was, or else in a long
one, or else ``ROW`` steps. The next thing to do is the first of these that was not done:

* time the draft's pass, which is recorded first;
* time the target's pass for the likeliest length, likewise;
* a trial: the draft is given the rows that it has missed, and rounds are made.

Each is told with its price, so that it is paid for before it is begun.
"""

from dataclasses import dataclass

# A prompt's pass that takes less, whatever its rows: it may have been the loading of kernels.
SHORT_MS = 50.0
QUICK_MS = 2.0  # a plain step below which the work around it shows (about 0.02 ms per round)
WORTH = 1.15  # least ceiling that is worth a trial: real drafts are not all accepted
LIKELY = 0.7  # share of accepted drafts: 0.6 to 0.8 for drafts that are worth a thought
RECORDINGS = 3.0  # of a pass like the target's, in all: verifying, draft, its context, taps
DRAFT_SHARE = 0.7  # of what recording a pass of the target takes, for the draft's
GUESS = 3.0  # plain steps of a draft pass that was never timed
ROW = 0.6  # plain steps of a row in a target pass that was never timed
TAPPED = 0.1  # plain steps more for a round that captures layers and keeps them

CONTEXT_SHARE = 0.3  # of recording a pass of the draft, for one over committed rows
TIMINGS = 2  # runs of a pass that is timed, the first one not counted
SUSPECT = 8.0  # plain steps of a pass beyond which it is timed again

DRAFT, VERIFY, TRY = "draft", "verify", "try"


@dataclass(frozen=True)
class Stage:
    """What to do next, and what it takes in plain steps."""

    what: str  # "draft", "verify" or "try"
    length: int
    steps: float


@dataclass(frozen=True)
class Unrecorded:
    """Passes of drafting that were never made on the memory of an answer; 0 or 1 each."""

    taps: int  # the target's, one row, with the layers that the draft reads
    verify: int  # the target's over a block
    draft: int
    context: int  # the draft's over committed rows, a small one

    @property
    def in_all(self):
        """What recording them takes, in passes of the target."""
        drafter = self.draft + CONTEXT_SHARE * self.context
        return self.taps + self.verify + DRAFT_SHARE * drafter


ALL = Unrecorded(taps=1, verify=1, draft=1, context=1)
TIMED = Unrecorded(taps=1, verify=0, draft=0, context=1)  # after both stages


class Prospects:
    """What is known about a pair on an engine before it drafts.

    Parameters
    ----------
    costs : RoundCosts
    drafter : str
        Its name.
    lengths : tuple of int
        That may be drafted.
    timed : bool
        Whether its pass can be timed by itself. Of one that cannot, nothing is known.
    unrecorded : callable, optional
        The ``Unrecorded`` of a length: an engine whose earlier answers have come that far has less to
        prepare. ``ALL`` if absent.
    """

    def __init__(self, costs, drafter, lengths, timed, unrecorded=None):
        self._costs, self._drafter, self._lengths = costs, drafter, lengths
        self._timed, self._unrecorded = timed, unrecorded
        self.warmed = False  # in this answer the draft was given missed rows before

    @property
    def preparation(self):
        """Plain steps that preparing to draft takes in all, at least; 0 if unknown."""
        ms, plain = self._costs.prepare_ms, self._costs.plain.ms
        if ms is None or not plain:
            return 0.0
        return (RECORDINGS if self._timed else 1.0) * ms / plain

    def draft(self):
        """Plain steps of the draft's pass, None if not known."""
        ms = self._costs.draft_ms(self._drafter)
        return None if ms is None else ms / self._costs.plain.ms

    def verify(self, length):
        """Plain steps of the target's pass, at least."""
        plain, ms = self._costs.plain.ms, self._costs.verify_ms(length)
        if ms is not None:
            return ms / plain
        row = self._costs.row_ms
        return 1.0 if row is None else max(1.0, (length + 1) * min(1.0, row / plain))

    def measured(self, length):
        """Milliseconds of a round, from its parts; None unless those that can be were timed."""
        untimed = GUESS * (self._costs.plain.ms or 0.0)
        draft = self._costs.draft_ms(self._drafter) if self._timed else untimed
        verify = self._costs.verify_ms(length)
        return None if draft is None or verify is None else draft + verify

    def ceiling(self, length):
        """Speed-up when every draft is accepted, at most."""
        return (length + 1) / (self.verify(length) + (self.draft() or 0.0))

    def row(self):
        """Plain steps of another row in the target's pass, as far as is known."""
        plain, row = self._costs.plain.ms, self._costs.row_ms
        timed = [n for n in self._lengths if self._costs.verify_ms(n) is not None]
        if timed:
            return max(0.0, self._costs.verify_ms(timed[-1]) / plain - 1.0) / timed[-1]
        return ROW if row is None else min(1.0, row / plain)

    def likely(self, length):
        """Speed-up when each draft is accepted with probability ``LIKELY``."""
        timed = self._costs.verify_ms(length) is not None
        verify = self.verify(length) if timed else 1.0 + length * self.row()
        gain = (1.0 - LIKELY ** (length + 1)) / (1.0 - LIKELY)
        return gain / (verify + (self.draft() or 0.0))

    def best(self):
        """The likeliest length; where none is worth a trial, the one with the highest ceiling."""
        worth = [n for n in self._lengths if self.ceiling(n) >= WORTH]
        rank = self.likely if worth else self.ceiling
        return max(worth or self._lengths, key=lambda n: (rank(n), -n))

    def next_stage(self, reach, round_steps):
        """Return the Stage that comes next, None where no trial is worth it.

        Parameters
        ----------
        reach : int
            Rows that the draft has to be given before it drafts.
        round_steps : callable
            Plain steps that the rounds of a trial may lose, by length.
        """
        length = self.best()
        if self.ceiling(length) < WORTH:
            return None
        left = None if self._unrecorded is None else self._unrecorded(length)
        prepare = (self._costs.prepare_ms or 0.0) / self._costs.plain.ms
        if self._timed and self.draft() is None:
            return Stage(DRAFT, length, DRAFT_SHARE * (left or ALL).draft * prepare + TIMINGS * GUESS)
        if self._costs.verify_ms(length) is None:
            least = max(self.verify(length), ROW * (length + 1))
            return Stage(VERIFY, length, (left or ALL).verify * prepare + TIMINGS * least)
        missing = reach * TAPPED
        if not self.warmed:
            if self._timed:
                missing += prepare * (left or TIMED).in_all
            elif reach:
                missing += prepare * (left or TIMED).taps
        return Stage(TRY, length, missing + round_steps(length))

    def price_of_length(self, length):
        """Plain steps that recording the passes of another length takes."""
        left = ALL if self._unrecorded is None else self._unrecorded(length)
        prepare = (self._costs.prepare_ms or 0.0) / self._costs.plain.ms
        return prepare * (left.verify + DRAFT_SHARE * left.draft)

    def sentence(self):
        """What the ceiling of the best length is, and why."""
        length = self.best()
        draft, verify = self.draft(), self.verify(length)
        if self._timed and draft is None:
            return (
                f"a plain step takes {self._costs.plain.ms:.2f} ms, and preparing to draft at least "
                f"{self.preparation:.0f} of them"
            )
        least = "" if self._costs.verify_ms(length) is not None else "at least "
        parts = f"verifying {length} drafts takes {least}{verify:.1f}"
        if draft is not None:
            parts = f"a draft pass takes {draft:.1f} plain steps and {parts}"
        else:
            parts += " plain steps"
        return (
            f"{parts}, so drafting would run at {self.ceiling(length):.2f} times the speed of plain "
            "decoding at most, if every draft was accepted"
        )
