"""The acceptance rules: exact decisions, exact distributions, exact use of the generator.

Monte Carlo tests run 200,000 emitted tokens per rule from fixed seeds, three times: on the reported
case, over the other cases, over the block lengths. A frequency must lie within five standard
errors, sqrt(p (1 - p) / n), of its probability. A right rule fails one of the roughly 100
comparisons below with a chance of 100 * 6e-7, and because seeds are fixed, always or never.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.sampling import Distribution, Mt19937, SamplerChain, SamplingConfig
from cudflash.spec.acceptance import (
    BONUS,
    CORRECTED,
    PLAIN,
    STOPPED,
    LogitRows,
    TokenRows,
    match,
    probability_of,
    ratio,
    residual,
)
from cudflash.spec.proposals import POINT_MASS, DraftSampler, Proposal, ProposalDistribution
from tests.spec.fakes import N_VOCAB, Sampled, drafted, plain

STEPS = 200_000


def dist(probs, order=None):
    probs = np.asarray(probs, np.float32)
    ids = np.arange(len(probs), dtype=np.int32) if order is None else np.asarray(order, np.int32)
    return Distribution(ids, probs[ids], probs[ids])


def q_of(probs):
    return ProposalDistribution(None, np.asarray(probs, np.float64))


class StubRows:
    """Rows with given distributions; draws for ``choose`` from a generator of their own."""

    def __init__(self, rows, rng=None):
        self.rows, self.rng, self.accepted, self.chosen = rows, rng, [], []

    def distribution(self, row):
        return self.rows[row]

    def choose(self, row):
        token = self.rows[row].draw(self.rng.uniform_double())
        self.chosen.append(row)
        self.accepted.append(token)
        return token

    def accept(self, token):
        self.accepted.append(token)


class FastRng:
    """Mt19937's two uniform draws from NumPy blocks, for the long runs."""

    def __init__(self, seed):
        self._rng, self._left = np.random.default_rng(seed), []

    def uniform_double(self):
        if not self._left:
            self._left = self._rng.random(1 << 16).tolist()
        return self._left.pop()

    uniform_float = uniform_double


# -- the rule of ratio, step by step --------------------------------------------------------------

P_ROWS = [[0.4, 0.6], [0.7, 0.3], [0.25, 0.75]]
Q_ROWS = [[0.8, 0.2], [0.1, 0.9]]


@pytest.mark.parametrize(
    ("seed", "accepted", "last"), [(42, 1, 0), (0, 0, 1), (1, 1, 0), (2, 2, 1), (3, 0, 1)]
)
def test_recorded_decisions(seed, accepted, last):
    """Catches another draw order or conversion: decisions of an independent implementation."""
    proposal = Proposal((0, 1), tuple(q_of(q) for q in Q_ROWS))
    rng = Mt19937(seed)
    decision = ratio(proposal, StubRows([dist(p) for p in P_ROWS]), rng)
    assert (decision.accepted, decision.tokens[-1]) == (accepted, last)
    words = Mt19937(seed)
    for _ in range(decision.tested + 2):  # a float per test, a double for the last token
        words.next_u32()
    assert rng.next_u32() == words.next_u32()


def test_replay_from_a_snapshot_repeats_decision_and_state():
    """Catches hidden state: the rule is a function of proposal, rows and generator."""
    proposal = Proposal((0, 1), tuple(q_of(q) for q in Q_ROWS))
    for seed in range(300):
        rng = Mt19937(seed)
        before = rng.state()
        first = ratio(proposal, StubRows([dist(p) for p in P_ROWS]), rng)
        after = rng.next_u32()
        rng.set_state(before)
        assert ratio(proposal, StubRows([dist(p) for p in P_ROWS]), rng) == first
        assert rng.next_u32() == after


