"""Rounds on a scripted target: the answer is that of plain decoding, whatever drafts are like."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.drafters import (
    POINT_MASS,
    AlwaysWrong,
    Cycle,
    KeepK,
    NoDrafter,
    Oracle,
    Proposal,
    ProposalDistribution,
    Random,
    TokenDrafter,
)
from cudflash.errors import UsageError
from cudflash.sampling import SamplingConfig
from cudflash.spec.acceptance import BONUS, CORRECTED, PLAIN, STOPPED, LogitRows
from cudflash.spec.gate import AcceptanceGate
from cudflash.spec.guard import GuardedDrafter
from cudflash.spec.modes import check_speculative
from cudflash.spec.round import Limits, RoundState
from cudflash.spec.stats import require_draft
from cudflash.spec.transaction import Transaction
from tests.spec.fakes import (
    N_VOCAB,
    PROMPT,
    Audited,
    FakeTarget,
    Sampled,
    broken,
    drafted,
    new_chain,
    plain,
)

GREEDY = SamplingConfig(temperature=0)
# penalties make every choice depend on what the chain has been fed before it
WARM = SamplingConfig(repeat_penalty=1.3, frequency_penalty=0.2, repeat_last_n=16)
CONFIGS = {"greedy": GREEDY, "seeded": WARM}
LONG = 2000
LENGTHS = (3, 7, 15)


@cache
def long_answer(name):
    return tuple(plain(CONFIGS[name], LONG))


def scripted(name, ids):
    return {
        "none": NoDrafter(),
        "oracle": Oracle(ids),
        "always-wrong": AlwaysWrong(ids),
        "keep-2": KeepK(ids, 2),
        "cycle": Cycle(ids, (0, 15, 3, 1, 7)),
        "random": Random(1),
        "sampled": Sampled(),
    }[name]


DRAFTERS = ("none", "oracle", "always-wrong", "keep-2", "cycle", "random", "sampled")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_long_answers_equal_plain_decoding(name, length, config):
    """Catches any leak of drafts into the answer: rows, positions, penalties, draws."""
    expected = long_answer(config)
    drafter = Audited(scripted(name, expected))
    answer = drafted(CONFIGS[config], LONG, drafter, verify_length=length)
    assert tuple(answer.tokens) == expected
    stats = answer.state.stats
    assert answer.guard.fault is None
    if name == "none":
        assert stats.drafted == 0 and stats.skipped == {"empty": LONG - 2, "budget": 1}
    elif name == "oracle":
        assert stats.accepted == stats.tested == stats.drafted
        assert stats.rounds == -(-(LONG - 1) // (length + 1))
    elif name == "always-wrong":
        assert stats.accepted == 0 and stats.rounds == LONG - 1
    elif name == "keep-2":
        # the last block may be cut to the room of the answer
        assert stats.accepted_at[:2] == stats.proposed_at[:2] and not any(stats.accepted_at[2:])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["always-wrong", "random", "cycle"])
def test_gate_in_between_changes_nothing(name, config):
    """Catches a closed gate that leaves a hole in the draft's context, or that moves a draw."""
    expected = long_answer(config)
    drafter = Audited(scripted(name, expected))
    answer = drafted(CONFIGS[config], LONG, drafter, mode="auto")
    assert tuple(answer.tokens) == expected and answer.guard.fault is None
    kinds = [event.kind for event in answer.events]
    if name != "cycle":
        assert kinds[:4] == ["closed", "reopened", "closed", "reopened"]
        assert answer.state.stats.skipped["gate"] > LONG // 2
        # less than 8 rounds of 7 proposals, plus warm-up, before each pause
        assert drafter.proposals <= 10 * (len(kinds) // 2 + 1)


def test_mode_off_asks_nobody():
    """Catches a drafter that works although the request turned it off."""
    drafter = Audited(Oracle(long_answer("greedy")))
    answer = drafted(GREEDY, 50, drafter, mode="off")
    assert tuple(answer.tokens) == long_answer("greedy")[:50]
    assert drafter.proposals == 0 and answer.state.stats.skipped == {"off": 49}
    with pytest.raises(UsageError, match="off"):
        require_draft(answer.state.stats)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["oracle", "cycle", "always-wrong"])
