"""The economy: what drafting may cost at most, when it stops, comes back, and changes its length.

Time is simulated: a cost model gives the milliseconds of each round, a seeded generator what is
accepted. Nothing here looks at a real clock.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cudflash.spec.costs import Meter, RoundCosts
from cudflash.spec.economy import (
    ALLOWANCE,
    MEASURE,
    REFILL,
    UNTRIED,
    Economy,
)
from cudflash.spec.prospects import (
    DRAFT,
    DRAFT_SHARE,
    TIMED,
    TIMINGS,
    TRY,
    VERIFY,
    Prospects,
    Stage,
    Unrecorded,
)

PLAIN = 10.0  # ms


@dataclass
class World:
    """A machine and a draft: costs in plain steps, acceptance per position."""

    draft: float = 0.4  # of a draft pass
    row: float = 0.15  # of each verified row beyond the first
    rate: object = 0.8  # acceptance of each position, or a function of the committed tokens
    feed: float = 0.0  # of what a plain round spends on the drafter
    noise: float = 0.0  # relative, uniform
    burst: float = 0.0  # share of rounds that take ten times as long
    seed: int = 0
    costs: RoundCosts = field(default_factory=RoundCosts)

    def cost(self, length):
        """Plain steps of a round."""
        return 1 + self.draft + self.row * length if length else 1.0

    def run(self, n_tokens, verify_length=7):
        """Emit tokens; returns (economy, plain steps taken, rounds as (length, emitted, why))."""
        rng = random.Random(self.seed)
        economy = Economy(self.costs, "simulated", verify_length)
        committed, taken, rounds = 0, 0.0, []
        while committed < n_tokens:
            length, why = economy.choose(n_tokens - committed, len(rounds), committed)
            rate = self.rate(committed) if callable(self.rate) else self.rate
            accepted = 0
            while accepted < length and rng.random() < rate:
                accepted += 1
            emitted = min(accepted + 1, n_tokens - committed)
            noise = 1 + self.noise * rng.uniform(-1, 1)
            noise *= 10 if rng.random() < self.burst else 1
            steps, feed = self.cost(length) * noise, 0.0 if length else self.feed * noise
            committed += emitted
            taken += steps + feed
            economy.record(
                length, accepted, emitted, PLAIN * steps, PLAIN * feed, committed >= n_tokens
            )
            rounds.append((length, emitted, why))
        return economy, taken, rounds


@settings(max_examples=300, deadline=None)
@given(
    draft=st.floats(0.0, 6.0),
    row=st.floats(0.0, 1.0),
    rates=st.lists(st.floats(0.0, 0.99), min_size=1, max_size=6),
    span=st.integers(20, 400),
    noise=st.floats(0.0, 0.1),
    verify_length=st.sampled_from([3, 7, 15]),
    seed=st.integers(0, 10**6),
)
def test_never_more_than_five_percent_slower_over_a_thousand_tokens(
    draft, row, rates, span, noise, verify_length, seed
):
    """Catches every policy that pays more to find out than it is allowed to: any cost of drafting,
    any acceptance, text that changes as often as it likes (and right after a trial)."""

    def rate(committed):
        return rates[committed // span % len(rates)]

    world = World(draft, row, rate, noise=noise, seed=seed)
    _, taken, _ = world.run(1000, verify_length)
    assert taken <= 1050 * (1 + noise / 10)  # the mean of a thousand noisy plain steps


@settings(max_examples=100, deadline=None)
@given(draft=st.floats(0.0, 6.0), row=st.floats(0.0, 1.0), seed=st.integers(0, 10**6))
def test_the_derived_bound_holds_without_noise(draft, row, seed):
    """Catches a derivation that is not the code: ALLOWANCE + REFILL per token, and one worst round
    of a length that was never tried."""
    world = World(draft, row, rate=lambda n: 0.0 if n % 97 else 0.9, seed=seed)
    _, taken, _ = world.run(1000, 15)
    untried = max(0.0, world.cost(3) - UNTRIED)
    assert taken - 1000 <= ALLOWANCE + REFILL * 1000 + untried + 1e-6


def test_an_engine_that_is_used_again_pays_no_second_time_to_learn_its_costs():
    """Catches costs that are forgotten between answers."""
    world = World(rate=0.85)
    _, _, first = world.run(200)
    _, _, second = world.run(200)
    assert [why for *_, why in first].count(MEASURE) >= 4
    assert [why for *_, why in second[:5]] == [""] * 5
    assert all(length == 7 for length, *_ in second[:5])


@pytest.mark.parametrize("rate, least", [(0.9, 1.9), (0.8, 1.4), (0.7, 1.1)])
def test_what_pays_is_taken(rate, least):
    """Catches an economy that saves itself to death: good drafts must bring what they can."""
    world = World(rate=rate, noise=0.05)
    _, taken, _ = world.run(1000)
    assert 1000 / taken >= least


def test_a_bad_draft_is_dropped_with_numbers_and_tried_again():
    """Catches silence, a pause for ever, and trials that never get rarer."""
    economy, taken, rounds = World(rate=0.1).run(3000)
    assert taken <= 3000 + ALLOWANCE + REFILL * 3000
    kinds = [event.kind for event in economy.events if event.kind != "length"]
    assert kinds[:3] == ["paused", "resumed", "paused"]
    first = next(event for event in economy.events if event.kind == "paused")
    assert first.speedup < 1 and "does not pay" in first.reason and "plain steps" in first.reason
    assert first.resume_at == first.committed + 64 and first.length == 0
    pauses = [e.resume_at - e.committed for e in economy.events if e.kind == "paused"]
    assert pauses == sorted(pauses) and pauses[-1] == 512
    assert sum(1 for length, *_ in rounds if length) < 60


def test_it_comes_back_when_drafting_pays_again():
    """Catches a verdict that outlives its text: bad for 600 tokens, then good."""
    economy, _, rounds = World(rate=lambda n: 0.05 if n < 600 else 0.9).run(2000)
    assert economy.state == "drafting"
    late = rounds[-40:]
    assert sum(emitted for _, emitted, _ in late) / len(late) > 3


def test_a_shorter_length_is_taken_where_it_pays_more():
    """Catches lengths that only the user chooses: rows are dear, acceptance is that of a tiny pair."""
    economy, taken, rounds = World(draft=0.3, row=0.15, rate=0.55, noise=0.02).run(1000, 15)
    lengths = [length for length, *_ in rounds[len(rounds) // 2 :] if length]
    assert economy.length == 3 and lengths.count(3) > 0.9 * len(lengths)
    assert taken < 1000
    cheap = World(draft=2.0, row=0.02, rate=0.9).run(1000, 15)[0]
    assert cheap.length == 15


def test_one_slow_round_is_the_machine_and_not_the_draft():
    """Catches an account that is emptied by a process that ran for a moment."""
    economy, _, rounds = World(rate=0.9, burst=0.03, seed=3).run(1000)
    drafted = sum(1 for length, *_ in rounds if length)
    assert drafted > 0.8 * len(rounds) and economy.state == "drafting"


def test_a_machine_that_becomes_slow_is_no_reason_to_stop():
    """Catches costs of today held against plain steps of yesterday: everything takes thrice as long
    from the middle on."""
    world = World(rate=0.9)
    world.run(500)
    world.cost, cost = (lambda length: 3 * cost(length)), world.cost
    economy, _, rounds = world.run(1000)
    late = [length for length, *_ in rounds[-50:]]
    assert economy.state == "drafting" and late.count(0) < 10


def test_what_feeding_costs_is_charged():
    """Catches an account that sees drafting rounds only: a draft that is dear to feed leaves nothing
    for trials."""
    free = World(rate=0.1).run(3000)[0]
    fed = World(rate=0.1, feed=0.05).run(3000)[0]
    assert fed.pauses < free.pauses and fed.account.balance < 0.5


def test_no_round_drafts_before_plain_ones_were_timed():
    """Catches speed-ups against a guess."""
    _, _, rounds = World().run(100)
    assert [why for *_, why in rounds[:4]] == [MEASURE] * 4  # the first one is preparation


@given(st.integers(1, 20), st.integers(0, 10**6))
def test_the_budget_is_kept(budget, seed):
    """Catches more drafts than the answer has room for."""
    world = World(seed=seed)
    world.run(300)
    economy = Economy(world.costs, "simulated", 7)
    length, _ = economy.choose(budget, 0, 0)
    assert 0 <= length <= min(budget, 7)


def test_preparations_are_paid_off_before_the_next_trial_and_stop_no_draft_that_pays():
    """Catches passes recorded anew in every trial at nobody's cost, and a good draft that is given up
    because its first round was slow: 40 plain steps to record each length."""

    class Recording(World):
        def run(self, n_tokens, verify_length=7):
            seen = set()
            cost = type(self).cost

            def first_is_dear(length):
                extra = 40.0 if length and length not in seen else 0.0
                seen.add(length)
                return cost(self, length) + extra

            self.cost = first_is_dear
            return super().run(n_tokens, verify_length)

    economy, taken, _ = Recording(rate=0.0).run(1000)
    assert taken - 1000 <= ALLOWANCE + 40 + 1e-6 and economy.pauses == 1
    economy, taken, _ = Recording(rate=0.9).run(1000)
    assert taken < 700 and economy.pauses == 0


@dataclass
class QuickWorld(World):
    """A target whose steps are so quick that preparing a pass takes many of them.

    Played as the rounds of the engine play it: what is due is done, pauses are plain rounds.
    """

    plain: float = 0.2  # ms
    prepare: float = 17.0  # plain steps
    reach: int | None = 64  # rows that the draft has to be given
    timed: bool = True

    def _stage(self, economy, stage, committed, prepared):
        """Plain steps that a stage takes; tells the economy."""
        if stage.what == TRY:
            economy.ready(stage)
            return 0.0
        key = stage.what if stage.what == DRAFT else stage.length
        share = DRAFT_SHARE if stage.what == DRAFT else 1.0
        first = 0.0 if key in prepared else share * self.prepare
        prepared.add(key)
        steps = self.draft if stage.what == DRAFT else 1 + self.row * stage.length
        taken = first + TIMINGS * steps
        economy.done(stage, self.plain * steps, self.plain * taken, 0, committed)
        return taken

    def run(self, n_tokens, verify_length=7):
        """As in World: (economy, plain steps taken, rounds)."""
        rng, prepared = random.Random(self.seed), set()
        costs, p = self.costs, self.plain
        taken, committed, rounds = 0.0, 0, []
        if costs.plain.ms is None:  # the engine's first answer: three plain steps, timed
            costs.plain.extend([p])
            costs.note_preparation(p * self.prepare)
            taken += 1 + TIMINGS
        economy = Economy(costs, "simulated", verify_length, self.timed)
        economy.begin(self.reach)
        lags = economy.waits
        while committed < n_tokens:
            while (stage := economy.due(len(rounds), committed)) is not None:
                if stage.what == TRY and lags and self.reach:  # rounds that keep rows
                    n = min(self.reach, n_tokens - committed)
                    economy.rest([p] * n, 0.0)
                    first = "taps" not in prepared
                    prepared.add("taps")
                    taken += n * (1 + 0.05) + first * self.prepare * TIMED.in_all
                    committed += n
                    rounds += [(0, 1, "economy")] * n
                    lags = False
                taken += self._stage(economy, stage, committed, prepared)
            n = min(economy.rests_until(committed), n_tokens) - committed
            if n > 0:
                economy.rest([p] * n, 0.0)
                committed, taken, lags = committed + n, taken + n, economy.lean
                rounds += [(0, 1, "economy")] * n
                continue
            if committed >= n_tokens:
                break
            length, why = economy.choose(n_tokens - committed, len(rounds), committed)
            rate = self.rate(committed) if callable(self.rate) else self.rate
            accepted = 0
            while accepted < length and rng.random() < rate:
                accepted += 1
            emitted = min(accepted + 1, n_tokens - committed)
            steps = self.cost(length) * (1 + self.noise * rng.uniform(-1, 1))
            if length and length not in prepared:
                prepared.add(length)
                steps += self.prepare
            committed, taken = committed + emitted, taken + steps
            economy.record(length, accepted, emitted, p * steps, 0.0, committed >= n_tokens)
            rounds.append((length, emitted, why))
        return economy, taken, rounds


@settings(max_examples=300, deadline=None)
@given(
    draft=st.floats(0.0, 6.0),
    row=st.floats(0.0, 1.0),
    rates=st.lists(st.floats(0.0, 0.99), min_size=1, max_size=6),
    span=st.integers(20, 400),
    prepare=st.floats(0.2, 60.0),
    reach=st.sampled_from([0, 64, 128, None]),
    verify_length=st.sampled_from([3, 7, 15]),
    n_tokens=st.sampled_from([1000, 3000]),
    timed=st.booleans(),
    seed=st.integers(0, 10**6),
)
# found by search: lengths of the last rounds prepared one by one, and a drafter without a pass
@example(0.378, 0.0118, [0.95, 0.0664], 50, 7.68, 128, 15, 1000, True, 142459)
@example(1.15, 0.0115, [0.99, 0.95, 0.0, 0.4, 0.95, 0.99], 50, 22.2, 128, 3, 1000, False, 154474)
def test_a_quick_target_is_never_more_than_five_percent_slower(
    draft, row, rates, span, prepare, reach, verify_length, n_tokens, timed, seed
):
    """Catches preparations that nobody pays for: recording a pass takes up to 60 plain steps, in the
    first answer of an engine and in later ones, which know the costs and have to record anew."""

    def rate(committed):
        return rates[committed // span % len(rates)]

    world = QuickWorld(draft, row, rate, prepare=prepare, reach=reach, timed=timed, seed=seed)
    for _ in range(3):
        _, taken, _ = world.run(n_tokens, verify_length)
        assert taken <= 1.05 * n_tokens


def test_what_cannot_pay_is_found_out_without_a_round():
    """Catches trials of a pair whose passes alone take longer than all accepted drafts could save,
    and figures that the sentence does not have."""
    economy, taken, rounds = QuickWorld(draft=4.2, row=0.6, rate=1.0).run(4000)
    assert all(not length for length, *_ in rounds) and taken < 4000 + 60
    last = economy.events[-1]
    assert last.kind == "paused" and last.resume_at is None and last.speedup < 1
    assert "a draft pass takes 4.2 plain steps and verifying 7 drafts takes 5.2" in last.reason
    assert "cannot pay" in last.reason


def test_a_quick_target_drafts_in_the_end_where_that_pays():
    """Catches saving that never ends: a draft that brings 1.9 times, and one without a pass of its
    own, which needs less preparation."""
    economy, _, rounds = QuickWorld(draft=0.3, row=0.1, rate=0.95, prepare=8.0).run(3000)
    assert economy.state == "drafting" and [n for n, *_ in rounds[-50:]].count(7) > 40
    _, taken, rounds = QuickWorld(
        draft=0.0, row=0.1, rate=0.9, prepare=8.0, reach=0, timed=False
    ).run(1000)
    assert taken < 700


def test_the_end_of_an_answer_prepares_nothing():
    """Catches a pass of its own for every length that still fits: eight recordings in a row."""
    world = QuickWorld(draft=0.3, row=0.02, rate=0.9, prepare=4.0)
    world.run(2000, 15)
    for n_tokens in range(1000, 1016):
        _, _, rounds = world.run(n_tokens, 15)
        assert {length for length, *_ in rounds} <= {0, 3, 7, 15}


@pytest.mark.parametrize("rate, draft", [(0.95, 2.0), (0.95, 1.5), (0.9, 1.5)])
@pytest.mark.parametrize("prepare", [3.0, 5.0, 8.0])
def test_a_dear_draft_comes_to_the_long_lengths_that_pay(rate, draft, prepare):
    """Catches a length that is tried first because its passes are short and then kept, where the time
    of a round is that of its draft: 1.1 times plain's speed at 3, 2 to 3 times at 15."""
    world = QuickWorld(draft, 0.06, rate, prepare=prepare)
    for _ in range(2):
        economy, taken, rounds = world.run(5000, 15)
    assert economy.state == "drafting" and economy.length > 3 and 5000 / taken > 1.6


