"""The acceptance gate: stops drafting where it does not pay, and tries again later.

Owns when a round may draft. Must not know drafters, targets or clocks. Invariant: while the gate is
closed the caller still feeds every committed row to the drafter, so a gate that opens finds a draft
context without holes.

The sample is the last 8 rounds that proposed something, without the first 2 after the start or
after a reopening (the draft's context is thinnest there). It counts once it has 32 proposals, or
once all 8 rounds are there: 8 rounds of verify length 3 never reach 32. Below an acceptance rate of
0.25 the gate closes for 64 committed tokens, and for twice as many at each further closing, up to
512.
"""

from dataclasses import asdict, dataclass

from cudflash.errors import UsageError

WINDOW_ROUNDS = 8
WARMUP_ROUNDS = 2
MIN_PROPOSALS = 32
FLOOR = 0.25
FIRST_PAUSE = 64  # committed tokens
LONGEST_PAUSE = 512

AUTO, ON, OFF = "auto", "on", "off"
MODES = (AUTO, ON, OFF)

OPEN, CLOSED, DISABLED = "open", "closed", "disabled"  # states, besides OFF


@dataclass(frozen=True)
class GateEvent:
    """A change of state, with its reason."""

    kind: str  # "closed", "reopened" or "disabled"
    round: int  # rounds of the answer so far
    committed: int  # tokens of the answer whose rows are committed
    accepted: int  # of the sample that decided; 0 where none did
    proposals: int
    resume_at: int | None  # committed tokens at which a closed gate opens again
    reason: str  # one sentence


@dataclass(frozen=True)
class GateRound:
    """One round that proposed something, as the gate saw it."""

    round: int
    drafted: int
    accepted: int
    warmup: bool  # not part of any sample


@dataclass(frozen=True)
class GateStatus:
    """The gate between two rounds."""

    state: str  # "open", "closed", "disabled" or "off"
    accepted: int  # of the present sample
    proposals: int
    rounds: int
    warmup_left: int  # rounds with proposals that will not count
    committed: int  # tokens of the answer whose rows are committed
    resume_at: int | None  # committed tokens at which a closed gate opens again


class AcceptanceGate:
    """State machine of one answer: open, closed, disabled (after a fault) or off.

    Parameters
    ----------
    mode : {"auto", "on", "off"}
        "on" keeps it open whatever the acceptance, "off" closed; both still keep the history.

    Attributes
    ----------
    state : {"open", "closed", "disabled", "off"}
    warmup_left : int
        Rounds with proposals that will not count.
    history : list of GateRound
    events : list of GateEvent
    closings : int
    """

    def __init__(self, mode=AUTO):
        if mode not in MODES:
            raise UsageError(f"speculative is {mode!r}, expected auto, on or off")
        self.mode = mode
        self.state = OFF if mode == OFF else OPEN
        self.history, self.events = [], []
        self.closings = 0
        self.resume_at = None
        self._floor = 0  # index into history where the present sample may begin
        self.warmup_left = WARMUP_ROUNDS

    def allows(self, round_index, committed):
        """Whether the next round may draft; reopens a closed gate whose pause is over.

        Parameters
        ----------
        round_index : int
            Rounds before it in this answer.
        committed : int
            Tokens of the answer whose rows are committed.
        """
        if self.state == CLOSED and committed >= self.resume_at:
            pause = self.resume_at - self.events[-1].committed
            self.state, self.resume_at = OPEN, None
            self._floor, self.warmup_left = len(self.history), WARMUP_ROUNDS
            self._event(
                "reopened", round_index, committed, (0, 0),
                f"drafting is tried again after {pause} tokens of plain decoding",
            )  # fmt: skip
        return self.state == OPEN

    def begin_sample(self):
        """Begin a new sample: proposals of another verify length say nothing about the present."""
        self._floor = len(self.history)

    def record(self, round_index, drafted, accepted, committed):
        """Take note of a finished round; may close the gate.

        Rounds that ended the answer are better left out: their drafts may be cut.

        Parameters
        ----------
        round_index : int
        drafted, accepted : int
            Proposals that were evaluated, and accepted ones. A round that proposed nothing says
            nothing about acceptance and is not part of the history.
        committed : int
            After the round.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} proposals accepted of {drafted}")
        if not drafted:
            return
        warmup = self.warmup_left > 0
        self.warmup_left -= warmup
        self.history.append(GateRound(round_index, drafted, accepted, warmup))
        if self.mode != AUTO or self.state != OPEN:
            return
        accepted_now, proposals, rounds = self.sample()
        counts = proposals >= MIN_PROPOSALS or rounds == WINDOW_ROUNDS
        if counts and accepted_now < FLOOR * proposals:
            self._close(round_index, committed, (accepted_now, proposals), rounds)

    def sample(self):
        """Return (accepted, proposals, rounds) of the present sample."""
        counted = [r for r in self.history[self._floor :] if not r.warmup][-WINDOW_ROUNDS:]
        return sum(r.accepted for r in counted), sum(r.drafted for r in counted), len(counted)

    def status(self, committed):
        """Return the GateStatus after ``committed`` tokens of the answer."""
        accepted, proposals, rounds = self.sample()
        return GateStatus(
            self.state, accepted, proposals, rounds, self.warmup_left, committed, self.resume_at
        )

    def disable(self, round_index, committed, reason):
        """Stop drafting for the rest of the answer."""
        if self.state not in (OFF, DISABLED):
            self.state, self.resume_at = DISABLED, None
            self._event("disabled", round_index, committed, (0, 0), reason)

    def to_dict(self):
        """Constants, state and events as plain values, for receipts."""
        return {
            "mode": self.mode,
            **constants(),
            "state": self.state,
            "closings": self.closings,
            "events": [asdict(event) for event in self.events],
        }

    def _close(self, round_index, committed, sample, rounds):
        pause = min(FIRST_PAUSE << min(self.closings, 16), LONGEST_PAUSE)
        self.closings += 1
        self.state, self.resume_at = CLOSED, committed + pause
        accepted, proposals = sample
        self._event(
            "closed", round_index, committed, sample,
            f"{accepted} of {proposals} proposals of the last {rounds} rounds were accepted, "
            f"less than {FLOOR:.0%}; drafting pauses for {pause} tokens",
        )  # fmt: skip

    def _event(self, kind, round_index, committed, sample, reason):
        self.events.append(GateEvent(kind, round_index, committed, *sample, self.resume_at, reason))


def constants():
    """The numbers that the gate decides by, as receipts and recordings name them."""
    return {
        "window_rounds": WINDOW_ROUNDS,
        "warmup_rounds": WARMUP_ROUNDS,
        "min_proposals": MIN_PROPOSALS,
        "floor": FLOOR,
        "first_pause": FIRST_PAUSE,
        "longest_pause": LONGEST_PAUSE,
    }