def test_max_tokens_is_exact(name, length):
    """Catches blocks that cross the limit, and drafts that could not be emitted (A84)."""
    expected = long_answer("seeded")
    for max_tokens in range(1, 41):
        answer = drafted(WARM, max_tokens, scripted(name, expected), verify_length=length)
        assert tuple(answer.tokens) == expected[:max_tokens]
        assert answer.state.stats.cut == 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("spare", range(20))
def test_context_limit_is_never_crossed(spare, length):
    """Catches a block whose rows do not fit although the tokens would (FakeTarget raises)."""
    expected = long_answer("greedy")
    n_ctx = len(PROMPT) + 30 + spare
    max_tokens = n_ctx - len(PROMPT)  # what a request may ask for at most
    answer = drafted(
        GREEDY, max_tokens, Oracle(expected), verify_length=length, target=FakeTarget(n_ctx)
    )
    assert tuple(answer.tokens) == expected[:max_tokens]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("at", range(20))
def test_a_stop_token_ends_the_answer_wherever_it_falls(at, length):
    """Catches tokens after the end: it is accepted, bonus, corrected or chosen plainly (A85)."""
    expected = list(long_answer("greedy"))
    at = next(i for i in range(at, 60) if expected[i] not in expected[:i])
    stop = {expected[at]}
    assert plain(GREEDY, 60, stop_ids=stop) == expected[: at + 1]
    ends = set()
    for ks in [(15,), (0,), (1,), (2,), (at - 1,), (at,), (at + 1,)]:
        drafter = Cycle(expected, [max(0, k) for k in ks])
        answer = drafted(GREEDY, 60, drafter, verify_length=length, stop_ids=stop)
        assert answer.tokens == expected[: at + 1]
        if answer.state.stats.records:
            ends.add(answer.state.stats.records[-1].end)
    if at:
        assert CORRECTED in ends and ends & {STOPPED, BONUS}
    nothing = drafted(GREEDY, 60, NoDrafter(), stop_ids=stop)
    assert nothing.tokens == expected[: at + 1]
    assert all(record.end == PLAIN for record in nothing.state.stats.records)


@pytest.mark.parametrize("offset", range(17))
def test_a_stop_string_cuts_inside_a_block(offset):
    """Catches rows or counts kept beyond the token that completes a stop string (A82, A96)."""
    expected = long_answer("greedy")
    wanted = 1 + offset

    def ends(tokens):
        return len(tokens) > wanted

    answer = drafted(GREEDY, 60, Oracle(expected), verify_length=15, ends=ends)
    assert tuple(answer.tokens) == expected[: wanted + 1]
    stats = answer.state.stats
    assert stats.emitted == wanted and stats.emitted + stats.cut == stats.accepted + stats.rounds
    assert stats.accepted_emitted <= stats.emitted


def test_a_stop_token_among_the_drafts_ends_the_block():
    """Catches rows evaluated for tokens that can never be emitted, or counted as drafted."""
    expected = long_answer("greedy")
    stop = next(t for t in range(N_VOCAB) if t not in expected[:20])

    class Hasty(Oracle):
        def propose(self, anchor, n, context):
            tokens = list(super().propose(anchor, n, context).tokens)
            tokens[1:2] = [stop]
            return Proposal(tuple(tokens), POINT_MASS)

    answer = drafted(GREEDY, 20, Hasty(expected), stop_ids={stop})
    assert tuple(answer.tokens) == expected[:20]
    first = answer.state.stats.records[0]
    assert first.drafted == (expected[1], stop) and first.accepted == 1
    assert answer.target.passes == answer.state.stats.rounds + 1


def test_the_round_that_ends_an_answer_is_not_judged():
    """Catches a gate that closes on drafts which a stop or the limit has cut."""
    expected = long_answer("greedy")
    full = drafted(GREEDY, 17, Oracle(expected), mode="auto")
    cut = drafted(GREEDY, 60, Oracle(expected), mode="auto", ends=lambda tokens: len(tokens) > 10)
    for answer in (full, cut):
        assert answer.state.stats.rounds == 2 and len(answer.state.gate.history) == 1