def test_the_record_of_trials_explains_the_decision():
    """Catches a record that does not hold what decided."""
    proposal = Proposal((0, 1), tuple(q_of(q) for q in Q_ROWS))
    for seed in range(50):
        rows = StubRows([dist(p) for p in P_ROWS])
        decision = ratio(proposal, rows, Mt19937(seed))
        assert len(decision.trials) == decision.tested
        for i, t in enumerate(decision.trials):
            assert t.token == proposal.tokens[i] and t.q == Q_ROWS[i][t.token]
            assert t.p == np.float32(P_ROWS[i][t.token])
            assert t.accepted == (t.uniform < t.p / t.q) == (i < decision.accepted)
        assert rows.accepted == list(decision.tokens)


class Fixed:
    """A generator that returns given numbers."""

    def __init__(self, *values):
        self.values = list(values)

    def uniform_float(self):
        return self.values.pop(0)

    uniform_double = uniform_float


BELOW_ONE = math.nextafter(1, 0)


def test_comparison_is_strict_at_both_ends():
    """Catches <=, which accepts an impossible token for u = 0, and a rejected certain one."""
    impossible = ratio(
        Proposal((1,), POINT_MASS), StubRows([dist([1, 0]), dist([1, 0])]), Fixed(0.0, 0.0)
    )
    assert impossible.end == CORRECTED and impossible.tokens == (0,)
    certain = ratio(
        Proposal((1,), (q_of([0, 1]),)),
        StubRows([dist([0, 1]), dist([1, 0])]),
        Fixed(BELOW_ONE, BELOW_ONE),
    )
    assert certain.end == BONUS and certain.tokens == (1, 0)
    even = Proposal((0,), (q_of([1, 0]),))
    assert ratio(even, StubRows([dist([0.5, 0.5])] * 2), Fixed(0.5, 0.0)).end == CORRECTED
    below = math.nextafter(0.5, 0)
    assert ratio(even, StubRows([dist([0.5, 0.5])] * 2), Fixed(below, 0.0)).end == BONUS


def test_disjoint_supports_always_correct():
    """Catches a residual that keeps the proposed token."""
    p, q = np.zeros(1000), np.zeros(1000)
    p[999], q[1] = 1, 1
    for seed in range(100):
        for proposal in (Proposal((1,), (q_of(q),)), Proposal((1,), POINT_MASS)):
            decision = ratio(proposal, StubRows([dist(p)] * 2), Mt19937(seed))
            assert (decision.accepted, decision.tokens) == (0, (999,))


def test_residual_of_the_specification():
    """Catches q subtracted at wrong ids: only token 2 has p above q."""
    proposal = Proposal((1,), (q_of([0.7, 0.2, 0.1]),))
    p = dist([0.1, 0.1, 0.8])
    ids, weights = residual(p, proposal, 0)
    assert ids.tolist() == [2] and weights == pytest.approx([0.7])
    rejected = ratio(proposal, StubRows([p, p]), Fixed(0.9, 0.0))
    assert rejected.tokens == (2,)


def test_residual_keeps_the_targets_order_and_drops_zeros():
    """Catches a draw in id order, or one of a token without weight when the uniform is 0."""
    p = dist([0.1, 0.2, 0.3, 0.4], order=[3, 2, 1, 0])
    ids, weights = residual(p, Proposal((2,), POINT_MASS), 0)
    assert ids.tolist() == [3, 1, 0] and weights == pytest.approx([0.4, 0.2, 0.1])
    q = ProposalDistribution(np.array([3, 0]), np.array([0.5, 0.5]))
    ids, _ = residual(p, Proposal((3,), (q,)), 0)
    assert ids.tolist() == [2, 1]


def test_zero_residual_falls_back_to_the_target():
    """Catches a division by zero where rounding leaves p nowhere above q."""
    p = dist([0.25, 0.75])
    over = ProposalDistribution(None, np.array([0.2500001, 0.7500001]))
    ids, weights = residual(p, Proposal((0,), (over,)), 0)
    assert ids.tolist() == [0, 1] and weights == pytest.approx([0.25, 0.75])
    alone = Distribution(*(np.array([v], t) for v, t in [(7, "i4"), (0.9999999, "f4"), (1, "f4")]))
    ids, _ = residual(alone, Proposal((7,), POINT_MASS), 0)
    assert ids.tolist() == [7]


