"""What the monitor knows: a reducer over events, without a word about how it looks.

Owns the attribution of tokens to what chose them, and the recent past of acceptance. Must not know
Rich, terminals or clocks: a time comes with each event. Invariant: every number shown is one of
``cudflash.spec.stats`` over the records seen, or was told by an event; colours of tokens are those
records, so they can be checked against the counters.
"""

from collections import deque
from dataclasses import dataclass

from cudflash.events import (
    Diagnosed,
    DrafterFailed,
    EconomyChanged,
    Finished,
    GateChanged,
    PrefixReused,
    PromptProgress,
    RoundFinished,
    Started,
    TokenEvent,
)
from cudflash.spec.acceptance import BONUS, CORRECTED, PLAIN, STOPPED
from cudflash.spec.stats import SpecStats

ACCEPTED = "accepted"
PENDING = "pending"  # its round is not over
OWN = (PLAIN, BONUS, CORRECTED)  # tokens of the target; those of a prompt pass are plain
RECENT_ROUNDS = 256
NOTICES = 32


@dataclass(frozen=True)
class Span:
    """One token of the answer as it is shown."""

    text: str
    kind: str  # "accepted", "bonus", "corrected", "plain" or "pending"
    token: int


class MonitorState:
    """Everything there is to show of the answer in progress; ``see`` takes the next event.

    Attributes
    ----------
    answers : int
        Answers begun; the others describe the last of them.
    facts : dict
        See ``cudflash.answer_facts``; {} before the first header.
    spans : list of Span
        Tokens whose round is over.
    pending : list of Span
    counts : dict
        Tokens by kind, pending ones left out.
    stats : SpecStats
    recent : deque of (float or None)
        Share accepted of each round that proposed something; None where drafting was paused.
    gate : GateStatus or None
    gate_event : GateEvent or None
        The last one.
    economy : EconomyEvent or None
        The last decision made by measured times.
    context : HeldRows or None
    fault : DrafterFault or None
    findings : list of Finding
    notices : deque of str
        What happened, newest last.
    transient : str
        What goes on until the next event, such as a compilation.
    prompt : (int, int)
        Prompt tokens done, and in all.
    reused : PrefixReused or None
    result : Result or None
        Set when the answer is complete.
    n_tokens : int
    began, first_at, last_at : float or None
        Seconds: of the header, the first and the newest token.
    """

    def __init__(self):
        self.answers = 0
        self.transient = ""
        self.notices = deque(maxlen=NOTICES)
        self._reset({}, None)

    def _reset(self, facts, at):
        self.facts = facts
        self.spans, self.pending = [], []
        self.counts = dict.fromkeys((ACCEPTED, *OWN), 0)
        self.stats = SpecStats(facts.get("plain_step_ms"))
        self.recent = deque(maxlen=RECENT_ROUNDS)
        self.gate = self.gate_event = self.economy = self.context = self.fault = None
        self.reused = self.result = None
        self.findings = []
        self.prompt = (0, facts.get("prompt_tokens") or 0)
        self.n_tokens = 0
        self.began, self.first_at, self.last_at = at, None, None

    @property
    def drafter(self):
        """Facts about the drafter, None without one."""
        return self.facts.get("drafter")

    def see(self, event, at=None):
        """Take an event.

        Parameters
        ----------
        event : one of ``cudflash.events``
            Others are left alone.
        at : float, optional
            Seconds on any clock; rates are unknown without.
        """
        self.transient = ""
        take = _TAKE.get(type(event))
        if take is not None:
            take(self, event, at)

    def tell(self, sentence):
        """Show a sentence that is no event, such as a line that could not be read."""
        self.notices.append(sentence)

    # -- events ---------------------------------------------------------------------------------

    def _started(self, event, at):
        self.answers += 1
        self._reset(event.facts, at)

    def _reused(self, event, at):
        self.reused = event
        self.prompt = (event.cached_tokens, event.prompt_tokens)

    def _progress(self, event, at):
        self.prompt = (event.done, event.total)
        self.context = event.context or self.context

    def _token(self, event, at):
        self.n_tokens += 1
        if at is not None:
            self.first_at = at if self.first_at is None else self.first_at
            self.last_at = at
        self.pending.append(Span(event.text, PENDING, event.token))
        plain = self.drafter is None and self.facts
        if plain or event.index == 0:  # the first one was chosen by the prompt's pass
            self._settle([PLAIN] * len(self.pending))

    def _round(self, event, at):
        record = event.record
        self.stats.record(record)
        kept = min(record.accepted, record.emitted)
        kinds = [ACCEPTED] * kept
        if record.emitted > kept:  # the target's own token comes last, a stop has cut the rest
            kinds.append(record.end if record.end != STOPPED else ACCEPTED)
        # more than the round's own tokens: a damaged recording lacks the round before
        lead = max(0, len(self.pending) - len(kinds))
        self._settle([PLAIN] * lead + kinds[len(kinds) - (len(self.pending) - lead) :])
        if record.drafted:
            self.recent.append(record.accepted / len(record.drafted))
        elif record.skipped in ("gate", "economy") and self.recent and self.recent[-1] is not None:
            self.recent.append(None)
        self.gate = event.gate or self.gate
        self.context = event.context or self.context

    def _settle(self, kinds):
        """Give the pending tokens their kinds."""
        for span, kind in zip(self.pending, kinds):
            self.counts[kind] += 1
            self.spans.append(Span(span.text, kind, span.token))
        self.pending = []

    def _gate(self, event, at):
        self.gate_event = event.event
        self.notices.append(f"gate {event.event.kind}: {event.event.reason}")

    def _economy(self, event, at):
        self.economy = event.event
        self.notices.append(f"drafting {_DECISIONS[event.event.kind]}: {event.event.reason}")

    def _failed(self, event, at):
        self.fault = event.fault
        self.notices.append(event.fault.reason)

    def _diagnosed(self, event, at):
        self.findings.append(event.finding)
        self.notices.append(event.finding.sentence)

    def _finished(self, event, at):
        self._settle([PLAIN] * len(self.pending))
        if event.text:
            self.spans.append(Span(event.text, PLAIN, -1))
        self.result = event.result
        by = event.result.stopped_by
        by = "" if by is None else f" at {by!r}"
        self.notices.append(
            f"complete: {self.n_tokens} token{'' if self.n_tokens == 1 else 's'}, "
            f"ended by {event.result.finish_reason}{by}"
        )
        speculative = event.result.stats.get("speculative")
        if isinstance(speculative, dict):
            step = speculative.get("plain_step_ms")
            if isinstance(step, int | float) and step > 0:
                self.stats.give_plain_step(float(step))

    # -- derived --------------------------------------------------------------------------------

    @property
    def text(self):
        """Text of the answer so far."""
        return "".join(span.text for span in (*self.spans, *self.pending))

    @property
    def tokens_per_second(self):
        """Of the whole decoding so far; None before the second token."""
        if self.result is not None:
            tps = self.result.stats.get("decode_tps")
            if isinstance(tps, int | float) and tps > 0:
                return float(tps)
        if self.n_tokens < 2 or self.first_at is None or self.last_at <= self.first_at:
            return None
        return (self.n_tokens - 1) / (self.last_at - self.first_at)

    @property
    def shares(self):
        """Where the time of the rounds went: {"draft", "verify", "decide", "plain": share}.

        {} before the first round, and where no times were recorded.
        """
        s = self.stats
        parts = {
            "draft": s.draft_ms, "verify": s.verify_ms, "decide": s.decide_ms, "plain": s.plain_ms,
        }  # fmt: skip
        total = sum(parts.values())
        return {name: ms / total for name, ms in parts.items()} if total > 0 else {}

    @property
    def paused(self):
        """Whether measured times have paused drafting."""
        return self.economy is not None and self.economy.kind == "paused"

    @property
    def pause(self):
        """(tokens left, tokens in all) of the gate's or the economy's pause, None without one."""
        gate, event = self.gate, self.gate_event
        if gate is None:
            return None
        resume_at = gate.resume_at
        if resume_at is None and self.paused:
            event, resume_at = self.economy, self.economy.resume_at
        if resume_at is None:
            return None
        began = event.committed if event is not None else gate.committed
        return max(0, resume_at - gate.committed), max(1, resume_at - began)


_DECISIONS = {"paused": "paused", "resumed": "resumed", "length": "changed"}
_TAKE = {
    Started: MonitorState._started,
    PrefixReused: MonitorState._reused,
    PromptProgress: MonitorState._progress,
    TokenEvent: MonitorState._token,
    RoundFinished: MonitorState._round,
    GateChanged: MonitorState._gate,
    EconomyChanged: MonitorState._economy,
    DrafterFailed: MonitorState._failed,
    Diagnosed: MonitorState._diagnosed,
    Finished: MonitorState._finished,
}