def test_a_drafter_is_shown_what_may_be_kept_in_few_sizes():
    """Catches rows that are kept and were not shown, and passes over rows that nobody keeps."""
    sizes = []

    class Noting(Oracle):
        def observe(self, tokens, taps=None):
            sizes.append(len(tokens))
            super().observe(tokens, taps)

        def commit(self, n):
            assert n <= sizes[-1], "kept rows were not shown"
            super().commit(n)

        def propose(self, anchor, n, context):
            right = super().propose(anchor, n, context).tokens
            good = len(sizes) % (n + 1)
            return Proposal((*right[:good], *(N_VOCAB - 1 - t for t in right[good:])), POINT_MASS)

    expected = long_answer("greedy")
    answer = drafted(GREEDY, 150, Noting(expected), verify_length=15)
    accepted = {record.accepted for record in answer.state.stats.records}
    assert {0, 3, 4, 7, 8, 15} <= accepted and tuple(answer.tokens) == expected[:150]
    records = answer.state.stats.records
    for size, record in zip(sizes[1:], records):
        rows = 1 + len(record.drafted)
        assert size == next(min(n, rows) for n in (4, 8, 16) if min(n, rows) >= len(record.decided))


@pytest.mark.parametrize("step", ["step", "decided"])
@pytest.mark.parametrize("accept", ["match", "ratio"])
@pytest.mark.parametrize("name", ["cycle", "sampled"])
def test_a_broken_round_can_be_tried_again(name, accept, step):
    """Catches a rollback that forgets the generator, the penalties, or rows (any exception)."""
    expected = long_answer("seeded")
    whole = drafted(WARM, 200, scripted(name, expected), accept=accept)
    seen = set()

    def break_round(index, at):
        if at == step and index % 3 == 1 and index not in seen:
            seen.add(index)
            raise broken()

    drafter = Audited(scripted(name, expected))
    answer = drafted(WARM, 200, drafter, accept=accept, break_round=break_round)
    assert answer.tokens == whole.tokens and answer.state.stats.trace() == whole.state.stats.trace()
    assert len(seen) > 3 and drafter.rollbacks >= len(seen)


def test_interruption_goes_through_and_leaves_committed_rows_only():
    """Catches a guard that swallows Ctrl-C, and blocks left open by a cancellation."""

    class Interrupted(Oracle):
        def propose(self, anchor, n, context):
            raise KeyboardInterrupt

    target, chain = FakeTarget(), new_chain(WARM)
    guard = GuardedDrafter(Interrupted(()), N_VOCAB)
    guard.observe(PROMPT)
    guard.commit(len(PROMPT))
    target.step(PROMPT)
    target.commit(len(PROMPT))
    state = RoundState(
        1, len(PROMPT), limits=Limits(7, 4096, N_VOCAB), accept="match", chain=chain,
        drafter=guard, gate=AcceptanceGate(),
    )  # fmt: skip
    before = [s for s in chain.snapshot()]
    with pytest.raises(KeyboardInterrupt), Transaction(target, guard, chain):
        state.plan_block(10, target.tokens)
    state.abandon()
    assert target.tokens == list(PROMPT) and target.block is None and guard.fault is None
    assert list(chain.snapshot()) == before and state.n_past == len(PROMPT)


def test_rows_that_are_not_finite_fall_back_to_a_plain_round():
    """Catches an error that plain decoding would not have had."""
    target, chain = FakeTarget(), new_chain(GREEDY)
    guard = GuardedDrafter(Random(1), N_VOCAB)
    guard.observe(PROMPT)
    guard.commit(len(PROMPT))
    target.step(PROMPT)
    target.commit(len(PROMPT))
    state = RoundState(
        1, len(PROMPT), limits=Limits(3, 4096, N_VOCAB), accept="match", chain=chain,
        drafter=guard, gate=AcceptanceGate(),
    )  # fmt: skip
    transaction = Transaction(target, guard, chain)
    transaction.begin()
    target.step(state.plan_block(10, target.tokens).tokens)
    transaction.rollback()
    transaction.begin()
    block = state.plain_block()
    rows = target.step(block.tokens)
    assert block.tokens == (1,) and block.n_drafts == 0
    decision = state.decide(LogitRows(chain, rows))
    state.observe()
    transaction.commit(1)
    assert state.settle(1).skipped == "retry" and decision.end == PLAIN
    assert guard.drafter.length == len(target.tokens) == len(PROMPT) + 1