def test_stop_tokens_end_the_decision():
    """Catches a bonus token after the end of the answer, and a draw for it."""
    rows = [dist([0, 1])] * 3
    decision = ratio(Proposal((1, 1), POINT_MASS), StubRows(rows), Fixed(0.3), {1})
    assert (decision.tokens, decision.end, decision.tested) == ((1,), STOPPED, 1)
    chosen = StubRows(rows, Fixed(0.5))
    decision = match((1, 1), chosen, {1})
    assert (decision.tokens, decision.end, decision.tested) == ((1,), STOPPED, 1)
    corrected = ratio(Proposal((0,), POINT_MASS), StubRows(rows), Fixed(0.3, 0.5), {1})
    assert (corrected.tokens, corrected.end) == ((1,), CORRECTED)


# -- match ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "accepted", "out"), [([4, 9, 99, 100], 1, 9), ([4, 8, 15, 16], 3, 16)]
)
def test_frontier_of_the_specification(samples, accepted, out):
    """Catches a frontier one off; golden values of the drafter-invariant round."""
    decision = match((4, 8, 15), TokenRows(samples))
    assert (decision.accepted, decision.tokens[-1]) == (accepted, out)
    assert len(decision.tokens) == accepted + 1


@given(
    drafts=st.lists(st.integers(0, 3), max_size=15),
    tokens=st.lists(st.integers(0, 3), min_size=16, max_size=16),
    stops=st.sets(st.integers(0, 3), max_size=2),
)
def test_match_looks_at_each_emitted_row_once(drafts, tokens, stops):
    """Catches draws for rows that are not emitted, and tokens that are not the target's."""
    seen = []

    class Rows:
        def choose(self, row):
            seen.append(row)
            return tokens[row]

    decision = match(drafts, Rows(), stops)
    n = len(decision.tokens)
    assert seen == list(range(n)) and list(decision.tokens) == tokens[:n]
    assert list(decision.tokens[: decision.accepted]) == drafts[: decision.accepted]
    assert decision.tested == decision.accepted + (decision.end == CORRECTED)
    if decision.end in (BONUS, PLAIN):
        assert decision.accepted == len(drafts) and n == len(drafts) + 1
    elif decision.end == CORRECTED:
        assert decision.tokens[-1] != drafts[decision.accepted]
    else:
        assert decision.tokens[-1] in stops and n == decision.accepted
    assert not any(token in stops for token in decision.tokens[:-1])


def test_rules_agree_where_nothing_is_drafted():
    """Catches a plain round under ratio that draws otherwise than plain decoding."""
    logits = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    for seed in range(20):
        one, two, three = (SamplerChain(SamplingConfig(), seed, n_vocab=64) for _ in range(3))
        a = ratio(Proposal((), POINT_MASS), LogitRows(one, logits), one.rng)
        b = match((), LogitRows(two, logits))
        assert a.tokens == b.tokens == (three.sample(logits[0]),) and a.end == b.end == PLAIN
        assert one.rng.next_u32() == two.rng.next_u32() == three.rng.next_u32()


# -- distributions --------------------------------------------------------------------------------

P, Q = (0.3, 0.5, 0.2), (0.4, 0.3, 0.3)
CASES = {
    "as reported (A132)": (P, Q),
    "zeros in p": ((0.0, 0.6, 0.4, 0.0), (0.25, 0.25, 0.25, 0.25)),
    "zeros in q": ((0.25, 0.25, 0.25, 0.25), (0.0, 0.5, 0.0, 0.5)),
    "p a point mass": ((0.0, 1.0, 0.0), Q),
    "q a point mass, drawn": (P, (0.0, 1.0, 0.0)),
    "equal": (P, P),
    "disjoint": ((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.3, 0.7)),
    "ties": ((0.25, 0.25, 0.5), (0.5, 0.25, 0.25)),
}


