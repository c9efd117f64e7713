"""A target without a model, plain decoding on it, and the loop of drafted rounds around it."""

from dataclasses import dataclass

import numpy as np

from cudflash.sampling import SamplerChain
from cudflash.spec.acceptance import LogitRows
from cudflash.spec.drafters import TokenDrafter
from cudflash.spec.gate import AcceptanceGate
from cudflash.spec.guard import GuardedDrafter
from cudflash.spec.proposals import POINT_MASS, Proposal
from cudflash.spec.round import Limits, RoundState
from cudflash.spec.stats import identities
from cudflash.spec.transaction import Transaction

N_VOCAB = 48
PROMPT = (5, 9, 2, 44)
_TABLE = np.random.default_rng(7).normal(size=(499, N_VOCAB)).astype(np.float32) * 2


class FakeTarget:
    """Logits are a table row chosen by the last three tokens and the position.

    Rows of a block see the committed tokens and the block up to themselves, nothing else: a row
    that was committed but should not have been, or is missing, changes everything after it.
    """

    def __init__(self, n_ctx=4096, table=_TABLE):
        self.n_ctx, self.table = n_ctx, table
        self.tokens, self.block, self.passes = [], None, 0

    def step(self, block):
        if self.block is not None:
            raise RuntimeError("a block is open")
        if len(self.tokens) + len(block) > self.n_ctx:
            raise RuntimeError("a block exceeds the context")
        self.block = tuple(block)
        self.passes += 1
        context = [0, 0, *self.tokens[-2:], *block]
        first = len(context) - len(block)
        rows = []
        for i in range(first, len(context)):
            a, b, c = context[i - 2 : i + 1]
            position = len(self.tokens) + i - first
            rows.append(self.table[(a * 7919 + b * 104729 + c * 31 + position) % len(self.table)])
        return np.stack(rows)

    def commit(self, n):
        if self.block is None or not 0 <= n <= len(self.block):
            raise RuntimeError("commit without its rows")
        self.tokens += self.block[:n]
        self.block = None

    def rollback(self):
        self.block = None


def new_chain(config, seed=11, n_vocab=N_VOCAB):
    chain = SamplerChain(config, seed, n_vocab=n_vocab)
    chain.accept_prompt(PROMPT)
    return chain


def prompt_pass(target, chain):
    """Evaluate the prompt and choose the first token."""
    rows = target.step(PROMPT)
    target.commit(len(PROMPT))
    token = chain.sample(rows[-1])
    chain.accept(token)
    return token


def plain(config, max_tokens, *, seed=11, stop_ids=frozenset(), ends=None, target=None):
    """Plain decoding: one row, one token."""
    target = target or FakeTarget()
    chain = new_chain(config, seed)
    tokens = [prompt_pass(target, chain)]
    while not _ended(tokens, max_tokens, stop_ids, ends):
        rows = target.step(tokens[-1:])
        tokens.append(chain.sample(rows[0]))
        chain.accept(tokens[-1])
        target.commit(1)
    return tokens


def _ended(tokens, max_tokens, stop_ids, ends):
    return len(tokens) >= max_tokens or tokens[-1] in stop_ids or bool(ends and ends(tokens))


@dataclass
class Answer:
    """What ``drafted`` leaves behind."""

    tokens: list
    state: RoundState
    guard: GuardedDrafter
    target: FakeTarget
    chain: SamplerChain
    events: list