def test_an_answer_measures_what_a_plain_step_costs_now():
    """Catches the step of the last answer's long context taken for that of this one's beginning: each
    round seems to gain, and drafting that loses goes on."""
    costs, steady = RoundCosts(), Meter()
    costs.plain.extend([0.9] * 9)
    steady.extend([0.9] * 9)
    costs.meter("draft", 3).extend([1.4] * 9)
    economy = Economy(costs, "draft", 3, True, None, steady)
    economy.begin(64)
    for _ in range(3):
        assert economy.choose(100, 0, 0) == (0, MEASURE)
        economy.record(0, 0, 1, 0.6, 0.0, False)
    assert economy._plain_ms == 0.6


def test_a_length_known_from_before_is_prepared_when_that_can_be_paid():
    """Catches an answer that takes a length over from an earlier one and records it on credit."""
    costs = RoundCosts()
    costs.plain.extend([0.2])
    costs.note_preparation(0.2 * 12)
    for length, steps in ((3, 1.4), (7, 1.6)):
        costs.meter("draft", length).extend([0.2 * steps] * 8)
    economy = Economy(costs, "draft", 7, True)
    economy.begin(64)
    economy.ready(Stage(TRY, 3, 0.0))
    for _ in range(10):
        economy._gains.see(3, 3)
    assert economy.account.holds(economy.prospects.price_of_length(7)) is False
    assert not economy._may_prepare(7, 3)
    economy.account.balance = 31.0
    assert economy._may_prepare(7, 3)


