"""A round made twice from one state: the proof that its decisions depend on nothing unseen.

Owns what the two are compared by. Must not know how rounds are made.
"""

from dataclasses import dataclass

from cudflash.spec.acceptance import Decision


@dataclass(frozen=True)
class Rehearsal:
    """A round that was decided and dropped, and decided again from a snapshot of the generator."""

    drafted: tuple[int, ...]
    decision: object  # Decision
    replayed: object  # Decision of a chain built anew, from the same rows and the same proposals

    def difference(self, record=None):
        """What the replay, or the round as it was then made, has other than the first decision.

        Parameters
        ----------
        record : RoundRecord, optional
            Of the round that came after the rehearsal, its drafts proposed again.

        Returns
        -------
        str
            "" when everything is equal.
        """
        found = _decided_otherwise("the replay", self.decision, self.replayed)
        if found or record is None:
            return found
        if record.drafted != self.drafted:
            return f"round {record.index} drafted {record.drafted}, before {self.drafted}"
        made = Decision(record.decided, record.accepted, record.tested, record.end, record.trials)
        return _decided_otherwise(f"round {record.index} made again", self.decision, made)


def _decided_otherwise(what, first, other):
    for index, (a, b) in enumerate(zip(first.trials, other.trials)):
        if a != b:
            return f"{what} has {b} as trial {index}, expected {a}"
    return "" if other == first else f"{what} has decided {other}, expected {first}"