# -- drafters that fail ---------------------------------------------------------------------------


class Faulty(TokenDrafter):
    """Right for some rounds, then the fault."""

    name = "faulty"

    def __init__(self, ids, fault, after=3):
        super().__init__()
        self._oracle, self._fault, self._left = Oracle(ids), fault, after
        self.calls_after = 0

    def propose(self, anchor, n, context):
        if self._left:
            self._left -= 1
            return self._oracle.propose(anchor, n, context)
        self.calls_after += 1
        return self._fault(anchor, n, context)


def _raise(*_):
    raise RuntimeError("the kernel has failed")


def _q(ids, probs):
    return ProposalDistribution(None if ids is None else np.array(ids), np.array(probs))


FAULTS = {
    "exception": (_raise, "kernel has failed"),
    "not a proposal": (lambda a, n, c: [1, 2], "list"),
    "NaN tokens": (lambda a, n, c: Proposal(np.full(n, np.nan), POINT_MASS), "nan"),
    "float tokens": (lambda a, n, c: Proposal((1.0,) * n, POINT_MASS), "token id"),
    "negative id": (lambda a, n, c: Proposal((-1,) * n, POINT_MASS), "vocabulary"),
    "id too large": (lambda a, n, c: Proposal((c.vocab_size,) * n, POINT_MASS), "vocabulary"),
    "too many": (lambda a, n, c: Proposal((1,) * (n + 1), POINT_MASS), "at most"),
    "other kind": (lambda a, n, c: Proposal((1,) * n, "argmax"), "point_mass"),
    "too few q": (lambda a, n, c: Proposal((1,) * n, (_q([1], [1.0]),) * (n - 1)), "for each"),
    "NaN q": (lambda a, n, c: Proposal((1,), (_q([1, 2], [np.nan, 1]),)), "finite"),
    "q sums to 2": (lambda a, n, c: Proposal((1,), (_q([1, 2], [1.0, 1.0]),)), "sums to"),
    "q of the token is 0": (lambda a, n, c: Proposal((1,), (_q([2], [1.0]),)), "no probability"),
    "q names one id twice": (lambda a, n, c: Proposal((1,), (_q([1, 1], [0.5, 0.5]),)), "once"),
    "NaN confidence": (lambda a, n, c: Proposal((1,), POINT_MASS, (np.nan,)), "confidences"),
}


