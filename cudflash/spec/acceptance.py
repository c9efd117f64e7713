"""The two acceptance rules: which drafted tokens are kept, and which token the target adds.

Owns the decision of a round. Must not know where rows come from, nor what happens to the answer
afterwards. Invariant: a decision is a function of (proposal, rows, state of the chain), and draws
nothing that it does not use.

**match**. Row i of the target chooses its token exactly as in plain decoding: one run of the chain,
one draw, then the chain remembers it; only then is row i + 1 looked at. Drafts are accepted while
they are equal to these tokens. The tokens emitted are the target's own, so with equal logits they
are those of plain decoding, whatever was drafted.

**ratio**. Draft d of row i, proposed with probability q(d), is accepted when ``u < p(d) / q(d)``,
u uniform in [0, 1); p is the target's distribution after truncation by the whole chain. At the
first rejection a token is drawn from max(p - q, 0), normalised (from p, if that is zero
everywhere); if nothing is rejected, one is drawn from p of the row after the last draft. Tokens are
distributed as in plain decoding, not equal to it.

**Draw order of ratio**, on the one generator of the answer (``SamplerChain.rng``); a double takes
two words, a float one:

1. the drafter: one double per proposed token, in order (none for a point mass);
2. per tested draft, in order: one float, u;
3. one double: the residual draw after a rejection, or the bonus draw; none when an accepted stop
   token ends the answer.

A round without drafts is one run of the chain and one double, as in plain decoding. XTC, when it is
on, takes one float per examined row from its own generator. Nothing is drawn for rows after a
rejection, so the draws do not depend on how many drafts were left over.

Source
------
Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (2023),
algorithm 1; llama.cpp ``common/sampling.cpp`` (sample and accept, the model of ``match``).
"""

from dataclasses import dataclass

import numpy as np

from cudflash.errors import UsageError
from cudflash.sampling.candidates import draw_index

MATCH, RATIO = "match", "ratio"
RULES = (MATCH, RATIO)

# How a round ended: with which token of the target.
PLAIN = "plain"  # there were no drafts
BONUS = "bonus"  # every draft was accepted, the target added one more
CORRECTED = "corrected"  # a draft was rejected, the target's token stands in its place
STOPPED = "stopped"  # an accepted draft is a stop token, nothing follows
ENDS = (PLAIN, BONUS, CORRECTED, STOPPED)


@dataclass(frozen=True)
class Trial:
    """One draft tested by ``ratio``."""

    token: int
    p: float  # probability under the target
    q: float  # probability with which it was proposed
    uniform: float  # in [0, 1)
    accepted: bool  # uniform < p / q


@dataclass(frozen=True)
class Decision:
    """What a round has decided.

    Attributes
    ----------
    tokens : tuple of int
        Accepted drafts and the target's token; token i was decided from row i.
    accepted : int
        Drafts accepted: the first tokens.
    tested : int
        Drafts compared: the accepted ones and the rejected one.
    end : {"plain", "bonus", "corrected", "stopped"}
    trials : tuple of Trial
        Under ``ratio``, one per tested draft.
    """

    tokens: tuple[int, ...]
    accepted: int
    tested: int
    end: str
    trials: tuple[Trial, ...] = ()


class LogitRows:
    """Rows of target logits with the chain that chooses from them: what both rules read.

    Anything with these three methods will do.

    Parameters
    ----------
    chain : SamplerChain
    logits : ndarray of shape (n_rows, n_vocab), float32
        Row i follows the anchor and the first i drafts.
    candidates : callable, optional
        ``candidates(row)`` returns what ``SamplerChain.sample_largest`` takes, or None.
    """

    def __init__(self, chain, logits, candidates=None):
        self._chain, self._logits, self._candidates = chain, logits, candidates

    def choose(self, row):
        """Choose the target's token of a row and remember it."""
        token, largest = None, self._candidates and self._candidates(row)
        if largest is not None:
            token = self._chain.sample_largest(*largest)
        if token is None:
            token = self._chain.sample(self._logits[row])
        self._chain.accept(token)
        return token

    def distribution(self, row):
        """Distribution of a row after the whole chain (``sampling.Distribution``)."""
        return self._chain.probabilities(self._logits[row])

    def accept(self, token):
        """Remember a token that the rule has decided."""
        self._chain.accept(token)


class TokenRows:
    """Rows whose tokens are known already: the argmax of each, computed on the device.

    For temperature 0 without bias, penalties and DRY; the rules then only compare.
    """

    def __init__(self, tokens):
        self._tokens = tokens

    def choose(self, row):
        """The token of a row."""
        return int(self._tokens[row])


class DecidedRows:
    """Rows on which the device has applied ``match`` already, by ``ops.accept_greedy``.

    Parameters
    ----------
    accepted : int
    end : int
        0 no drafts, 1 bonus, 2 corrected, 3 stopped.
    tokens : sequence of int
    """

    def __init__(self, accepted, end, tokens):
        self._accepted, self._end, self._tokens = accepted, ENDS[end], tuple(tokens)

    def decision(self):
        """The Decision."""
        tested = self._accepted + (self._end == CORRECTED)
        return Decision(self._tokens, self._accepted, tested, self._end)


