"""Drafters: the protocol, and the scripted ones that tests and ``verify`` use.

See ``cudflash.spec.drafters`` for the order of calls; derive from ``TokenDrafter`` to write one.
"""

from cudflash.spec.dflash import DFlashDrafter
from cudflash.spec.drafters import (
    AlwaysWrong,
    AtMost,
    Cycle,
    DraftContext,
    Drafter,
    KeepK,
    NoDrafter,
    Oracle,
    Random,
    TokenDrafter,
)
from cudflash.spec.mtp import MTPDrafter
from cudflash.spec.proposals import (
    POINT_MASS,
    DraftSampler,
    Proposal,
    ProposalDistribution,
)

__all__ = [
    "POINT_MASS",
    "AlwaysWrong",
    "AtMost",
    "Cycle",
    "DFlashDrafter",
    "DraftContext",
    "DraftSampler",
    "Drafter",
    "KeepK",
    "MTPDrafter",
    "NoDrafter",
    "Oracle",
    "Proposal",
    "ProposalDistribution",
    "Random",
    "TokenDrafter",
]
