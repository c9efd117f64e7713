"""What an answer with a drafter was asked for, checked.

Owns nothing but the values. Must not know how rounds are made.
"""

from dataclasses import dataclass

from cudflash.spec.economy import Economy


@dataclass(frozen=True)
class SpecOptions:
    """Options of the rounds of one answer."""

    mode: str  # "auto" or "on"
    accept: str  # "match" or "ratio"
    limits: object  # Limits
    settings: tuple = ()  # of the draft, see ``diagnose``
    costs: object = None  # RoundCosts of the engine; None leaves "auto" to the gate alone
    unseen: bool = False  # drafts may stay on the device until the target has evaluated them

    def economy(self, drafter, unrecorded, steady):
        """Return the Economy of an answer with this drafter; the others: see there."""
        length = self.limits.verify_length
        return Economy(self.costs, drafter.name, length, drafter.timed, unrecorded, steady)