def rule_in_effect(accept, chain):
    """Return the rule that decides: ``match`` wherever nothing is drawn.

    Parameters
    ----------
    accept : {"match", "ratio"}
    chain : SamplerChain

    Raises
    ------
    UsageError
        For another rule, or ``ratio`` with mirostat, whose truncation depends on its own draws.
    """
    if accept not in RULES:
        raise UsageError(f"accept is {accept!r}, expected match or ratio")
    if accept == RATIO and chain.config.mirostat:
        raise UsageError(
            "accept='ratio' needs the target's distribution, which mirostat does not have before "
            "its draw; use accept='match' or mirostat=0"
        )
    if chain.config.greedy or chain.rng is None:
        return MATCH
    return accept


def match(drafts, rows, stop_ids=frozenset()):
    """Decide by the target's own tokens; see the module.

    Parameters
    ----------
    drafts : sequence of int
    rows : LogitRows or alike
        ``choose(row)`` is called for rows 0, 1, ... once each, as far as tokens are emitted.
    stop_ids : set of int
        Tokens that end the answer: nothing is decided after one.

    Returns
    -------
    Decision
    """
    tokens = []
    for row, draft in enumerate(drafts):
        token = rows.choose(row)
        tokens.append(token)
        if token != draft:
            return Decision(tuple(tokens), row, row + 1, CORRECTED)
        if token in stop_ids:
            return Decision(tuple(tokens), row + 1, row + 1, STOPPED)
    n = len(tokens)
    tokens.append(rows.choose(n))
    return Decision(tuple(tokens), n, n, BONUS if n else PLAIN)


def ratio(proposal, rows, rng, stop_ids=frozenset()):
    """Decide by probabilities; see the module.

    Parameters
    ----------
    proposal : Proposal
        Checked (``proposals.check_proposal``): its tokens have positive probability.
    rows : LogitRows or alike
        ``distribution(row)`` and then ``accept(token)`` are called for rows 0, 1, ... once each, as
        far as tokens are emitted; ``choose(0)`` for a proposal without tokens.
    rng : Mt19937
        The chain's.
    stop_ids : set of int

    Returns
    -------
    Decision
    """
    tokens, trials = [], []
    for row, draft in enumerate(proposal.tokens):
        target = rows.distribution(row)
        p, q = probability_of(target, draft), proposal.probability(row)
        u = float(rng.uniform_float())
        # p / q >= 1 accepts for every u in [0, 1); p = 0 for none, because of the strict <.
        accepted = u < p / q
        trials.append(Trial(draft, p, q, u, accepted))
        token = draft if accepted else _residual_draw(target, proposal, row, rng)
        rows.accept(token)
        tokens.append(token)
        if not accepted:
            return Decision(tuple(tokens), row, row + 1, CORRECTED, tuple(trials))
        if token in stop_ids:
            return Decision(tuple(tokens), row + 1, row + 1, STOPPED, tuple(trials))
    n = len(tokens)
    if not n:
        return Decision((rows.choose(0),), 0, 0, PLAIN)
    token = rows.distribution(n).draw(rng.uniform_double())
    rows.accept(token)
    return Decision((*tokens, token), n, n, BONUS, tuple(trials))


def decide(rule, proposal, rows, rng, stop_ids=frozenset()):
    """Apply ``match`` or ``ratio``, whichever ``rule_in_effect`` has named."""
    if isinstance(rows, DecidedRows):
        return rows.decision()
    if rule == MATCH:
        return match(proposal.tokens, rows, stop_ids)
    return ratio(proposal, rows, rng, stop_ids)


def probability_of(distribution, token):
    """Probability of one id, 0.0 for one that the chain has removed."""
    at = np.flatnonzero(distribution.ids == token)
    return float(distribution.probs[at[0]]) if len(at) else 0.0


def residual(target, proposal, row):
    """Return what is left of p above q, in the target's list order, without zeros.

    Parameters
    ----------
    target : Distribution
    proposal : Proposal
    row : int

    Returns
    -------
    (ids, weights)
        Weights float64, not normalised. p itself where p is nowhere above q: then p and q are
        equal but for rounding, and so is what either would give.
    """
    p = target.probs.astype(np.float64)
    if proposal.point_mass:
        above = np.where(target.ids == proposal.tokens[row], 0.0, p)
    else:
        above = np.maximum(p - proposal.distribution[row].of_many(target.ids), 0.0)
    kept = above > 0
    if not kept.any():
        kept, above = p > 0, p
    return target.ids[kept], above[kept]


def _residual_draw(target, proposal, row, rng):
    ids, weights = residual(target, proposal, row)
    return int(ids[draw_index(weights, rng.uniform_double())])
