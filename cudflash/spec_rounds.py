"""Rounds with a drafter: the engine's side of ``cudflash.spec.round``.

Owns the way of a block through target, drafter and decision. Must not know text or how an answer is
shown. Invariant: the tokens are those of plain decoding, whatever the drafter does; outside, the
drafter holds the target's committed rows, or the first of them (see ``DraftFeed``).
"""

import time
from functools import partial

from cudflash.draft_feed import DraftFeed
from cudflash.events import (
    Diagnosed,
    DrafterFailed,
    EconomyChanged,
    GateChanged,
    RoundFinished,
)
from cudflash.model.outcome import STOP_IDS
from cudflash.model.runner import ALL, LAST, NONE
from cudflash.receipt import SpeculativePart, speculative_part
from cudflash.rehearsal import Rehearsal
from cudflash.rounds import Rewound, Rounds, time_calls
from cudflash.spec.acceptance import MATCH, PLAIN, LogitRows, decide, rule_in_effect
from cudflash.spec.diagnosis import FIRST_PROPOSALS, diagnose_drafter, zero_acceptance
from cudflash.spec.economy import ECONOMY, MEASURE
from cudflash.spec.gate import AUTO, OPEN, AcceptanceGate, GateStatus
from cudflash.spec.prospects import DRAFT, QUICK_MS, SHORT_MS, SUSPECT, TIMINGS, TRY
from cudflash.spec.round import RoundState
from cudflash.spec.stats import SpecStats
from cudflash.spec.transaction import Transaction

# In rounds of these kinds nothing is drafted and more of the kind are likely to follow: their rows
# are handed to the drafter many at a time, which costs a fraction of one at a time.
PAUSES = ("gate", ECONOMY, MEASURE)
QUICK_BATCH = 64  # rounds of a pause that are told of at once, where steps are that quick
PLAIN_STEPS = 4  # run where an answer had no plain round to compare with


