"""What a drafter hands over: tokens, and the distribution they were truly drawn from.

Owns the checks of a proposal. Must not know targets. Invariant: a checked proposal is safe to
evaluate (ids inside the vocabulary, no more than asked for) and its distribution gives every
proposed token a positive probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

import numpy as np

from cudflash.errors import CudflashError
from cudflash.sampling import SamplerChain, SamplingConfig

POINT_MASS = "point_mass"
_SUM_TOLERANCE = 1e-5  # float32 probabilities: each within 2**-25 of itself, so is their sum


class ProposalError(CudflashError):
    """A proposal that cannot be used; the round goes on without it."""


@dataclass(frozen=True)
class ProposalDistribution:
    """Probabilities of one proposed position.

    Attributes
    ----------
    ids : ndarray of shape (n,), integer, or None
        Ids in any order, each once; None for 0 to n - 1. Ids not listed have probability 0.
    probs : ndarray of shape (n,), float32 or float64
        Sum to 1.
    """

    ids: np.ndarray | None
    probs: np.ndarray

    def of(self, token):
        """Probability of one token, 0.0 for one that is not listed."""
        if self.ids is None:
            return float(self.probs[token]) if token < len(self.probs) else 0.0
        at = np.flatnonzero(self.ids == token)
        return float(self.probs[at[0]]) if len(at) else 0.0

    def of_many(self, tokens):
        """Probabilities of several tokens, float64."""
        found = np.zeros(len(tokens), np.float64)
        if self.ids is None:
            inside = np.asarray(tokens) < len(self.probs)
            found[inside] = self.probs[np.asarray(tokens)[inside]]
            return found
        same = np.asarray(tokens)[:, None] == np.asarray(self.ids)[None, :]
        rows, columns = np.nonzero(same)
        found[rows] = self.probs[columns]
        return found


def uniform(n_vocab):
    """Return the distribution that gives every id of a vocabulary the same probability."""
    return ProposalDistribution(None, np.broadcast_to(np.float64(1) / n_vocab, (n_vocab,)))


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow the anchor.

    Attributes
    ----------
    tokens : sequence of int
        At most as many as were asked for; fewer, or none, are allowed.
    distribution : "point_mass" or sequence of ProposalDistribution
        How the tokens came about; there is no default, because a wrong answer biases the ``ratio``
        rule without any visible sign. ``"point_mass"``: each token is a function of what was known
        before (argmax, lookup), so its probability was 1. Otherwise one distribution per token, the
        one it was drawn from after all truncation. The softmax behind an argmax is neither.
    confidence : sequence of float, or None
        The drafter's opinion per token, in [0, 1]; recorded, never used in a decision.
    """

    tokens: Sequence[int]
    distribution: str | Sequence[ProposalDistribution]
    confidence: Sequence[float] | None = None

    def __len__(self):
        return len(self.tokens)

    @property
    def point_mass(self):
        """Whether every token was certain to be proposed."""
        return isinstance(self.distribution, str)

    def probability(self, index):
        """Probability with which token ``index`` was proposed."""
        return 1.0 if self.point_mass else self.distribution[index].of(self.tokens[index])

    def first(self, n):
        """The first ``n`` tokens with what belongs to them."""
        if n >= len(self):
            return self
        return Proposal(
            self.tokens[:n],
            self.distribution if self.point_mass else self.distribution[:n],
            None if self.confidence is None else self.confidence[:n],
        )


NOTHING = Proposal((), POINT_MASS)


def check_proposal(proposal, n, vocab_size):
    """Return the proposal with plain ints, or say what is wrong with it.

    Parameters
    ----------
    proposal : Proposal
    n : int
        Tokens that were asked for.
    vocab_size : int

    Raises
    ------
    ProposalError
        For another type, too many tokens, ids that are no integers (NaN included) or outside the
        vocabulary, or a distribution that is not one.
    """
    if not isinstance(proposal, Proposal):
        raise ProposalError(f"it returned a {type(proposal).__name__}, expected a Proposal")
    if len(proposal.tokens) > n:
        raise ProposalError(f"it proposed {len(proposal.tokens)} tokens, expected at most {n}")
    if not _plain(proposal.tokens, int, vocab_size - 1):
        tokens = tuple(_token(value, i, vocab_size) for i, value in enumerate(proposal.tokens))
        proposal = replaced(proposal, tokens=tokens)
    if proposal.point_mass:
        if proposal.distribution != POINT_MASS:
            raise ProposalError(
                f"its distribution is {proposal.distribution!r}, expected {POINT_MASS!r} or one "
                "distribution per token"
            )
    else:
        _check_distributions(proposal, vocab_size)
    _check_confidence(proposal)
    return proposal


