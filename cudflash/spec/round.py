"""The round: plan a block, let the target evaluate it, decide, settle.

Owns the carried frontier of one answer: the anchor (newest token, chosen but not evaluated) and how
many rows before it are committed. Must not know models, devices, text or events. Invariant: between
rounds exactly the rows before the anchor are committed in the target, and at every proposal in the
drafter alike.

One round, by the caller::

    transaction.begin()
    block = state.plan_block(room, tokens)   # asks the drafter
    ...evaluate block.tokens on the target, one row of logits each, taps captured...
    block = state.learn(words)               # only where the drafts were left on the device
    decision = state.decide(rows)            # tokens to emit
    state.observe(taps)                      # also without drafts: no holes in the draft's context
    ...emit; the answer may end after the first ``kept`` of them...
    transaction.commit(kept)                 # the anchor's row and those of all kept but the last
    state.settle(kept)

On any exception or cancellation instead: ``transaction.rollback()`` and ``state.abandon()``; the
anchor is then as before the round, which may be tried again. When the target's rows are not finite
and the block has drafts, the caller rolls back, begins again and evaluates ``state.plain_block()``:
an error is one only if plain decoding has it too.
"""

import time
from dataclasses import dataclass

from cudflash.spec.acceptance import MATCH, RATIO, STOPPED, decide, rule_in_effect
from cudflash.spec.drafters import DraftContext
from cudflash.spec.economy import ECONOMY
from cudflash.spec.gate import OPEN
from cudflash.spec.proposals import NOTHING, DraftSampler, Proposal
from cudflash.spec.stats import PlainRun, RoundRecord, SpecStats
from cudflash.spec.verify_length import check_verify_length, cut_after_stop, draft_budget

_FEWEST_SHOWN = 4  # rows of one pass; fewer cost the same

_IDLE, _PLANNED, _DECIDED = "idle", "planned", "decided"


def _shown(n_decided, n_evaluated):
    """Rows shown to a drafter: what may be kept, filled up to few sizes, since each is recorded."""
    n = _FEWEST_SHOWN
    while n < n_decided:
        n *= 2
    return min(n, n_evaluated)


@dataclass(frozen=True)
class Limits:
    """What bounds the rounds of an answer.

    Attributes
    ----------
    verify_length : int
        3, 7 or 15.
    n_ctx : int
        Rows that the context holds.
    vocab_size : int
    stop_ids : frozenset of int
    """

    verify_length: int
    n_ctx: int
    vocab_size: int
    stop_ids: frozenset = frozenset()


@dataclass(frozen=True)
class Block:
    """Rows for the target to evaluate."""

    tokens: tuple[int, ...]  # the anchor, then the drafts
    proposal: Proposal  # the drafts
    skipped: str  # why there are none, see RoundRecord; "" when there are
    n_unseen: int = 0  # drafts that are left on the device; tokens and proposal have none then

    @property
    def n_drafts(self):
        """Number of drafts: rows less one."""
        return self.n_unseen or len(self.tokens) - 1


