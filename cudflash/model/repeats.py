"""Layers that are recorded as copies of an earlier one, which takes a fraction of the time.

Owns which layers are asked to be. Must not know what a launch is; the backend decides whether a copy
is what recording would give, and may decline for any reason.
"""

from dataclasses import fields, is_dataclass


def buffers_of(*owners):
    """All that some dataclass instances hold, tuples taken apart, in the order of the fields."""
    found = []
    for owner in owners:
        if is_dataclass(owner):
            owner = tuple(getattr(owner, field.name) for field in fields(owner))
        if isinstance(owner, tuple):
            found += buffers_of(*owner)
        else:
            found.append(owner)
    return found


class Repeats:
    """Which layers of a model, each with its cache, can stand for each other.

    Parameters
    ----------
    ops : module
    kinds : sequence of hashable
        Per layer, all that decides about its steps beside its buffers.
    owners : sequence of tuple of dataclass
        Per layer, what holds the buffers that are its own.
    """

    def __init__(self, ops, kinds, owners):
        self._ops, self._kinds, self._owners = ops, kinds, owners
        self._moves = {}  # of pairs of layers

    def moves(self, layer, other):
        """From the buffers of one layer to those of another, None where they are not of a kind."""
        pair = layer, other
        if pair not in self._moves:
            alike = self._kinds[layer] == self._kinds[other]
            self._moves[pair] = self._ops.moves(
                *(buffers_of(*self._owners[index]) for index in pair)
            ) if alike else None  # fmt: skip
        return self._moves[pair]

    def recorder(self):
        """A Recorder, for the layers of one pass."""
        return Recorder(self._ops, self)


class Recorder:
    """What one pass has recorded so far."""

    def __init__(self, ops, repeats):
        self._ops, self._repeats, self._known = ops, repeats, []

    def record(self, layer, rows, steps):
        """Record the steps of a layer, as a copy of those of an earlier one where there is one.

        Parameters
        ----------
        layer : int
        rows : hashable
            What else the steps depend on.
        steps : callable
            Records them.
        """
        for other, same, first, last in self._known:
            if same == rows and (moves := self._repeats.moves(other, layer)) is not None:
                if self._ops.repeat(first, last, moves):
                    return
        first = self._ops.recorded()
        steps()
        if first is not None:
            self._known.append((layer, rows, first, self._ops.recorded()))