def test_a_slow_target_drafts_at_once_whatever_preparing_takes():
    """Catches thrift where there is nothing to save: a step of 20 ms, 50 ms to record a pass."""
    world = QuickWorld(rate=0.9, plain=20.0, prepare=2.5)
    economy, taken, rounds = world.run(1000)
    assert [why for *_, why in rounds[:4]] == [MEASURE, MEASURE, MEASURE, ""]
    assert taken < 550 and economy.pauses == 0


def test_what_is_recorded_is_not_paid_for_again():
    """Catches an engine that saves up in every answer for passes that the one before has made."""
    costs, nothing = RoundCosts(), Unrecorded(0, 0, 0, 0)
    costs.plain.extend([0.2])
    costs.note_preparation(0.2 * 17)

    def price(left):
        return Prospects(costs, "draft", (3,), True, lambda n: left).next_stage(64, lambda n: 2.0)

    everything = Unrecorded(1, 1, 1, 1)
    assert price(everything).what == DRAFT
    assert price(everything).steps - price(nothing).steps == pytest.approx(17 * DRAFT_SHARE)
    costs.note_draft("draft", 0.1)
    assert price(everything).what == VERIFY
    assert price(everything).steps - price(nothing).steps == pytest.approx(17)
    costs.note_verify(3, 0.3)
    assert price(everything).what == TRY
    assert price(everything).steps - price(TIMED).steps == pytest.approx(17 * (1 + DRAFT_SHARE))
    assert price(TIMED).steps - price(nothing).steps == pytest.approx(17 * TIMED.in_all)