def assert_frequencies(counts, p):
    """Each frequency within five standard errors; exactly 0 where p is 0."""
    counts, n = np.asarray(counts, np.float64), float(np.sum(counts))
    for count, probability in zip(counts, p):
        error = math.sqrt(probability * (1 - probability) / n)
        assert abs(count / n - probability) <= 5 * error, (counts / n, p)


def run(rule, p, q, block, steps, seed):
    """Emit at least ``steps`` tokens with blocks of ``block`` drafts; counts per id."""
    rng = FastRng(seed)
    rows = StubRows([dist(p)] * (block + 1), rng)
    p_row, counts, emitted = rows, [0] * len(p), 0
    distribution, cumulative = q_of(q), np.cumsum(q).tolist()
    while emitted < steps:
        drafts = tuple(_draw(cumulative, rng.uniform_double()) for _ in range(block))
        if rule == "ratio":
            decision = ratio(Proposal(drafts, (distribution,) * block), p_row, rng)
        elif rule == "ratio, point mass":
            drafts = (int(np.argmax(q)),) * block
            decision = ratio(Proposal(drafts, POINT_MASS), p_row, rng)
        else:
            decision = match(drafts, p_row)
        rows.accepted.clear()
        rows.chosen.clear()
        for token in decision.tokens:
            counts[token] += 1
        emitted += len(decision.tokens)
    return counts


def _draw(cumulative, u):
    for token, edge in enumerate(cumulative):
        if u < edge:
            return token
    return max(i for i in range(len(cumulative)) if i == 0 or cumulative[i] > cumulative[i - 1])


@pytest.mark.parametrize("rule", ["match", "ratio", "ratio, point mass"])
@pytest.mark.parametrize("case", CASES)
def test_every_rule_gives_the_targets_distribution(case, rule):
    """Catches every biased rule: u <= p/q, a fresh draw after a mismatch, a residual of q."""
    p, q = CASES[case]
    steps = STEPS if p == P and q == Q else STEPS // (len(CASES) - 1)
    assert_frequencies(run(rule, p, q, 1, steps, seed=len(case)), p)