class RoundState:
    """The rounds of one answer.

    Parameters
    ----------
    anchor : int
        The token chosen from the prompt's last row.
    n_past : int
        Committed rows: the prompt's.
    limits : Limits
    accept : {"match", "ratio"}
    chain : SamplerChain
        Has accepted the prompt and the anchor.
    drafter : GuardedDrafter
        Has observed and committed the prompt.
    gate : AcceptanceGate
    stats : SpecStats, optional
    clock : callable, optional
        Seconds.
    economy : Economy, optional
        Decides with the gate whether and how much a round drafts. Only where tokens do not depend
        on it, that is under ``match``.
    before_draft : callable, optional
        Called before the drafter is asked: hands it committed rows that were kept back.

    Attributes
    ----------
    anchor, n_past : int
    rule : {"match", "ratio"}
        The rule in effect: ``match`` wherever nothing is drawn.
    stats : SpecStats
    gate : AcceptanceGate
    around_ms : float
        What a round that drafts takes beside its parts, for the economy: to a step of 0.3 ms it is
        not nothing. Set by who makes the rounds, from the last one.

    Raises
    ------
    UsageError
        For an illegal verify length or acceptance rule, before any work.
    """

    def __init__(
        self, anchor, n_past, *, limits, accept, chain, drafter, gate, stats=None,
        clock=time.perf_counter, economy=None, before_draft=None,
    ):  # fmt: skip
        check_verify_length(limits.verify_length, drafter.block_size)
        self.rule = rule_in_effect(accept, chain)
        self.anchor, self.n_past = int(anchor), n_past
        self.gate, self.economy, self.around_ms = gate, economy, 0.0
        self._before_draft = before_draft
        self.stats = SpecStats() if stats is None else stats
        self._n_prompt = n_past
        self._limits, self._chain, self._drafter, self._clock = limits, chain, drafter, clock
        ratio = self.rule == RATIO
        self._sampler = DraftSampler(chain.config, limits.vocab_size) if ratio else None
        self._phase = _IDLE
        self._block = self._decision = None
        self._room = 0
        self._gate_state = gate.state
        self._draft_s = self._verify_s = self._decide_s = 0.0
        self._mark = 0.0
        self._events_seen = self._decisions_seen = 0

    @property
    def committed(self):
        """Tokens of the answer whose rows are committed."""
        return self.n_past - self._n_prompt

    @property
    def fault(self):
        """The drafter's fault, if it had one."""
        return self._drafter.fault

    # -- one round ----------------------------------------------------------------------------

    def plan_block(self, room, tokens, unseen=False):
        """Return the next Block, asking the drafter if the gate and the budget let it.

        Parameters
        ----------
        room : int
            Tokens that the answer may still get, at least 1.
        tokens : sequence of int
            The committed ids, ``n_past`` of them.
        unseen : bool
            The drafts may stay on the device where drafter and rule have them there; ``learn``
            follows when the target has evaluated them.
        """
        self._expect(_IDLE)
        context_left = self._limits.n_ctx - self.n_past
        if room < 1 or context_left < 1:
            raise ValueError(f"a round has room for {room} tokens and {context_left} rows")
        if len(tokens) != self.n_past:
            raise ValueError(f"{len(tokens)} ids for {self.n_past} committed rows")
        self._note_fault()
        self._room = room
        self._draft_s = self._verify_s = self._decide_s = 0.0
        was_open = self.gate.state == OPEN
        open_ = self.gate.allows(self.stats.rounds, self.committed)
        self._gate_state = self.gate.state
        n = draft_budget(self._limits.verify_length, room, context_left, self._drafter.drafter_max)
        if self.fault is not None:
            return self._planned(NOTHING, "fault")
        if not open_:
            return self._planned(NOTHING, "off" if self.gate.state == "off" else "gate")
        if n == 0:
            return self._planned(NOTHING, "budget")
        n, why = self._economic(n, was_open)
        if not n:
            return self._planned(NOTHING, why)
        if unseen and self.rule == MATCH and self._drafter.source is not None:
            n = self._start(n, tokens)
            return self._planned(NOTHING, "" if n else "fault", n or 0)
        proposal = self._propose(n, tokens)
        if proposal is None:
            return self._planned(NOTHING, "fault")
        return self._planned(proposal, "" if len(proposal) else "empty")

    def learn(self, words):
        """Return the Block with the drafts that were left on the device, None after a fault.

        It ends with the first stop token among them, whatever the target has evaluated beyond.

        Parameters
        ----------
        words : ndarray of int32
            What the drafter has told.
        """
        self._expect(_PLANNED)
        proposal = self._drafter.learn(words, self._block.n_unseen)
        if proposal is None:
            self._note_fault()
            return None
        proposal = proposal.first(cut_after_stop(proposal.tokens, self._limits.stop_ids))
        self._block = Block((self.anchor, *proposal.tokens), proposal, "")
        return self._block

    def plain_block(self):
        """Return a Block of the anchor alone, after the planned one has been rolled back."""
        self._expect(_PLANNED)
        self._draft_s += self._clock() - self._mark  # the dropped pass is a cost of drafting
        return self._planned(NOTHING, "retry")

    def observe(self, taps=None, feed=True):
        """Hand evaluated rows of the block to the drafter: those that may be kept.

        Parameters
        ----------
        taps : buffer of shape (rows of the block, n_taps, hidden_dim), or None
        feed : bool
            False keeps them back: the caller will hand them over before the next draft.
        """
        self._expect(_DECIDED)
        if not feed:
            return
        started = self._clock()
        n = _shown(len(self._decision.tokens), len(self._block.tokens))
        self._drafter.observe(self._block.tokens[:n], None if taps is None else taps[:n])
        # Projecting taps is the drafter's work, whether or not it has proposed.
        self._draft_s += self._clock() - started
        self._note_fault()

    def decide(self, rows):
        """Return the Decision about the block.

        Parameters
        ----------
        rows : LogitRows or alike
            Row i follows ``block.tokens[i]``. They must be finite (``Chooser.check_finite``).
        """
        self._expect(_PLANNED)
        started = self._clock()
        self._verify_s = started - self._mark
        self._decision = decide(
            self.rule, self._block.proposal, rows, self._chain.rng, self._limits.stop_ids
        )
        self._decide_s = self._clock() - started
        self._phase = _DECIDED
        return self._decision

    def settle(self, kept):
        """Move the frontier: the first ``kept`` decided tokens became part of the answer.

        Call it after the transaction's commit of ``kept`` rows.

        Returns
        -------
        RoundRecord
        """
        self._expect(_DECIDED)
        decision, block = self._decision, self._block
        if not 1 <= kept <= len(decision.tokens):
            raise ValueError(f"{kept} tokens kept of {len(decision.tokens)} decided ones")
        record = RoundRecord(
            index=self.stats.rounds,
            n_past=self.n_past,
            anchor=self.anchor,
            drafted=block.proposal.tokens,
            accepted=decision.accepted,
            tested=decision.tested,
            decided=decision.tokens,
            emitted=kept,
            end=decision.end,
            gate=self._gate_state,
            skipped=block.skipped,
            trials=decision.trials,
            draft_ms=1e3 * self._draft_s,
            verify_ms=1e3 * self._verify_s,
            decide_ms=1e3 * self._decide_s,
            confidence=tuple(block.proposal.confidence or ()),
        )
        self.n_past += kept
        self.anchor = decision.tokens[kept - 1]
        self.stats.record(record)
        self._phase = _IDLE
        self._note_fault()
        # What a stop or the limit has cut says nothing about the drafter.
        ended = kept < len(decision.tokens) or decision.end == STOPPED or kept == self._room
        if not ended:
            self.gate.record(record.index, block.n_drafts, decision.accepted, self.committed)
        self._note_costs(record, ended)
        return record

    def rests_until(self):
        """Committed rows up to which rounds are surely plain, because of times; 0 for none."""
        if self.economy is None or self.fault is not None or self.gate.state != OPEN:
            return 0
        until = self.economy.rests_until(self.committed)
        return until + self._n_prompt if until else 0

    def settle_run(self, tokens, times, feed_ms):
        """Take down rounds of a pause, which the caller has made: one row and one token each.

        Parameters
        ----------
        tokens : list of int
            At least one.
        times : list of float
            Milliseconds of target pass and choice, per round.
        feed_ms : float
            Of keeping rows for the drafter, in all.

        Returns
        -------
        PlainRun
        """
        self._expect(_IDLE)
        run = PlainRun(
            self.stats.rounds, self.n_past, self.anchor, tuple(tokens), tuple(times), feed_ms,
            self.gate.state, ECONOMY,
        )  # fmt: skip
        self.n_past += len(tokens)
        self.anchor = tokens[-1]
        self.stats.record_run(run)
        self.economy.rest(times, feed_ms)
        return run

    def abandon(self):
        """Forget the round in progress; the frontier stays where it was. Idempotent."""
        self._phase = _IDLE
        self._block = self._decision = None
        self._note_fault()

    # -- views --------------------------------------------------------------------------------

    def drain_events(self):
        """Gate events since the last call: closed, reopened, disabled, each with its reason."""
        new = self.gate.events[self._events_seen :]
        self._events_seen += len(new)
        return tuple(new)

    def drain_decisions(self):
        """Decisions of the economy since the last call."""
        new = () if self.economy is None else self.economy.events[self._decisions_seen :]
        self._decisions_seen += len(new)
        return tuple(new)

    # -- parts --------------------------------------------------------------------------------

    def _economic(self, n, was_open):
        """How many of ``n`` tokens are drafted as far as time decides, and why none."""
        economy = self.economy
        if economy is None:
            return n, ""
        if not was_open:
            economy.restart()
        switches = economy.switches
        n, why = economy.choose(n, self.stats.rounds, self.committed)
        if economy.switches != switches:
            self.gate.begin_sample()
        return n, why

    def _note_costs(self, record, ended):
        """Tell the economy what the round has cost; one that was tried twice is no example."""
        if self.economy is None or record.skipped == "retry":
            return
        n, ms = len(record.drafted), record.verify_ms + record.decide_ms
        feed = record.draft_ms
        if n:
            ms, feed = ms + feed + self.around_ms, 0.0
        self.economy.record(n, record.accepted, len(record.decided), ms, feed, ended)

    def _propose(self, n, tokens):
        """A checked proposal, cut after the first stop token; None after a fault."""
        ratio = self.rule == RATIO
        rng = self._chain.rng if ratio else None
        context = DraftContext(
            tokens, self.n_past, self._n_prompt, self._limits.vocab_size, self._sampler, rng
        )
        before = rng.state() if ratio else None
        started = self._clock()
        if self._before_draft is not None:
            self._before_draft()
        proposal = self._drafter.propose(self.anchor, n, context)
        self._draft_s = self._clock() - started
        if proposal is None:
            if ratio:  # draws for a proposal that is not used must not move the answer's stream
                rng.set_state(before)
            self._note_fault()
            return None
        return proposal.first(cut_after_stop(proposal.tokens, self._limits.stop_ids))

    def _start(self, n, tokens):
        """How many drafts were left on the device; None after a fault."""
        context = DraftContext(tokens, self.n_past, self._n_prompt, self._limits.vocab_size)
        started = self._clock()
        if self._before_draft is not None:
            self._before_draft()
        n = self._drafter.start(self.anchor, n, context)
        self._draft_s = self._clock() - started
        self._note_fault()
        return n

    def _planned(self, proposal, skipped, n_unseen=0):
        self._block = Block((self.anchor, *proposal.tokens), proposal, skipped, n_unseen)
        self._phase = _PLANNED
        self._mark = self._clock()
        return self._block

    def _note_fault(self):
        fault = self._drafter.fault
        if fault is not None:
            self.gate.disable(self.stats.rounds, self.committed, fault.reason)

    def _expect(self, phase):
        if self._phase != phase:
            raise RuntimeError(f"the round is {self._phase}, expected {phase}")