def _plain(values, kind, most):
    """Whether it is a tuple of Python's own numbers from 0 to ``most``, as our drafters make."""
    return type(values) is tuple and all(type(v) is kind and 0 <= v <= most for v in values)


def _token(value, index, vocab_size):
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise ProposalError(f"proposal {index} is {value!r}, expected a token id")
    token = int(value)
    if not 0 <= token < vocab_size:
        raise ProposalError(
            f"proposal {index} is token {token}, expected an id below the vocabulary size "
            f"{vocab_size}"
        )
    return token


def _check_distributions(proposal, vocab_size):
    if len(proposal.distribution) != len(proposal.tokens):
        raise ProposalError(
            f"it has {len(proposal.distribution)} distributions for {len(proposal.tokens)} tokens, "
            "expected one for each"
        )
    for index, (token, q) in enumerate(zip(proposal.tokens, proposal.distribution)):
        probs = np.asarray(q.probs)
        ids = q.ids
        if probs.ndim != 1 or not len(probs) or not np.isfinite(probs).all() or probs.min() < 0:
            raise ProposalError(
                f"distribution {index} is not a list of finite probabilities of at least 0"
            )
        total = float(probs.sum(dtype=np.float64))
        if abs(total - 1) > _SUM_TOLERANCE:
            raise ProposalError(f"distribution {index} sums to {total!r}, expected 1")
        if ids is None:
            sound = len(probs) <= vocab_size
        else:
            ids = np.asarray(ids)
            sound = ids.shape == probs.shape and ids.dtype.kind in "iu"
            sound = sound and ids.min() >= 0 and ids.max() < vocab_size
            sound = sound and len(np.unique(ids)) == len(ids)
        if not sound:
            raise ProposalError(
                f"distribution {index} does not name each of its ids once, inside the vocabulary "
                f"of {vocab_size}"
            )
        if not q.of(token) > 0:
            raise ProposalError(
                f"distribution {index} gives the proposed token {token} no probability, so the "
                "token was not drawn from it"
            )


def _check_confidence(proposal):
    if proposal.confidence is None:
        return
    n = len(proposal.tokens)
    if _plain(proposal.confidence, float, 1.0) and len(proposal.confidence) == n:
        return
    values = np.asarray(proposal.confidence, np.float64)
    if values.shape != (n,) or not ((values >= 0) & (values <= 1)).all():
        raise ProposalError("its confidences are not one number from 0 to 1 per token")


class DraftSampler:
    """Draws proposals from a draft's logits, truncated as the request truncates the target's.

    Only the samplers without memory take part (top_n_sigma, top_k, typical_p, top_p, min_p,
    temperature, dynamic temperature). Bias, penalties, DRY and XTC are left out: they would need
    the target's text for rows that may never exist. Any truncation is sound under ``ratio``,
    because what is reported is what was drawn from; a similar one only accepts more.

    Parameters
    ----------
    config : SamplingConfig
        The request's.
    n_vocab : int

    Attributes
    ----------
    temperature : float
        The request's, for drafters that truncate in a way of their own.
    """

    def __init__(self, config, n_vocab):
        kept = config.to_dict() | {
            "logit_bias": {},
            "repeat_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "dry_multiplier": 0.0,
            "xtc_probability": 0.0,
        }
        self.temperature = config.temperature
        # The seed is never used: this chain is only asked for distributions.
        self._chain = SamplerChain(SamplingConfig.from_dict(kept), 0, n_vocab=n_vocab)

    def draw(self, logits, rng):
        """Draw one token; takes one double of ``rng``.

        Parameters
        ----------
        logits : ndarray of shape (n_vocab,), float32
        rng : Mt19937
            The answer's generator, ``DraftContext.rng``.

        Returns
        -------
        (int, ProposalDistribution)

        Raises
        ------
        NumericsError
            For logits that are not finite.
        """
        found = self._chain.probabilities(logits)
        token = found.draw(rng.uniform_double())
        return token, ProposalDistribution(found.ids, found.probs)

    def propose(self, rows, rng):
        """Draw one token per row of logits, in order, and return the Proposal."""
        drawn = [self.draw(row, rng) for row in rows]
        return Proposal(tuple(token for token, _ in drawn), tuple(q for _, q in drawn))