def loops_of(economy, round_ms, measured_ms, plain_ms, n_tokens=1000):
    """(rounds that drafted, milliseconds) of an answer: a round of 7 drafts emits 3 tokens, a plain
    one takes ``plain_ms`` and is measured as ``measured_ms``."""
    drafted = taken = emitted = 0
    while emitted < n_tokens:
        n, _ = economy.choose(n_tokens - emitted, drafted, emitted)
        ms, tokens = (round_ms, 3) if n else (plain_ms, 1)
        economy.record(n, 2 if n else 0, tokens, ms if n else measured_ms, 0.0, False)
        drafted, taken, emitted = drafted + (n > 0), taken + ms, emitted + tokens
    return drafted, taken


def test_a_machine_that_becomes_faster_does_not_leave_drafting_on():
    """Catches a plain step that was timed on a busy machine and is compared with for the rest of the
    answer: drafting goes on, at 1.3 times the time of plain decoding."""
    costs = RoundCosts()
    costs.plain.extend([20.0] * 9)  # twice what it takes from here on
    drafted, taken = loops_of(Economy(costs, "simulated", 7), 40.0, 10.0, 10.0)
    assert drafted < 60 and taken < 1.05 * 10.0 * 1000


def test_a_quick_target_is_compared_with_plain_steps_in_a_row():
    """Catches the step between two drafting rounds taken for that of plain decoding: it is up to
    twice as long, and drafting at 1.3 times plain's time looks like a gain."""
    costs, steady = RoundCosts(), Meter()
    costs.plain.extend([0.5] * 9)
    steady.extend([0.5] * 9)
    economy = Economy(costs, "simulated", 7, steady=steady)
    economy.begin(0)
    assert economy.quick
    drafted, taken = loops_of(economy, 2.0, 1.0, 0.5)
    assert 0 < drafted < 60 and taken < 1.05 * 0.5 * 1000


def test_what_is_known_holds_while_it_is_measured_anew():
    """Catches a division by nothing in a second answer of the engine."""
    meter = Meter()
    meter.extend([2.0, 3.0, 4.0])
    meter.clear()
    assert meter.count == 0 and meter.ms == 3.0
    meter.add(9.0)
    assert meter.count == 1 and meter.ms == 9.0
