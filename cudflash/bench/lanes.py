"""Lanes: the ways of decoding that are measured against one another.

Owns how a drafter is named and which verify lengths it is run with. Must not know how a lane is
timed. Invariant: every drafted lane has the plain lane of the same engine beside it.

A drafter is named by its kind. Kinds that come from a file (``dflash``, ``dflash2``, and what later
versions load) are found among the drafts that were given; the scripted ones need none:

========== =================================================
oracle     proposes the plain answer: the ceiling of verification
wrong      proposes nothing right: the floor
keep-K     K right tokens per block
random     tokens by chance
========== =================================================
"""

from dataclasses import dataclass

from cudflash.drafters import AlwaysWrong, KeepK, Oracle, Random
from cudflash.errors import UsageError
from cudflash.spec.acceptance import MATCH, RULES
from cudflash.spec.verify_length import (
    check_verify_length,
    default_verify_length,
    legal_lengths,
)

PLAIN = "plain"
ON, AUTO = "on", "auto"  # modes of a drafted lane
SCRIPTED = ("oracle", "wrong", "keep-K", "random")
RANDOM_SEED = 5  # of the random drafter; any will do, it must only stay


@dataclass(frozen=True)
class Lane:
    """One way of decoding.

    Attributes
    ----------
    drafter : str
        "plain", the kind of a draft, or a scripted drafter.
    verify_length : int or None
    accept : str or None
        Rule as asked for.
    scripted : bool
    mode : {"on", "auto"} or None
        "auto" drafts while it pays; the verify length is then the longest one.
    """

    drafter: str
    verify_length: int | None = None
    accept: str | None = None
    scripted: bool = False
    mode: str | None = None

    @property
    def name(self):
        """Short name, unique in a run: ``dflash2 k7``, ``dflash2 k7 ratio auto``, ``plain``."""
        if self.drafter == PLAIN:
            return PLAIN
        rule = "" if self.accept == MATCH else f" {self.accept}"
        mode = f" {self.mode}" if self.mode == AUTO else ""
        return f"{self.drafter} k{self.verify_length}{rule}{mode}"

    def to_dict(self):
        """What a record says about it."""
        return {
            "name": self.name, "drafter": self.drafter, "verify_length": self.verify_length,
            "accept": self.accept, "scripted": self.scripted, "mode": self.mode,
        }  # fmt: skip


def make_scripted(name, answer):
    """Return a scripted drafter that knows the plain answer's ids."""
    if name == "oracle":
        return Oracle(answer)
    if name == "wrong":
        return AlwaysWrong(answer)
    if name == "random":
        return Random(RANDOM_SEED)
    return KeepK(answer, int(name.removeprefix("keep-")))


def is_scripted(name):
    """Whether a drafter follows a script."""
    kept = name.removeprefix("keep-")
    return name in ("oracle", "wrong", "random") or (kept != name and kept.isdecimal())


def choose_lanes(names, kinds, lengths, rules, blocks, modes=(ON,)):
    """Return lanes by engine: kind of its draft (None without one) -> drafted lanes.

    Parameters
    ----------
    names : sequence of str
        Drafters asked for; empty: every draft that was given.
    kinds : sequence of str
        Kinds of the drafts that were given, in order.
    lengths : sequence of int
        Verify lengths asked for; empty: the default one of each drafter.
    rules : sequence of str
    blocks : dict
        Kind -> block size of the draft.
    modes : sequence of {"on", "auto"}

    Returns
    -------
    dict

    Raises
    ------
    UsageError
        For a drafter that is not there, or a length that it cannot have.
    """
    for rule in rules:
        if rule not in RULES:
            raise UsageError(f"accept is {rule!r}, expected {' or '.join(RULES)}")
    for mode in modes:
        if mode not in (ON, AUTO):
            raise UsageError(f"speculative is {mode!r}, expected on or auto")
    groups = {kind: [] for kind in kinds if not names or kind in names}
    scripted = [name for name in names if is_scripted(name)]
    for name in names:
        if name not in kinds and name not in scripted:
            have = ", ".join(kinds) or "none"
            raise UsageError(
                f"the drafter {name!r} is not there: the drafts given are {have}, the scripted ones "
                f"{', '.join(SCRIPTED)}; pass the file of a {name} draft with --draft"
            )
    if not groups:
        groups = {None: []}
    wanted = [(kind, kind) for kind in groups if kind is not None]
    wanted += [(next(iter(groups)), name) for name in scripted]  # on the first engine
    _check_lengths(lengths, [blocks.get(name) for _, name in wanted])
    for kind, name in wanted:
        length_of = _lengths(lengths, blocks.get(name))
        groups[kind] += [
            Lane(name, length, rule, name in scripted, mode)
            for length in length_of for rule in rules for mode in modes
        ]  # fmt: skip
    listed = [lane.name for lanes in groups.values() for lane in lanes]
    for name in listed:
        if listed.count(name) > 1:
            raise UsageError(f"the lane {name!r} was asked for twice; pass it once")
    return groups


def _check_lengths(lengths, blocks):
    """Refuse a length that no drafter of the run can have; one that some can have is fine."""
    for length in lengths:
        if not any(length in legal_lengths(block) for block in blocks):
            check_verify_length(length, blocks[0] if blocks else None)


def _lengths(lengths, block):
    """The lengths asked for that a drafter can have, or its default one."""
    legal = legal_lengths(block)
    return [n for n in lengths if n in legal] if lengths else [default_verify_length(block)]