@pytest.mark.parametrize("rule", ["match", "ratio", "ratio, point mass"])
@pytest.mark.parametrize("block", [3, 7, 15])
def test_every_rule_gives_the_targets_distribution_in_blocks(block, rule):
    """Catches a bias that appears only at later rows or at the bonus token."""
    assert_frequencies(run(rule, P, Q, block, STEPS // 3, seed=block), P)


def test_a_point_mass_taken_for_its_softmax_would_be_noticed():
    """Catches a test too weak to see A132: argmax proposals judged by the draft's softmax."""
    rng, counts = FastRng(1), [0, 0, 0]
    rows = StubRows([dist(P)] * 2, rng)
    false = Proposal((0,), (q_of(Q),))  # always the argmax, reported as drawn from Q
    for _ in range(20_000):
        counts[ratio(false, rows, rng).tokens[0]] += 1
    assert np.array(counts) / 20_000 == pytest.approx([0.75, 0.25, 0], abs=0.02)
    with pytest.raises(AssertionError):
        assert_frequencies(counts, P)


@given(
    p=st.lists(st.integers(0, 20), min_size=2, max_size=6).filter(any),
    q=st.lists(st.integers(0, 20), min_size=2, max_size=6).filter(any),
)
@settings(deadline=None)
def test_one_step_is_exact_by_arithmetic(p, q):
    """Catches any bias of one step without chance: acceptance and residual add up to p."""
    n = min(len(p), len(q))
    if not any(p[:n]) or not any(q[:n]):
        return
    p, q = np.array(p[:n]) / sum(p[:n]), np.array(q[:n]) / sum(q[:n])
    target, emitted = dist(p), np.zeros(n)
    for token in np.flatnonzero(q).tolist():
        proposal = Proposal((token,), (q_of(q),))
        accept = min(1.0, probability_of(target, token) / proposal.probability(0))
        emitted[token] += q[token] * accept
        ids, weights = residual(target, proposal, 0)
        emitted[ids] += q[token] * (1 - accept) * weights / weights.sum()
    assert emitted == pytest.approx(p, abs=1e-6)  # float32 probabilities


def test_truncation_comes_before_the_rule():
    """Catches p taken before top-k: a removed token must be impossible (A81)."""
    config = SamplingConfig(temperature=1, top_k=2, top_p=1, min_p=0)
    logits = np.array([[2.0, 1.0, 0.9, 0.0]] * 2, np.float32)
    for seed in range(200):
        chain = SamplerChain(config, seed, n_vocab=4)
        decision = ratio(Proposal((2,), POINT_MASS), LogitRows(chain, logits), chain.rng)
        assert decision.accepted == 0 and decision.trials[0].p == 0.0
        assert decision.tokens[0] in (0, 1)


def test_draft_sampler_reports_what_it_draws_from():
    """Catches proposals drawn from one distribution and judged by another (A132)."""
    config = SamplingConfig(temperature=0.7, top_k=3, repeat_penalty=1.5, xtc_probability=0.5)
    logits = np.array([1.0, 0.5, 2.0, -1.0, 0.0], np.float32)
    sampler, rng = DraftSampler(config, 5), FastRng(5)
    counts = np.zeros(5)
    _, q = sampler.draw(logits, rng)
    for _ in range(5_000):
        token, again = sampler.draw(logits, rng)
        counts[token] += 1
        assert again.ids.tolist() == q.ids.tolist()
    assert_frequencies(counts, q.of_many(np.arange(5)) / q.probs.sum())
    assert (counts > 0).sum() <= 3


# -- whole answers --------------------------------------------------------------------------------

CHI_CONFIG = SamplingConfig(temperature=1.0, top_k=8, top_p=1, min_p=0)


@pytest.mark.parametrize("accept", ["match", "ratio"])
def test_first_tokens_are_distributed_as_without_draft(accept):
    """Catches a draft that shifts sampling at temperature 1 (A79): chi-square, tokens 2 and 3."""
    n_answers, on, off = 1500, [], []
    for seed in range(n_answers):
        # disjoint seeds: equal ones give equal answers under match, not independent samples
        on.append(
            drafted(CHI_CONFIG, 3, Sampled(), verify_length=3, accept=accept, seed=seed).tokens
        )
        off.append(plain(CHI_CONFIG, 3, seed=seed + n_answers))
    for index in (0, 1, 2):
        a = np.bincount([t[index] for t in on], minlength=N_VOCAB)
        b = np.bincount([t[index] for t in off], minlength=N_VOCAB)
        assert chi_square_p(a, b) > 1e-4


def chi_square_p(a, b):
    """Two-sample chi-square test of equal sizes; p by Wilson and Hilferty's cube root."""
    common = a + b >= 10
    a = np.append(a[common], a[~common].sum())
    b = np.append(b[common], b[~common].sum())
    seen = a + b > 0
    statistic = float((((a - b) ** 2)[seen] / (a + b)[seen]).sum())
    freedom = int(seen.sum()) - 1
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def test_ratio_replays_from_the_seed_and_differs_from_plain():
    """Catches randomness outside the answer's generator, and a ratio that is secretly match."""
    config = SamplingConfig()
    one = drafted(config, 200, Sampled(), accept="ratio")
    two = drafted(config, 200, Sampled(), accept="ratio")
    assert one.tokens == two.tokens and one.state.stats.trace() == two.state.stats.trace()
    other = drafted(config, 200, Sampled(), accept="ratio", seed=12)
    assert other.tokens != one.tokens != plain(config, 200)


def test_ratio_accepts_more_than_match():
    """Catches a ratio rule that lost its purpose: maximal coupling of p and q."""
    config = SamplingConfig(temperature=1.0, min_p=0)
    by_ratio = drafted(config, 600, Sampled(0.3), accept="ratio").state.stats
    by_match = drafted(config, 600, Sampled(0.3), accept="match").state.stats
    assert by_ratio.acceptance_rate > by_match.acceptance_rate > 0
