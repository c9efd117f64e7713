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


def length_reason(length, known):
    """Why a length was taken, given the estimated speed-up of each."""
    others = ", ".join(f"{n}: {s:.2f}" for n, s in known.items() if n != length)
    return (
        f"{length} tokens are drafted per round, at about {known[length]:.2f} times the speed "
        f"of plain decoding" + (f" ({others})" if others else "")
    )


def slow_reason(length, gain, cost):
    """Why drafting pauses: tokens of a round, and the plain steps that it takes."""
    return (
        f"drafting does not pay: {length} drafts per round emit {gain:.2f} tokens in the time of "
        f"{cost:.2f} plain steps, about {gain / cost:.2f} times the speed of plain decoding"
    )


def account_reason(spent):
    """Why drafting pauses: plain steps that it has cost of late."""
    return (
        f"drafting has cost {spent:.0f} plain steps more than it saved of late, and another round "
        "could cost more than is allowed"
    )