def drafted(
    config, max_tokens, drafter, *, verify_length=7, accept="match", mode="on", seed=11,
    stop_ids=frozenset(), ends=None, target=None, break_round=None,
):  # fmt: skip
    """The same answer by rounds, as an engine makes them.

    ``break_round``: function of (round, step) that may raise at "step" or "decided"; the round is
    then rolled back and tried again once.
    """
    target = target or FakeTarget()
    chain = new_chain(config, seed)
    guard = GuardedDrafter(drafter, N_VOCAB)
    guard.rewind(0)
    guard.observe(PROMPT)
    guard.commit(len(PROMPT))
    tokens = [prompt_pass(target, chain)]
    limits = Limits(verify_length, target.n_ctx, N_VOCAB, frozenset(stop_ids))
    state = RoundState(
        tokens[0], len(PROMPT), limits=limits, accept=accept, chain=chain, drafter=guard,
        gate=AcceptanceGate(mode),
    )  # fmt: skip
    transaction = Transaction(target, guard, chain)
    events = []
    while not _ended(tokens, max_tokens, stop_ids, ends):
        try:
            _round(state, transaction, target, tokens, (max_tokens, stop_ids, ends), break_round)
        except _Broken:
            transaction.rollback()
            state.abandon()
            continue
        events += state.drain_events()
    answer = Answer(tokens, state, guard, target, chain, events)
    check(answer, limits)
    return answer


class _Broken(Exception):
    """Raised by a ``break_round``."""


def broken():
    """The exception for ``break_round`` to raise."""
    return _Broken()


def _round(state, transaction, target, tokens, end, break_round):
    index = state.stats.rounds
    transaction.begin()
    block = state.plan_block(end[0] - len(tokens), target.tokens)
    rows = target.step(block.tokens)
    if break_round:
        break_round(index, "step")
    decision = state.decide(LogitRows(state._chain, rows))
    state.observe(None)
    if break_round:
        break_round(index, "decided")
    kept = 0
    for token in decision.tokens:
        tokens.append(token)
        kept += 1
        if _ended(tokens, *end):
            break
    transaction.commit(kept)
    state.settle(kept)


def check(answer, limits):
    """What holds after every answer, whatever the drafter did."""
    state, target = answer.state, answer.target
    assert target.block is None
    assert target.tokens == [*PROMPT, *answer.tokens[:-1]]
    assert (state.anchor, state.n_past) == (answer.tokens[-1], len(target.tokens))
    if answer.guard.fault is None:
        assert answer.guard.drafter.length == len(target.tokens)
    counts = state.stats.to_dict()
    identities(counts)
    assert counts["emitted"] == len(answer.tokens) - 1
    for record in state.stats.records:
        assert len(record.drafted) <= limits.verify_length
        # never more than could be emitted, nor than fits
        assert record.n_past + 1 + len(record.drafted) <= limits.n_ctx


class Sampled(TokenDrafter):
    """Under ratio, draws from rows of its own; under match, their argmax."""

    name = "sampled"

    def __init__(self, noise=0.5, seed=3):
        super().__init__()
        shift = np.random.default_rng(seed).normal(size=_TABLE.shape).astype(np.float32)
        self._model = FakeTarget(table=_TABLE + np.float32(noise) * shift)

    def propose(self, anchor, n, context):
        tokens, found = [*context.tokens, anchor], []
        for _ in range(n):
            self._model.tokens = tokens[:-1]
            row = self._model.step(tokens[-1:])[0]
            self._model.rollback()
            if context.sampler is None:
                found.append((int(row.argmax()), None))
            else:
                found.append(context.sampler.draw(row, context.rng))
            tokens.append(found[-1][0])
        point = context.sampler is None
        return Proposal(
            tuple(t for t, _ in found), POINT_MASS if point else tuple(q for _, q in found)
        )


class Audited(TokenDrafter):
    """Wraps a drafter; keeps the committed ids it was shown and compares them at every proposal."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen, self._block = inner, [], ()
        self.name, self.proposals, self.rollbacks = inner.name, 0, 0

    def propose(self, anchor, n, context):
        if list(context.tokens) != self.seen:
            raise RuntimeError("the drafter was shown other rows than were committed")
        self.proposals += 1
        return self.inner.propose(anchor, n, context)

    def observe(self, tokens, taps=None):
        super().observe(tokens, taps)
        self._block = tuple(tokens)
        self.inner.observe(tokens, taps)

    def commit(self, n):
        super().commit(n)
        self.seen += self._block[:n]
        self.inner.commit(n)

    def rollback(self):
        super().rollback()
        self._block = ()
        self.rollbacks += 1
        self.inner.rollback()

    def rewind(self, length):
        self.seen = self.seen[:length]
        self.inner.rewind(length)
        return super().rewind(length)
