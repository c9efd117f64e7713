"""Rounds with a drafter: the engine's side of ``cudflash.spec.round``.

Owns the way of a block through target, drafter and decision. Must not know text or how an answer is
shown. Invariant: the tokens are those of plain decoding, whatever the drafter does; target and
drafter hold the same committed rows whenever control is outside.
"""

import time
from dataclasses import dataclass

from cudflash.events import (
    Diagnosed,
    DrafterFailed,
    EconomyChanged,
    GateChanged,
    RoundFinished,
)
from cudflash.model.outcome import STOP_IDS
from cudflash.model.runner import ALL, LAST, NONE
from cudflash.receipt import speculative_part
from cudflash.rounds import Rewound, Rounds
from cudflash.spec.acceptance import MATCH, Decision, LogitRows, decide, rule_in_effect
from cudflash.spec.diagnosis import (
    FIRST_PROPOSALS,
    HEALTHY_RATE,
    diagnose,
    seed_echo,
    zero_acceptance,
)
from cudflash.spec.economy import ECONOMY, MEASURE, Economy
from cudflash.spec.gate import AUTO, OPEN, AcceptanceGate, GateStatus
from cudflash.spec.round import RoundState
from cudflash.spec.stats import SpecStats
from cudflash.spec.transaction import Transaction

# In rounds of these kinds nothing is drafted and more of the kind are likely to follow: their rows
# are handed to the drafter many at a time, which costs a fraction of one at a time.
PAUSES = ("gate", ECONOMY, MEASURE)
PLAIN_STEPS = 4  # run where an answer had no plain round to compare with


@dataclass(frozen=True)
class SpecOptions:
    """What an answer asked for, checked."""

    mode: str  # "auto" or "on"
    accept: str  # "match" or "ratio"
    limits: object  # Limits
    settings: tuple = ()  # of the draft, see ``diagnose``
    costs: object = None  # RoundCosts of the engine; None leaves "auto" to the gate alone
    unseen: bool = False  # drafts may stay on the device until the target has evaluated them


@dataclass(frozen=True)
class Rehearsal:
    """A round that was decided and dropped, and decided again from a snapshot of the generator."""

    drafted: tuple[int, ...]
    decision: object  # Decision
    replayed: object  # Decision of a chain built anew, from the same rows and the same proposals

    def difference(self, record=None):
        """What the replay, or the round as it was then made, has other than the first decision.

        Parameters
        ----------
        record : RoundRecord, optional
            Of the round that came after the rehearsal, its drafts proposed again.

        Returns
        -------
        str
            "" when everything is equal.
        """
        found = _decided_otherwise("the replay", self.decision, self.replayed)
        if found or record is None:
            return found
        if record.drafted != self.drafted:
            return f"round {record.index} drafted {record.drafted}, before {self.drafted}"
        made = Decision(record.decided, record.accepted, record.tested, record.end, record.trials)
        return _decided_otherwise(f"round {record.index} made again", self.decision, made)


