"""The drafter protocol, and drafters that follow a script.

Owns what a drafter must offer. Must not know targets or acceptance rules. Invariant: a drafter can
be wrong about the next token, never about the answer: whatever it proposes, the answer is the
target's.

The life of a drafter in one answer::

    rewind(kept)                          the rows that a session goes on from
    observe(chunk, taps); commit(n)       every chunk of the prompt
    each round:
        propose(anchor, n, context)       only when the round may draft
        observe(rows, taps)               rows of the block that the target has evaluated, anchor
                                          first: at least all that may be kept
        commit(n) or rollback()           the first n of them became part of the answer

Every round observes, those without drafts included, so ``length`` equals the committed rows of the
target at every ``propose``. A drafter that has a method ``expect(n)`` is told before ``observe``
how many rows of the prompt are sure to follow the observed ones; one that has ``checkpoint()`` is
told after a ``commit`` that later prompts may go back to just these rows. One that has ``start``,
``learn`` and ``source`` can leave its tokens on the device: ``start(anchor, n, context)`` returns
how many it will have left in ``source`` (``model.outcome.DraftSource``), and ``learn(words)``, which
comes after the target has evaluated them, returns the Proposal. Writing one's own:
derive from ``TokenDrafter`` and write ``propose``.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cudflash.errors import UsageError
from cudflash.spec.proposals import NOTHING, POINT_MASS, Proposal, uniform


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know when it proposes.

    Attributes
    ----------
    tokens : sequence of int
        Committed ids, prompt and answer, without the anchor. Not to be changed.
    n_past : int
        Their number: the anchor's position.
    n_prompt : int
        How many of them are the prompt.
    vocab_size : int
    sampler : DraftSampler or None
        Set under ``ratio``: proposals may be drawn with it, or be a point mass. None: propose the
        most likely token, only equality counts.
    rng : Mt19937 or None
        The answer's generator, set together with ``sampler``; the only source of chance that a
        replay reproduces. Never a generator of one's own with the answer's seed: its draws would
        repeat those of the acceptance rule and bias the answer.
    """

    tokens: Sequence[int]
    n_past: int
    n_prompt: int
    vocab_size: int
    sampler: object = None
    rng: object = None

    @property
    def answer_index(self):
        """Index of the anchor in the answer: 0 for the token that the prompt pass has chosen."""
        return self.n_past - self.n_prompt


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; see the module for the order of calls.

    Attributes
    ----------
    name : str
        For statistics and receipts.
    taps : tuple of int
        Target layers (0-based) whose output residual ``observe`` gets, in this order; () for none.
    block_size : int or None
        Rows of its block, B: it can propose B - 1 tokens. None for no limit.
    length : int
        Committed rows it has seen, the prompt's included.
    """

    name: str
    taps: tuple[int, ...]
    block_size: int | None
    length: int

    def propose(self, anchor: int, n: int, context: DraftContext) -> Proposal:
        """Propose at most ``n`` tokens to follow ``anchor``; none is a fine answer."""

    def observe(self, tokens: Sequence[int], taps) -> None:
        """Take the rows that the target has just evaluated; tentative until ``commit``.

        Parameters
        ----------
        tokens : sequence of int
            Their ids, the first at position ``length``.
        taps : buffer of shape (len(tokens), len(self.taps), hidden_dim), float32, or None
            Valid during the call only. None for a drafter without taps.
        """

    def commit(self, n: int) -> None:
        """Keep the first ``n`` observed rows and drop the others."""

    def rollback(self) -> None:
        """Drop what was observed and proposed since the last commit; idempotent."""

    def rewind(self, length: int) -> int:
        """Go back to the first ``length`` committed rows at most; return how many are kept."""


_METHODS = ("propose", "observe", "commit", "rollback", "rewind")
_ATTRIBUTES = ("name", "taps", "block_size", "length")


def check_drafter(drafter):
    """Return ``drafter``.

    Raises
    ------
    UsageError
        If it lacks a part of the protocol; the message names it.
    """
    missing = [name for name in _METHODS if not callable(getattr(drafter, name, None))]
    missing += [name for name in _ATTRIBUTES if not hasattr(drafter, name)]
    if missing:
        raise UsageError(
            f"drafter is a {type(drafter).__name__} without {', '.join(missing)}, expected the "
            "Drafter protocol; derive it from cudflash.drafters.TokenDrafter"
        )
    return drafter


class TokenDrafter:
    """Base of drafters that need ids only: keeps ``length``; derive and write ``propose``."""

    name = "tokens"
    taps = ()
    block_size = None

    def __init__(self):
        self.length = 0
        self._observed = 0

    def propose(self, anchor, n, context):
        """Propose at most ``n`` tokens to follow ``anchor``."""
        raise NotImplementedError

    def observe(self, tokens, taps=None):
        """Count the rows."""
        self._observed = len(tokens)

    def commit(self, n):
        """Keep the first ``n`` rows."""
        if not 0 <= n <= self._observed:
            raise ValueError(f"commit of {n} rows, {self._observed} were observed")
        self.length += n
        self._observed = 0

    def rollback(self):
        """Drop observed rows."""
        self._observed = 0

    def rewind(self, length):
        """Go back; nothing but the count is kept, so any length will do."""
        self.rollback()
        self.length = min(length, self.length)
        return self.length


class NoDrafter(TokenDrafter):
    """Never proposes: plain decoding through the drafting machinery."""

    name = "none"

    def propose(self, anchor, n, context):
        """Propose nothing."""
        return NOTHING


class Oracle(TokenDrafter):
    """Proposes a given answer: accepted to the end when it is the true one.

    Parameters
    ----------
    ids : sequence of int
        The tokens of the answer, its first one included. After the last, nothing is proposed.
    """

    name = "oracle"

    def __init__(self, ids):
        super().__init__()
        self._ids = tuple(int(i) for i in ids)

    def propose(self, anchor, n, context):
        """Propose the next ids of the answer."""
        return Proposal(self._script(context, n), POINT_MASS)

    def _script(self, context, n):
        first = context.answer_index + 1
        return self._ids[first : first + n]


class KeepK(Oracle):
    """Proposes ``k`` right tokens, then wrong ones: ``k`` of each block are accepted.

    Parameters
    ----------
    ids : sequence of int
        The tokens of the answer.
    k : int
        At least 0.
    """

    name = "keep-k"

    def __init__(self, ids, k):
        super().__init__(ids)
        self._k = _whole("k", k)

    def propose(self, anchor, n, context):
        """Propose right ids up to ``k``, the ids one above them from there on."""
        return Proposal(self._spoilt(context, n, self._k), POINT_MASS)

    def _spoilt(self, context, n, k):
        script = self._script(context, n)
        if context.vocab_size < 2:
            raise UsageError("a vocabulary of one token has no wrong token; use another drafter")
        return script[:k] + tuple((token + 1) % context.vocab_size for token in script[k:])


class AlwaysWrong(KeepK):
    """Proposes nothing right: every round emits the target's one token.

    Parameters
    ----------
    ids : sequence of int
        The tokens of the answer, to be avoided.
    """

    name = "always-wrong"

    def __init__(self, ids):
        super().__init__(ids, 0)


class Cycle(KeepK):
    """Proposes ``ks[0]`` right tokens in the first round, ``ks[1]`` in the next, and so on, again.

    Parameters
    ----------
    ids : sequence of int
        The tokens of the answer.
    ks : sequence of int
    """

    name = "cycle"

    def __init__(self, ids, ks):
        super().__init__(ids, 0)
        self._ks = tuple(_whole("ks", k) for k in ks)
        if not self._ks:
            raise UsageError("ks is empty, expected at least one number")
        self._round = 0
        self._proposed = False

    def propose(self, anchor, n, context):
        """Propose as many right ids as it is this round's turn."""
        if context.answer_index == 0:
            self._round = 0
        self._proposed = True
        return Proposal(self._spoilt(context, n, self._ks[self._round % len(self._ks)]), POINT_MASS)

    def commit(self, n):
        """Keep rows; a round that has proposed is over."""
        super().commit(n)
        self._round += self._proposed
        self._proposed = False

    def rollback(self):
        """Drop observed rows; the round will be tried again."""
        super().rollback()
        self._proposed = False


