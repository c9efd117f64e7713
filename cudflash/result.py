"""The outcome of one answer. Text, ids, log-probabilities and usage describe the same tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

RECEIPT_SCHEMA = "cudflash-receipt/1"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one emitted token under softmax(logits), before any sampler."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob), best first, equal ones by id


@dataclass(frozen=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int  # == len(tokens), the one that ended the answer included
    cached_tokens: int  # prompt tokens whose rows were reused


@dataclass(frozen=True)
class Result:
    """One answer.

    Attributes
    ----------
    text : str
        Without stop token and from the stop string on cut off.
    tokens : tuple of int
        Every emitted id, the one that ended the answer included.
    logprobs : tuple of TokenLogprob
        One per token when ``logprobs`` was asked for, else empty.
    usage : Usage
    finish_reason : {"stop", "length", "cancelled"}
    stopped_by : int, str or None
        Stop token or string that ended the answer.
    stats : dict
        Counts and times, see ``Session.generate``.
    receipt : dict
        How the answer was made; made on first use, because it holds the file's digest.
    row_digests : tuple of str
        SHA-256 of the full row of logits behind each token when ``row_digests`` was asked for.
    speculation : dict
        The receipt's part about drafting, which needs no file to be read: trace, gate, faults.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    finish_reason: str
    stopped_by: int | str | None
    stats: dict
    make_receipt: Callable[[], dict] = field(repr=False, compare=False)
    row_digests: tuple[str, ...] = ()
    make_part: Callable[[], dict] = field(default=dict, repr=False, compare=False)

    @cached_property
    def speculation(self):
        """What the receipt says about drafting, made on first use."""
        return self.make_part().get("speculative", {})

    @cached_property
    def receipt(self):
        """How the answer was made: see ``RECEIPT_SCHEMA``."""
        return self.make_receipt()

    def to_dict(self):
        """Plain values under the same names, for JSON."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "logprobs": [
                {"token": e.token, "logprob": e.logprob, "top": [list(t) for t in e.top]}
                for e in self.logprobs
            ],
            "usage": dict(vars(self.usage)),
            "finish_reason": self.finish_reason,
            "stopped_by": self.stopped_by,
            "stats": self.stats,
            "receipt": self.receipt,
        }
