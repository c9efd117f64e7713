"""What happens during an answer, as values: the only thing a front end needs to watch.

Plain data, no behaviour. The order is: one ``Started``, ``PrefixReused`` (when a session already
holds rows), any number of ``PromptProgress``, one ``TokenEvent`` per token, one ``Finished``. With a
drafter, each round's tokens are followed by its ``RoundFinished``, and ``GateChanged``,
``EconomyChanged``, ``DrafterFailed`` and ``Diagnosed`` come where they happen.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudflash.model.draft_context import HeldRows
    from cudflash.result import Result, TokenLogprob
    from cudflash.spec.diagnosis import Finding
    from cudflash.spec.economy import EconomyEvent
    from cudflash.spec.gate import GateEvent, GateStatus
    from cudflash.spec.guard import DrafterFault
    from cudflash.spec.stats import RoundRecord


@dataclass(frozen=True)
class Started:
    """An answer begins."""

    facts: dict  # what will run and how it is conditioned, see ``cudflash.answer_facts``


@dataclass(frozen=True)
class PrefixReused:
    """How much of the prompt a session did not have to evaluate again, and why not more."""

    cached_tokens: int
    prompt_tokens: int
    first_difference: int | None  # index of the first prompt token that differs; None: no token does
    reason: str  # one sentence


@dataclass(frozen=True)
class PromptProgress:
    """A part of the prompt has been evaluated."""

    done: int  # prompt tokens whose rows are in the caches, reused ones included
    total: int
    context: "HeldRows | None" = None  # what the draft remembers; None without a draft's context


@dataclass(frozen=True)
class TokenEvent:
    """One token of the answer."""

    index: int  # 0 for the first
    token: int
    text: str  # what it adds to the text; "" while text is held back
    logprob: "TokenLogprob | None"


@dataclass(frozen=True)
class RoundFinished:
    """A round of an answer with a drafter is over; its tokens came before.

    Just before, except in a pause of a quick target: there up to 64 rounds are told at once, the
    last of them with gate and context.
    """

    record: "RoundRecord"  # proposals, what was accepted, times
    gate: "GateStatus | None" = None  # after the round
    context: "HeldRows | None" = None  # what the draft remembers; None without a draft's context


@dataclass(frozen=True)
class GateChanged:
    """Drafting was paused, tried again, or ended for this answer."""

    event: "GateEvent"  # with its reason


@dataclass(frozen=True)
class EconomyChanged:
    """Measured times have paused drafting, resumed it, or changed how much is drafted."""

    event: "EconomyEvent"  # with its reason and numbers


@dataclass(frozen=True)
class DrafterFailed:
    """The drafter had a fault; the answer goes on by plain decoding."""

    fault: "DrafterFault"  # with its reason


@dataclass(frozen=True)
class Diagnosed:
    """A signature of bad conditioning was seen."""

    finding: "Finding"  # name, sentence, numbers


@dataclass(frozen=True)
class Finished:
    """The answer is complete; ``text`` is the last held-back part (only after a cancellation)."""

    result: "Result"
    text: str