class Random(TokenDrafter):
    """Proposes ids drawn uniformly from the vocabulary, and says so.

    The id is a hash of (seed, position): it depends neither on rounds nor on verify lengths, and is
    independent of every generator whatever the seeds.

    Parameters
    ----------
    seed : int
    n_vocab : int, optional
        Ids are below it; the vocabulary of the target if absent.
    """

    name = "random"

    def __init__(self, seed, n_vocab=None):
        super().__init__()
        self._seed = _whole("seed", seed)
        self._n_vocab = None if n_vocab is None else _whole("n_vocab", n_vocab)
        if n_vocab == 0:
            raise UsageError("n_vocab is 0, expected at least 1")

    def propose(self, anchor, n, context):
        """Propose ``n`` ids for the positions after the anchor's."""
        n_vocab = min(self._n_vocab or context.vocab_size, context.vocab_size)
        first = context.n_past + 1
        tokens = tuple(self._id(position, n_vocab) for position in range(first, first + n))
        return Proposal(tokens, (uniform(n_vocab),) * n)

    def _id(self, position, n_vocab):
        key = f"cudflash random drafter {self._seed} {position}".encode()
        word = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
        return (word * n_vocab) >> 64


class AtMost:
    """Another drafter, held to ``k`` tokens per round; everything else is the other's.

    Parameters
    ----------
    drafter : Drafter
    k : int
        At least 1.
    """

    def __init__(self, drafter, k):
        self._drafter, self._k = check_drafter(drafter), _whole("k", k)

    def __getattr__(self, name):
        found = getattr(self._drafter, name)
        if name == "start":
            return lambda anchor, n, context: found(anchor, min(n, self._k), context)
        return found

    def propose(self, anchor, n, context):
        """Propose the first ``k`` of what the other proposes."""
        return self._drafter.propose(anchor, min(n, self._k), context)


def _whole(name, value):
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 0:
        raise UsageError(f"{name} is {value!r}, expected a whole number of at least 0")
    return int(value)
