"""Lanes: the ways of decoding that are measured against one another.

Owns how a drafter is named and which verify lengths it is run with. Must not know how a lane is
timed. Invariant: every drafted lane has the plain lane of the same engine beside it.

A drafter is named by its kind. Kinds that come from a file (``dflash``, ``dflash2``, and what later
versions load) are found among the drafts that were given. ``mtp`` is the block that some targets
bring in their own file. The scripted ones need no file:

========== =================================================
oracle     proposes the plain answer: the ceiling of verification
wrong      proposes nothing right: the floor
keep-K     K right tokens per block
random     tokens by chance
========== =================================================

Any number of drafted tokens k that a drafter can have may be asked for. The engine's verify lengths
are pinned; another k is verified within the next longer one, its drafter being held to k tokens.
"""

from dataclasses import dataclass

from cudflash.drafters import AlwaysWrong, KeepK, Oracle, Random
from cudflash.errors import UsageError
from cudflash.spec.acceptance import MATCH, RULES
from cudflash.spec.verify_length import (
    LEGAL,
    check_verify_length,
    default_verify_length,
    legal_lengths,
)

PLAIN = "plain"
ON, AUTO = "on", "auto"  # modes of a drafted lane
SCRIPTED = ("oracle", "wrong", "keep-K", "random")
MTP, MTP_LENGTH = "mtp", 3  # and its length where none is asked for
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


def choose_lanes(names, kinds, lengths, rules, blocks, modes=(ON,), has_mtp=False):
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
    has_mtp : bool
        Whether the target's file has an MTP block.

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
    own = [name for name in names if name == MTP and has_mtp]
    for name in names:
        if name not in (*kinds, *scripted, *own):
            if name == MTP:
                raise UsageError(
                    "the drafter 'mtp' is not there: the model's file has no MTP block; pass a model "
                    "that was converted with it, or a draft"
                )
            have = ", ".join(kinds) or "none"
            raise UsageError(
                f"the drafter {name!r} is not there: the drafts given are {have}, the scripted ones "
                f"{', '.join(SCRIPTED)}; pass the file of a {name} draft with --draft"
            )
    if not groups:
        groups = {None: []}
    wanted = [(kind, kind) for kind in groups if kind is not None]
    wanted += [(next(iter(groups)), name) for name in (*own, *scripted)]  # on the first engine
    legal = [_legal(name, blocks.get(name)) for _, name in wanted]
    for length in lengths:  # one that only some of the drafters can have is fine
        if not any(length in some for some in legal):
            _refuse_length(length, [name for _, name in wanted], legal, blocks)
    for kind, name in wanted:
        length_of = _lengths(lengths, name, blocks.get(name))
        groups[kind] += [
            Lane(name, length, rule, name in scripted, mode)
            for length in length_of for rule in rules for mode in modes
        ]  # fmt: skip
    listed = [lane.name for lanes in groups.values() for lane in lanes]
    for name in listed:
        if listed.count(name) > 1:
            raise UsageError(f"the lane {name!r} was asked for twice; pass it once")
    return groups


def _refuse_length(length, names, legal, blocks):
    """Raise UsageError: no drafter of the bench can be held to so many tokens."""
    longest = max((some[-1] for some in legal if some), default=None)
    if longest is None:  # no drafter, or a block too short for any length
        check_verify_length(length, blocks.get(names[0]) if names else None)
        return
    raise UsageError(
        f"verify length is {length}, expected a whole number from 1 to {longest} with the "
        f"drafter{'s' if len(names) > 1 else ''} {', '.join(names)}; pass one of them"
    )


def _legal(name, block):
    """Numbers of drafted tokens that a drafter can have."""
    longest = LEGAL[-1] if name == MTP else max(legal_lengths(block), default=0)
    return range(1, longest + 1)


def _lengths(lengths, name, block):
    """The lengths asked for that a drafter can have, or its default one."""
    if not lengths:
        return [MTP_LENGTH if name == MTP else default_verify_length(block)]
    return [n for n in lengths if n in _legal(name, block)]