def _decided_otherwise(what, first, other):
    for index, (a, b) in enumerate(zip(first.trials, other.trials)):
        if a != b:
            return f"{what} has {b} as trial {index}, expected {a}"
    return "" if other == first else f"{what} has decided {other}, expected {first}"


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
        self._can_keep = 0  # rows of pauses, until they have to be handed over
        self._kept = []  # committed tokens whose rows the drafter has yet to see
        self._keeps = False  # the open block's row is to be kept back
        self._resting = None  # choice and time of a round that is made without block and drafts
        self._idle_gate = None  # its sample, while a pause lasts
        self._held = None  # what the draft remembered when last asked
        self._events = []
        self._told_fault = False
        self._told_zero = False
        self._findings = ()
        self._part = None

    # -- prompt ---------------------------------------------------------------------------------

    def rewind(self, wanted):
        """Keep the rows that target and drafter both hold, at most ``wanted``.

        A drafter without taps is shown the ids of rows it has not seen; one with taps needs the
        target to evaluate them again.
        """
        self._runner.set_taps(self._drafter.taps)
        self._can_keep = self._runner.n_keepable_taps
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

    def prompt_chunk(self, tokens, last, remaining):
        """Evaluate a part of the prompt, show it to the drafter, commit both."""
        with self._transaction as transaction:
            self._runner.step(tokens, LAST if last else NONE)
            self._drafter.observe(tokens, self._runner.tap_rows(len(tokens)), remaining)
            transaction.commit(len(tokens))
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
        economy = None
        if self._economical():
            economy = Economy(options.costs, self._drafter.name, options.limits.verify_length)
        self._state = RoundState(
            first.token, n_past, limits=options.limits, accept=options.accept,
            chain=chooser.chain, drafter=self._drafter, gate=AcceptanceGate(options.mode),
            stats=SpecStats(self._meter.ms), economy=economy, before_draft=self._hand_over,
        )  # fmt: skip
        return [first]

    def _economical(self):
        """Whether times may decide: not where tokens would depend on them."""
        options = self._options
        match = rule_in_effect(options.accept, self._chooser.chain) == MATCH
        return options.mode == AUTO and match and options.costs is not None

    # -- rounds ---------------------------------------------------------------------------------

    def next(self, room):
        """Draft, evaluate, decide; the block stays open."""
        state = self._state
        if state.rests():
            return [self._rest()]
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
        self._keeps = block.skipped in PAUSES and self._can_keep > 0
        if not self._keeps:
            self._hand_over()  # earlier rows first
        state.observe(self._runner.tap_rows(len(block.tokens)), not self._keeps)
        by_device = len(self._options.limits.stop_ids) <= STOP_IDS
        decision = state.decide(self._chooser.rows(by_device))
        return [self._chooser.made(token, row) for row, token in enumerate(decision.tokens)]

    def _rest(self):
        """A round of a pause: nothing but what plain decoding does, because it must not cost more."""
        started = time.perf_counter()
        self._step((self._state.anchor,))
        self._chooser.read(self._runner.cache.length, 1, self._chooser.n_largest)
        choice = self._chooser.choose()
        self._resting = choice, 1e3 * (time.perf_counter() - started)
        return choice

    def _settle_rest(self):
        (choice, ms), self._resting = self._resting, None
        anchor = self._state.anchor
        self._runner.commit(1)
        started = time.perf_counter()
        if self._can_keep:
            self._keep_back(anchor)
        else:
            self._drafter.observe((anchor,), self._runner.tap_rows(1))
            self._drafter.commit(1)
        record = self._state.settle_plain(
            choice.token, ms, 1e3 * (time.perf_counter() - started)
        )
        self._meter.add(ms)
        gate = self._state.gate
        if self._idle_gate is None:  # it does not change in a pause
            self._idle_gate = gate.sample()
        accepted, proposals, rounds = self._idle_gate
        status = GateStatus(
            gate.state, accepted, proposals, rounds, gate.warmup_left, self._state.committed, None
        )
        self._events.append(RoundFinished(record, status, self._held))

    def _step(self, tokens):
        self._runner.step(tokens, LAST if len(tokens) == 1 else ALL, top=self._chooser.n_largest)

    def _evaluate(self, block):
        """The block, with drafts that were left on the device; None unless its logits are finite."""
        n, top = block.n_drafts, self._chooser.n_largest
        if not block.n_unseen:
            self._step(block.tokens)
            return block if self._chooser.fetch(1 + n, top) else None
        chooser = self._chooser
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
        if self._resting is not None:
            self._settle_rest()
            return
        self._idle_gate = None
        anchor = self._state.anchor
        self._transaction.commit(kept, observed=not self._keeps)
        if self._keeps:
            self._keep_back(anchor)
        record = self._state.settle(kept)
        if not record.drafted and record.skipped != "retry":
            self._meter.add(record.verify_ms + record.decide_ms)
        status = self._state.gate.status(self._state.committed)
        self._events.append(RoundFinished(record, status, self.context()))
        self._note_fault()
        self._events += [GateChanged(event) for event in self._state.drain_events()]
        self._events += [EconomyChanged(event) for event in self._state.drain_decisions()]
        self._note_zero()

    def _keep_back(self, token):
        self._runner.keep_taps(len(self._kept))
        self._kept.append(token)
        room = self._can_keep
        if len(self._kept) == room:  # the older half; the newer one is sure to follow
            half, left = room - room // 2, room // 2
            older, self._kept = self._kept[:half], self._kept[half:]
            self._drafter.observe(older, self._runner.kept_taps(half), left)
            self._drafter.commit(half)
            self._runner.drop_kept(half, left)

    def bring_up(self):
        """Show the drafter every committed row, also those that were kept back."""
        self._hand_over()

    def _hand_over(self):
        """Show the drafter the rows that were kept back; done before it is asked for anything."""
        kept, self._kept = self._kept, []
        if kept:
            self._drafter.observe(kept, self._runner.kept_taps(len(kept)))
            self._drafter.commit(len(kept))

    def abandon(self):
        """Drop an open block."""
        self._resting = None
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
            state.observe(self._runner.tap_rows(len(block.tokens)))
            decision = state.decide(chooser.rows())
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
        found = zero_acceptance((len(r.drafted), r.accepted) for r in stats.records)
        if found is not None:
            self._events.append(Diagnosed(found))

    def finish(self, cancelled=False):
        """Measure a plain step if there was none, diagnose, fix what the receipt will say.

        Who has cancelled does not wait for a measurement.
        """
        options = self._options
        self._hand_over()
        if self._state is not None:
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
        stats, inner = self._state.stats, self._drafter.drafter
        boundaries = getattr(inner, "boundaries", dict)()
        found = diagnose(stats.records, stats, boundaries, self._options.settings)
        echo = None
        # not every draft is trained to echo: worth telling only where first drafts are rejected,
        # which a wrong embedding, norm or head would spoil as well
        first, tested = sum(stats.accepted_at[:1]), sum(stats.tested_at[:1])
        if getattr(inner, "echoes", None) and first < HEALTHY_RATE * tested:
            echo = seed_echo(*zip(*inner.echoes))
        self._findings = found if echo is None else (*found, echo)
        # settings that are not the file's were told when the draft was loaded
        told = {f"{setting[0]}-not-from-file" for setting in self._options.settings}
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
        return {"speculative": self._part}