class SpecRounds(Rounds):
    """One target pass, one to verify length + 1 tokens.

    Parameters
    ----------
    runner : Runner
    chooser : Chooser
    drafter : GuardedDrafter
    options : SpecOptions
    meter : StepMeter
    """

    def __init__(self, runner, chooser, drafter, options, meter):
        super().__init__(runner)
        self._chooser, self._drafter, self._options = chooser, drafter, options
        self._meter = meter
        self._transaction = Transaction(
            runner, drafter, None if chooser.on_device else chooser.chain
        )
        self._state = None
        self._feed = DraftFeed(runner, drafter)
        self._feeds = True  # the open block's rows are shown to the drafter
        self._keeps = False  # the open block's row is to be kept back
        self._may_be_quick = False  # as far as the prompt's last pass tells
        self._rest_until = 0  # committed rows before which rounds are plain ones, without a thought
        self._resting = False  # rounds are made without block and drafts
        self._newest = self._chosen = self._ms = None  # anchor, choice and time of such a round
        self._rest_ms, self._rest_feed = [], 0.0  # of those not taken down yet
        self._rest_batch, self._rest_feeds = 1, False  # how many at once; their rows are kept
        self._stage = None  # for which rows are kept at the moment
        self._held = None  # what the draft remembered when last asked
        self._events = []
        self._told_fault = self._told_zero = False
        self._findings = ()
        self._part = None
        self._round_s = 0.0  # of the newest round, until it is settled

    # -- prompt ---------------------------------------------------------------------------------

    def rewind(self, wanted):
        """Keep the rows that target and drafter both hold, at most ``wanted``.

        A drafter without taps is shown the ids of rows it has not seen; one with taps needs the
        target to evaluate them again.
        """
        self._feed.capture()
        if self._known_to_wait():
            return self._rewind_alone(wanted)
        kept, lost = wanted, ""
        while True:
            held = self._runner.cache.keepable(kept)
            if held < kept:
                kept, lost = held, self._runner.cache.holder
            drafted = self._drafter.rewind(kept, self._runner.tokens)
            if self._drafter.fault is not None or drafted == kept:
                break
            if not self._drafter.taps:
                self._drafter.observe(self._runner.tokens[drafted:kept])
                self._drafter.commit(kept - drafted)
                break
            kept, lost = drafted, "the draft's context"
        return Rewound(self._runner.rewind(kept), lost)

    def _known_to_wait(self):
        """Whether drafting is put off from the start: the draft then does not see the prompt."""
        if not self._economical() or self._is_new():
            return False
        (economy := self._economy()).begin(self._feed.reach)
        return economy.waits

    def _economy(self):
        unrecorded = partial(self._feed.unrecorded, self._chooser.n_largest)
        return self._options.economy(self._drafter, unrecorded, self._meter)

    def _is_new(self):
        return self._options.costs.plain.ms is None  # the engine's first answer

    def _rewind_alone(self, wanted):
        """Keep the rows that the target holds; the drafter's are as many or fewer."""
        self._drafter.rewind(self._runner.cache.keepable(wanted), self._runner.tokens)
        self._feed.leave_alone()
        return super().rewind(wanted)

    def prompt_chunk(self, tokens, last, remaining):
        """Evaluate a part of the prompt, show it to the drafter, commit both."""
        seen = self._feed.captures and not self._drafter.lags
        owed = seen and last and self._drafter.taps and self._economical() and self._is_new()
        started, recorded = time.perf_counter(), self._runner.record_ms
        with self._transaction as transaction:
            self._runner.step(tokens, LAST if last else NONE)
            recording = self._runner.record_ms - recorded
            ms = 1e3 * (time.perf_counter() - started) - recording
            if seen and not owed:
                self._drafter.observe(tokens, self._runner.tap_rows(len(tokens)), remaining)
            transaction.commit(len(tokens), observed=seen and not owed)
        if owed:
            self._feed.owe(tokens)
        self._may_be_quick = ms < max(SHORT_MS, QUICK_MS * len(tokens))
        if self._options.costs is not None and not recording:  # else it is longer than need be
            self._options.costs.note_rows(len(tokens), ms)
        self._note_fault()

    def checkpoint(self):
        """Make a rewind to the committed rows possible, for target and drafter alike."""
        super().checkpoint()
        self._drafter.checkpoint()

    def choose_first(self):
        """Choose from the logits that the prompt's last row has left."""
        options, chooser = self._options, self._chooser
        n_past = self._runner.cache.length
        chooser.read(n_past - 1)
        first = chooser.choose()
        economy = self._economy() if self._economical() else None
        if economy is not None:
            self._begin(economy, first.token)
        self._state = RoundState(
            first.token, n_past, limits=options.limits, accept=options.accept,
            chain=chooser.chain, drafter=self._drafter, gate=AcceptanceGate(options.mode),
            stats=SpecStats(self._meter.ms), economy=economy, before_draft=self._feed.hand_over,
        )  # fmt: skip
        return [first]

    def _begin(self, economy, token):
        """Find out how quick the target is, if that is not known, and what follows from it."""
        costs = self._options.costs
        room = self._runner.cache.n_ctx - self._runner.cache.length
        if costs.plain.ms is None and room and self._may_be_quick:
            taps = self._feed.captures
            self._feed.capture(False)  # the pass that a pause replays
            recorded = self._runner.record_ms
            ms, more = time_calls(lambda: self._try_step((token,)), 1 + TIMINGS)
            costs.plain.extend([ms])
            self._meter.add(ms)
            new = self._runner.record_ms > recorded  # else an earlier answer has recorded this pass
            costs.note_preparation(more if new else self._runner.least_record_ms)
            self._feed.capture(taps)
        economy.begin(self._feed.reach)
        while (stage := economy.due(0, 0)) is not None and stage.what == DRAFT:
            self._time_stage(economy, stage, token, 0)
        if economy.waits:
            self._feed.leave_alone()
            return
        self._feed.pay()
        economy.reach = self._feed.reach

    def _time_stage(self, economy, stage, anchor, committed):
        """Time a pass by itself, as the economy asks."""
        started, taps = time.perf_counter(), self._feed.captures
        if stage.what == DRAFT:
            action = partial(self._drafter.time_pass, anchor, stage.length)
        else:
            self._feed.capture()  # the pass that a round replays
            action = partial(self._try_step, (anchor,) * (stage.length + 1))
        ms, _ = time_calls(action, TIMINGS)
        if ms > SUSPECT * self._options.costs.plain.ms:  # interrupted by another process, perhaps
            ms = min(ms, time_calls(action, TIMINGS)[0])
        self._feed.capture(taps)
        took = 1e3 * (time.perf_counter() - started)
        rounds = 0 if self._state is None else self._state.stats.rounds
        economy.done(stage, ms, took, rounds, committed)

    def _try_step(self, tokens):
        """Evaluate rows and drop them."""
        self._step(tokens)
        self._chooser.fetch(len(tokens), self._chooser.n_largest)
        self._runner.rollback()

    def _economical(self):
        """Whether times may decide: not where tokens would depend on them."""
        matches = rule_in_effect(self._options.accept, self._chooser.chain) == MATCH
        return matches and self._options.mode == AUTO and self._options.costs is not None

    # -- rounds ---------------------------------------------------------------------------------

    def next(self, room):
        """Draft, evaluate, decide; the block stays open."""
        state = self._state
        if self._resting or self._begins_rest():
            return [self._rest()]
        started = time.perf_counter()
        self._transaction.begin()
        planned = state.plan_block(room, self._runner.tokens, self._options.unseen)
        block = self._evaluate(planned)
        if block is None:
            if not planned.n_drafts:
                self._chooser.read(self._runner.cache.length, 1)  # raises: plain decoding fails too
            self._transaction.rollback()
            self._transaction.begin()
            block = state.plain_block()
            self._step(block.tokens)
            self._chooser.read(self._runner.cache.length, 1, self._chooser.n_largest)
        self._keeps = block.skipped in PAUSES and self._feed.captures and self._feed.n_keepable > 0
        if not self._keeps:
            self._feed.hand_over()  # earlier rows first
        self._feeds = not self._keeps and not self._drafter.lags
        decision = state.decide(self._chooser.rows(len(self._options.limits.stop_ids) <= STOP_IDS))
        state.observe(self._runner.tap_rows(len(block.tokens)), self._feeds)
        made = [self._chooser.made(token, row) for row, token in enumerate(decision.tokens)]
        self._round_s = time.perf_counter() - started
        return made

    def _begins_rest(self):
        """Whether the coming rounds are plain ones for sure; what is due before is done here."""
        state, economy = self._state, self._state.economy
        if economy is None:
            return False
        if state.n_past >= self._rest_until:
            if state.fault is None and state.gate.state == OPEN:
                self._prepare(economy)
                self._events += [EconomyChanged(event) for event in state.drain_decisions()]
            self._rest_until = max(self._rest_until, state.rests_until())
        if self._rest_until <= state.n_past:
            return False
        if economy.lean and self._stage is None and not self._drafter.lags:
            self._feed.leave_alone()
        self._rest_batch = min(QUICK_BATCH, self._rest_until - state.n_past) if economy.quick else 1
        self._rest_feeds = self._feed.captures and bool(self._drafter.taps)
        self._newest, self._resting = state.anchor, True
        return True

    def _prepare(self, economy):
        """Do what the economy wants done before it lets the drafter draft."""
        state = self._state
        while self._stage is None:
            stage = economy.due(state.stats.rounds, state.committed)
            if stage is None:
                return
            if stage.what == TRY:
                self._stage = stage
                self._feed.capture()
            elif self._runner.cache.n_ctx - self._runner.cache.length > stage.length:
                self._time_stage(economy, stage, state.anchor, state.committed)
            else:
                return
        missing = self._feed.missing(economy.reach)
        if missing:  # the rows that it will see
            self._rest_until = state.n_past + missing
        else:
            economy.ready(self._stage)
            self._stage = None

    def _rest(self):
        """A round of a pause: nothing but what plain decoding does, because it must not cost more."""
        started, chooser = time.perf_counter(), self._chooser
        self._runner.step((self._newest,), top=chooser.n_largest)
        chooser.read(self._runner.cache.length, 1, chooser.n_largest)
        self._chosen = choice = chooser.choose()
        self._ms = 1e3 * (time.perf_counter() - started)
        return choice

    def _settle_rest(self):
        self._runner.commit(1)
        if self._rest_feeds:
            self._rest_feed += self._feed.rest(self._newest)
        self._newest = self._chosen.token
        self._rest_ms.append(self._ms)
        if len(self._rest_ms) == self._rest_batch:
            self._account()

    def _account(self):
        """Take down the rounds of a pause and tell of them.

        Of a quick target many at once: between two passes, a record takes several times as long.
        """
        times, feed, self._resting = self._rest_ms, self._rest_feed, False
        self._rest_ms, self._rest_feed = [], 0.0
        if not times:
            return
        state, first, gate = self._state, self._state.n_past + 1, self._state.gate
        tokens = [*self._runner.tokens[first : first + len(times)], self._newest]
        run = state.settle_run(tokens[: len(times)], times, feed)
        self._meter.extend(times)
        if not self.watched:
            return
        *others, last = run.records()
        self._events += [RoundFinished(record) for record in others]
        status = GateStatus(gate.state, *gate.sample(), gate.warmup_left, state.committed, None)
        self._events.append(RoundFinished(last, status, self._held))

    def _step(self, tokens):
        self._runner.step(tokens, LAST if len(tokens) == 1 else ALL, top=self._chooser.n_largest)

    def _evaluate(self, block):
        """The block, with drafts that were left on the device; None unless its logits are finite."""
        chooser = self._chooser
        n, top = block.n_drafts, chooser.n_largest
        if not block.n_unseen:
            self._step(block.tokens)
            return block if chooser.fetch(1 + n, top) else None
        ids = self._options.limits.stop_ids
        self._runner.set_stops(ids if len(ids) <= STOP_IDS else ())  # too many: the host decides
        self._runner.step_drafted(self._state.anchor, n, self._drafter.source, top)
        finite = chooser.fetch(1 + n, top, drafted=True)
        block = self._state.learn(chooser.box)
        if block is not None:
            self._runner.name(block.tokens)
        return block if finite else None

    def settle(self, kept):
        """Commit the rows of the first ``kept`` tokens but the last, and the anchor's."""
        if self._resting:
            self._settle_rest()
            return
        started, anchor = time.perf_counter(), self._state.anchor
        self._transaction.commit(kept, observed=self._feeds)
        if self._keeps:
            self._feed.keep_back(anchor)
        record = self._state.settle(kept)
        quick = self._state.economy is not None and self._state.economy.quick
        if not record.drafted and record.skipped != "retry" and not quick:
            self._meter.add_round(record.verify_ms + record.decide_ms, self._state.stats.ends[PLAIN])
        if self.watched:
            status = self._state.gate.status(self._state.committed)
            self._events.append(RoundFinished(record, status, self.context()))
        self._note_fault()
        self._events += [GateChanged(event) for event in self._state.drain_events()]
        self._events += [EconomyChanged(event) for event in self._state.drain_decisions()]
        self._note_zero()
        if record.drafted:
            ms = 1e3 * (self._round_s + time.perf_counter() - started)
            self._state.around_ms = max(0.0, ms - record.parts_ms)

    def bring_up(self):
        """Show the drafter every committed row, also those that wait."""
        self._feed.hand_over()

    def abandon(self):
        """Drop an open block."""
        self._transaction.rollback()
        self._runner.rollback()
        if self._state is not None:
            self._state.abandon()

    def rehearse(self, room):
        """Make the coming round and drop it; a proof that decisions depend on nothing unseen.

        It is decided a second time by a chain built anew that takes a snapshot made between
        proposal and decision.

        Parameters
        ----------
        room : int
            Tokens that the answer may still get.

        Returns
        -------
        Rehearsal or None
            None where the round drafts nothing, or no chain decides.
        """
        state, chooser = self._state, self._chooser
        drafts = state is not None and state.gate.state == OPEN  # a closed gate is left alone
        self._account()
        if not drafts or room < 1 or chooser.on_device:
            return None
        self._transaction.begin()
        try:
            block = state.plan_block(room, self._runner.tokens, self._options.unseen)
            block = self._evaluate(block) if block.n_drafts else None
            if block is None:
                return None
            rows = [chooser.row(i) for i in range(len(block.tokens))]
            snapshot = chooser.chain.snapshot()
            decision = state.decide(chooser.rows())
            state.observe(self._runner.tap_rows(len(block.tokens)))
            anew = chooser.chain.fresh()
            anew.restore(snapshot)
            replayed = decide(
                state.rule, block.proposal, LogitRows(anew, rows), anew.rng,
                self._options.limits.stop_ids,
            )  # fmt: skip
            return Rehearsal(block.proposal.tokens, decision, replayed)
        finally:
            self.abandon()

    # -- what is told -----------------------------------------------------------------------------

    def events(self):
        """Events since the last call."""
        news, self._events = self._events, []
        return news

    def context(self):
        """Return the HeldRows of the draft's context; None where a drafter has none to tell of."""
        self._held = self._drafter.held()
        return self._held

    def _note_fault(self):
        if self._drafter.fault is not None and not self._told_fault:
            self._told_fault = True
            self._events.append(DrafterFailed(self._drafter.fault))

    def _note_zero(self):
        """Warn as soon as the first proposals are all rejected, not at the end of the answer."""
        stats = self._state.stats
        if self._told_zero or stats.accepted or stats.drafted < FIRST_PROPOSALS:
            return
        self._told_zero = True
        found = zero_acceptance((len(r.drafted), r.accepted) for r in stats.drafting_records)
        if found is not None:
            self._events.append(Diagnosed(found))

    def finish(self, cancelled=False):
        """Measure a plain step if there was none, diagnose, fix what the receipt will say.

        Who has cancelled does not wait for a measurement.
        """
        options = self._options
        self._feed.hand_over()
        if self._state is not None:
            self._account()
            if not cancelled:
                self._measure_plain_step()
            self._diagnose()
        self._part = speculative_part(
            options.mode, options.accept, self._state, self._drafter,
            options.limits.verify_length, self._findings,
        )  # fmt: skip

    def _measure_plain_step(self):
        """Time plain passes at the end of the answer and drop them; only once per engine."""
        state, cache = self._state, self._runner.cache
        if not state.stats.rounds or self._meter.ms is not None or cache.length == cache.n_ctx:
            return
        for index in range(PLAIN_STEPS):
            started = time.perf_counter()
            self._runner.step((state.anchor,))
            self._chooser.fetch(1)
            self._runner.rollback()
            if index:  # the first one records the pass
                self._meter.add(1e3 * (time.perf_counter() - started))

    def _diagnose(self):
        settings = self._options.settings
        self._findings = diagnose_drafter(self._state.stats, self._drafter.drafter, settings)
        # settings that are not the file's were told when the draft was loaded
        told = {f"{setting[0]}-not-from-file" for setting in settings}
        if self._told_zero:
            told.add("zero-acceptance")
        self._events += [Diagnosed(f) for f in self._findings if f.name not in told]

    def stats(self):
        """Counters of the rounds, with whether drafts were used and why not."""
        if self._state is None:
            counts = SpecStats().to_dict()
            warning = ""
        else:
            stats = self._state.stats
            stats.give_plain_step(self._meter.ms)
            counts, warning = stats.to_dict(), stats.warning()
        about = {name: self._part[name] for name in ("mode", "used", "reason", "drafter", "rule")}
        return {
            **about, "verify_length": self._options.limits.verify_length, **counts,
            "economy": self._part["economy"],
            "warning": warning, "findings": [f.to_dict() for f in self._findings],
            "echoes": list(getattr(self._drafter.drafter, "echoes", ())),
        }  # fmt: skip

    def receipt(self):
        """The part about speculation."""
        return SpeculativePart(self._part, None if self._state is None else self._state.stats)