@pytest.mark.parametrize("accept", ["match", "ratio"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_proposal_ends_in_a_complete_plain_answer(kind, accept):
    """Catches a fault that costs the answer, is asked again, or leaves no reason."""
    fault, words = FAULTS[kind]
    expected = long_answer("greedy")[:200]
    drafter = Faulty(expected, fault)
    answer = drafted(GREEDY, 200, drafter, accept=accept, mode="auto")
    assert tuple(answer.tokens) == expected
    assert answer.guard.fault.step == "propose" and words in answer.guard.fault.reason
    assert drafter.calls_after == 1 and answer.state.stats.accepted == 21
    assert [e.kind for e in answer.events] == ["disabled"]
    assert words in answer.events[0].reason and answer.state.gate.state == "disabled"
    assert answer.state.stats.records[-1].skipped == "fault"


@pytest.mark.parametrize("method", ["observe", "commit"])
def test_a_fault_outside_propose_ends_in_a_complete_plain_answer(method):
    """Catches a fault in the draft's context that reaches the target's commit."""
    expected = long_answer("seeded")[:200]
    drafter = Oracle(expected)
    inner, calls = getattr(drafter, method), []

    def failing(*args):
        calls.append(args)
        if len(calls) > 5:
            raise RuntimeError("ring is full")
        return inner(*args)

    setattr(drafter, method, failing)
    answer = drafted(WARM, 200, drafter)
    assert tuple(answer.tokens) == expected and answer.guard.fault.step == method
    assert "ring is full" in answer.events[0].reason and len(calls) == 6


def test_a_drafter_that_missed_rows_is_not_asked():
    """Catches a hole between the draft's context and the committed rows (Muser's defect 1)."""

    class Deaf(Oracle):
        def commit(self, n):
            super().commit(min(n, 4))

    expected = long_answer("greedy")[:100]
    answer = drafted(GREEDY, 100, Deaf(expected))
    assert tuple(answer.tokens) == expected
    assert answer.guard.fault.kind == "context-hole" and answer.state.stats.rounds > 50


def test_a_fault_after_draws_does_not_move_the_stream():
    """Catches a failed proposal under ratio whose draws change the rest of the answer."""

    def draw_and_fail(anchor, n, context):
        context.rng.uniform_double()
        raise RuntimeError("late")

    expected = long_answer("seeded")[:100]
    answer = drafted(WARM, 100, Faulty((), draw_and_fail, after=0), accept="ratio")
    assert tuple(answer.tokens) == expected  # all plain rounds, on an untouched stream


# -- properties and refusals ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    ks=st.lists(st.integers(0, 16), min_size=1, max_size=6),
    length=st.sampled_from(LENGTHS),
    max_tokens=st.integers(1, 60),
    stops=st.sets(st.integers(0, N_VOCAB - 1), max_size=3),
    seed=st.integers(0, 99),
    mode=st.sampled_from(["auto", "on", "off"]),
)
def test_any_script_gives_the_plain_answer(ks, length, max_tokens, stops, seed, mode):
    """Catches combinations of block size, stops, limit and seed that the cases above miss."""
    expected = plain(WARM, max_tokens, seed=seed, stop_ids=stops)
    answer = drafted(
        WARM, max_tokens, Cycle(expected + [0] * 20, ks), verify_length=length, seed=seed,
        stop_ids=stops, mode=mode,
    )  # fmt: skip
    assert answer.tokens == expected


def test_requests_are_refused_before_any_work():
    """Catches illegal settings that reach a round."""
    chain, guard = new_chain(GREEDY), GuardedDrafter(NoDrafter(), N_VOCAB)

    def state(length=7, accept="match", chain=chain):
        return RoundState(
            1, 4, limits=Limits(length, 64, N_VOCAB), accept=accept, chain=chain, drafter=guard,
            gate=AcceptanceGate(),
        )  # fmt: skip

    with pytest.raises(UsageError, match="3, 7 or 15"):
        state(length=5)
    with pytest.raises(UsageError, match="match or ratio"):
        state(accept="typical")
    with pytest.raises(UsageError, match="mirostat"):
        state(accept="ratio", chain=new_chain(SamplingConfig(mirostat=2)))
    assert state(accept="ratio").rule == "match"  # nothing is drawn at temperature 0
    with pytest.raises(UsageError, match="needs a draft"):
        check_speculative("on", None, None)
    with pytest.raises(UsageError, match="verify_length=7 needs"):
        check_speculative("auto", 7, None)
    assert check_speculative("auto", None, None) is None
    assert check_speculative("auto", None, guard) == 7
    with pytest.raises(UsageError, match="propose"):
        GuardedDrafter(object(), N_VOCAB)


def test_calls_out_of_order_are_refused():
    """Catches a loop that decides or settles twice."""
    chain, guard = new_chain(GREEDY), GuardedDrafter(NoDrafter(), N_VOCAB)
    guard.observe(PROMPT)
    guard.commit(len(PROMPT))
    state = RoundState(
        1, len(PROMPT), limits=Limits(7, 64, N_VOCAB), accept="match", chain=chain, drafter=guard,
        gate=AcceptanceGate(),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="idle"):
        state.settle(1)
    with pytest.raises(ValueError, match="ids for"):
        state.plan_block(5, [1, 2])
    state.plan_block(5, list(PROMPT))
    with pytest.raises(RuntimeError, match="planned"):
        state.plan_block(5, list(PROMPT))
