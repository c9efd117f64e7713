"""What the economy of drafting tells of its decisions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EconomyEvent:
    """A decision, with the numbers it rests on."""

    kind: str  # "paused", "resumed" or "length"
    round: int  # rounds of the answer so far
    committed: int  # tokens of the answer whose rows are committed
    length: int  # tokens drafted per round from here on, 0 while paused
    speedup: float | None  # estimated, of the best length; None where it is not known
    resume_at: int | None  # committed tokens at which drafting is tried again
    reason: str  # one sentence
