"""What the rounds of an answer did: one record per round, counters, times.

Owns the counters and their identities. Must not know how rounds are made. Invariant: every counter
is a sum over the records, so a trace can be checked by hand.

Identities, true after every round (``identities`` checks them):

1. rounds = plain + bonus + corrected + stopped
2. emitted + cut = accepted + plain + bonus + corrected
3. tested = accepted + corrected <= drafted
4. drafted, tested, accepted = sums of their counts per position, and at each position
   accepted <= tested <= proposed, tested of the next one <= accepted
5. accepted_emitted <= accepted, and accepted_emitted <= emitted <= accepted_emitted + rounds

``emitted`` counts what became part of the answer; the answer has one token more, the one that the
prompt pass has chosen. ``cut`` counts tokens that were decided but came after the end of the
answer.
"""

from dataclasses import dataclass

from cudflash.errors import CudflashError, UsageError
from cudflash.spec.acceptance import BONUS, CORRECTED, PLAIN, STOPPED, Trial
from cudflash.spec.costs import median

MIN_OWN_STEPS = 3  # plain rounds of an answer before they say more than what was measured elsewhere


@dataclass(frozen=True)
class RoundRecord:
    """One round, finished.

    Attributes
    ----------
    index : int
        0 for the first.
    n_past : int
        Committed rows before it: the anchor's position.
    anchor : int
    drafted : tuple of int
        Proposals that were evaluated.
    accepted, tested : int
    decided : tuple of int
        Tokens decided; the first ``emitted`` became part of the answer.
    emitted : int
    end : {"plain", "bonus", "corrected", "stopped"}
    gate : str
        State of the gate when the round was planned.
    skipped : str
        Why nothing was drafted: "gate", "off", "economy" (it does not pay), "measure" (a plain
        round was needed to compare with), "budget", "fault", "empty" (the drafter proposed
        nothing), "retry" (the block with drafts was dropped); "" when something was.
    trials : tuple of Trial
        Under ``ratio``.
    draft_ms, verify_ms, decide_ms : float
        Wall time of the drafter, of the target pass and of the decision.
    confidence : tuple of float
        Of each proposal, where the drafter told it (DFlash2: softmax of its score among the
        candidates).
    """

    index: int
    n_past: int
    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    tested: int
    decided: tuple[int, ...]
    emitted: int
    end: str
    gate: str
    skipped: str
    trials: tuple[Trial, ...]
    draft_ms: float
    verify_ms: float
    decide_ms: float
    confidence: tuple[float, ...] = ()

    @property
    def parts_ms(self):
        """Milliseconds of drafting, verifying and deciding."""
        return self.draft_ms + self.verify_ms + self.decide_ms

    def to_dict(self):
        """The record without its times: the same answer made again gives the same value."""
        record = {
            "round": self.index,
            "n_past": self.n_past,
            "anchor": self.anchor,
            "drafted": list(self.drafted),
            "accepted": self.accepted,
            "emitted": list(self.decided[: self.emitted]),
            "end": self.end,
            "gate": self.gate,
            "skipped": self.skipped,
        }
        if self.confidence:
            record["confidence"] = list(self.confidence)
        if self.trials:
            record["trials"] = [[t.token, t.p, t.q, t.uniform] for t in self.trials]
        return record


@dataclass(frozen=True)
class PlainRun:
    """Rounds of a pause one after the other, without drafts; a record each only when asked for.

    Attributes
    ----------
    index, n_past, anchor : int
        Of the first.
    tokens : tuple of int
        Decided, one per round.
    times : tuple of float
        Milliseconds of target pass and choice, per round.
    feed_ms : float
        Spent on the drafter, in all.
    gate, skipped : str
    """

    index: int
    n_past: int
    anchor: int
    tokens: tuple[int, ...]
    times: tuple[float, ...]
    feed_ms: float
    gate: str
    skipped: str

    def records(self):
        """Return the RoundRecord of each round."""
        feed, before = self.feed_ms / len(self.tokens), (self.anchor, *self.tokens)
        first = RoundRecord(
            self.index, self.n_past, self.anchor, (), 0, 0, self.tokens[:1], 1, PLAIN, self.gate,
            self.skipped, (), feed, self.times[0], 0.0,
        )  # fmt: skip
        fields, made, index, n_past = vars(first), [], self.index, self.n_past
        for anchor, token, ms in zip(before, self.tokens, self.times):
            own = fields.copy()  # a third of the time that RoundRecord(...) takes
            own["index"], own["n_past"], own["anchor"] = index, n_past, anchor
            own["decided"], own["verify_ms"] = (token,), ms
            record = object.__new__(RoundRecord)
            object.__setattr__(record, "__dict__", own)
            made.append(record)
            index, n_past = index + 1, n_past + 1
        return made


class SpecStats:
    """Counters of one answer.

    Parameters
    ----------
    plain_step_ms : float, optional
        Time of one plain round as measured elsewhere; used until the answer has plain rounds of
        its own.

    Attributes
    ----------
    rounds : int
        Target passes after the prompt's.
    proposed_at, tested_at, accepted_at : list of int
        Per position in the block; index 0 is the first draft.
    """

    def __init__(self, plain_step_ms=None):
        self._plain_given = plain_step_ms
        self._made = []  # RoundRecord, and PlainRun for rounds of a pause
        self._records = None  # all as RoundRecord, once they were asked for
        self.rounds = 0
        self.ends = dict.fromkeys((PLAIN, BONUS, CORRECTED, STOPPED), 0)
        self.skipped = {}
        self.drafted = self.tested = self.accepted = self.accepted_emitted = 0
        self.emitted = self.cut = 0
        self.proposed_at, self.tested_at, self.accepted_at = [], [], []
        self.draft_ms = self.verify_ms = self.decide_ms = self.plain_ms = 0.0
        self._plain_times = []
        self._median = 0, None  # of how many of them
        self._drafting_emitted, self._drafting_ms = 0, 0.0

    def give_plain_step(self, ms):
        """Take the time of a plain step that was measured outside the answer."""
        self._plain_given = ms

    @property
    def records(self):
        """The RoundRecord of every round."""
        if self._records is None:
            self._records = []
            for made in self._made:
                self._records += made.records() if isinstance(made, PlainRun) else (made,)
        return self._records

    @property
    def drafting_records(self):
        """Those of rounds that drafted."""
        return [r for r in self._made if isinstance(r, RoundRecord) and r.drafted]

    def trace(self):
        """One dict per finished round, for receipts."""
        return [record.to_dict() for record in self.records]

    def _add(self, made, n_rounds):
        self._made.append(made)
        self._records = None
        self.rounds += n_rounds

    def record(self, record):
        """Add a finished round."""
        self._add(record, 1)
        self.ends[record.end] += 1
        n = len(record.drafted)
        self.drafted += n
        self.tested += record.tested
        self.accepted += record.accepted
        self.accepted_emitted += min(record.accepted, record.emitted)
        self.emitted += record.emitted
        self.cut += len(record.decided) - record.emitted
        for counts, filled in (
            (self.proposed_at, n),
            (self.tested_at, record.tested),
            (self.accepted_at, record.accepted),
        ):
            counts.extend([0] * (n - len(counts)))
            for position in range(filled):
                counts[position] += 1
        self._record_times(record, n)

    def record_run(self, run):
        """Add the rounds of a ``PlainRun``."""
        n = len(run.tokens)
        self._add(run, n)
        self.ends[PLAIN] += n
        self.emitted += n
        self.draft_ms += run.feed_ms
        self.plain_ms += sum(run.times)
        self.skipped[run.skipped] = self.skipped.get(run.skipped, 0) + n
        self._plain_times += run.times

    def _record_times(self, record, n):
        self.draft_ms += record.draft_ms
        self.decide_ms += record.decide_ms
        if record.skipped:
            self.skipped[record.skipped] = self.skipped.get(record.skipped, 0) + 1
        if n:
            self.verify_ms += record.verify_ms
            self._drafting_emitted += record.emitted
            self._drafting_ms += record.parts_ms
        else:
            self.plain_ms += record.verify_ms
            self._plain_times.append(record.verify_ms + record.decide_ms)

    # -- derived ------------------------------------------------------------------------------

    @property
    def draft_rounds(self):
        """Rounds that evaluated proposals."""
        return self.rounds - self.ends[PLAIN]

    @property
    def acceptance_rate(self):
        """accepted / drafted, None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self):
        """Tokens emitted per round that drafted, the target's own included; None without one."""
        return self._drafting_emitted / self.draft_rounds if self.draft_rounds else None

    @property
    def tokens_per_pass(self):
        """Tokens emitted per target pass, plain rounds included; None before the first."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def plain_step_ms(self):
        """Median time of the plain rounds but the first, else the one given, else None.

        The first plain round of an answer may record its pass, which takes many steps.
        """
        n = len(self._plain_times) - 1
        if n < 1 or (n < MIN_OWN_STEPS and self._plain_given is not None):
            return self._plain_given
        if self._median[0] != n:
            self._median = n, median(self._plain_times[1:])
        return self._median[1]

    @property
    def estimated_speedup(self):
        """Time of as many plain steps over the time taken; None without a measured plain step."""
        taken = self.draft_ms + self.verify_ms + self.decide_ms + self.plain_ms
        return self._speedup(self.emitted, taken)

    @property
    def draft_speedup(self):
        """The same for the rounds that drafted alone: whether they pay."""
        return self._speedup(self._drafting_emitted, self._drafting_ms)

    def _speedup(self, emitted, taken):
        step = self.plain_step_ms
        return emitted * step / taken if step and taken and emitted else None

    def warning(self):
        """One sentence when drafting has cost time, else ""."""
        speedup = self.draft_speedup
        if speedup is None or speedup >= 1:
            return ""
        return (
            f"drafting made this answer slower: its rounds ran at {speedup:.2f} times the speed of "
            f"plain decoding ({self.acceptance_rate:.0%} of the proposals accepted); "
            "try a shorter verify length or --speculative off"
        )

    def to_dict(self):
        """Counters, rates and times as plain values; see the module for their identities."""
        return {
            "rounds": self.rounds,
            "draft_rounds": self.draft_rounds,
            "plain_rounds": self.ends[PLAIN],
            "drafted": self.drafted,
            "tested": self.tested,
            "accepted": self.accepted,
            "accepted_emitted": self.accepted_emitted,
            "emitted": self.emitted,
            "bonus": self.ends[BONUS],
            "corrected": self.ends[CORRECTED],
            "stopped": self.ends[STOPPED],
            "cut": self.cut,
            "skipped": dict(sorted(self.skipped.items())),
            "proposed_at": list(self.proposed_at),
            "tested_at": list(self.tested_at),
            "accepted_at": list(self.accepted_at),
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "tokens_per_pass": self.tokens_per_pass,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "decide_ms": self.decide_ms,
            "plain_ms": self.plain_ms,
            "plain_step_ms": self.plain_step_ms,
            "estimated_speedup": self.estimated_speedup,
            "draft_speedup": self.draft_speedup,
        }


def identities(stats):
    """Raise CudflashError, naming the identity, unless those of the module hold.

    Parameters
    ----------
    stats : dict
        From ``SpecStats.to_dict``; so that a stored one can be checked as well.
    """
    s = stats
    proposed, tested, accepted = s["proposed_at"], s["tested_at"], s["accepted_at"]
    decided = s["accepted"] + s["plain_rounds"] + s["bonus"] + s["corrected"]
    checks = {
        "rounds = plain + bonus + corrected + stopped": s["rounds"]
        == s["plain_rounds"] + s["bonus"] + s["corrected"] + s["stopped"],
        "rounds = draft rounds + plain rounds": s["rounds"]
        == s["draft_rounds"] + s["plain_rounds"],
        "emitted + cut = accepted + plain + bonus + corrected": s["emitted"] + s["cut"] == decided,
        "tested = accepted + corrected": s["tested"] == s["accepted"] + s["corrected"],
        "tested <= drafted": s["tested"] <= s["drafted"],
        "sums per position": (sum(proposed), sum(tested), sum(accepted))
        == (s["drafted"], s["tested"], s["accepted"]),
        "accepted <= tested <= proposed at each position": all(
            a <= t <= p for a, t, p in zip(accepted, tested, proposed)
        ),
        "tested at the next position <= accepted": all(
            t <= a for a, t in zip(accepted, tested[1:])
        ),
        "emitted between accepted_emitted and that plus rounds": s["accepted_emitted"]
        <= s["emitted"]
        <= s["accepted_emitted"] + s["rounds"],
        "accepted_emitted <= accepted": s["accepted_emitted"] <= s["accepted"],
    }
    for name, holds in checks.items():
        if not holds:
            raise CudflashError(
                f"the statistics break '{name}'; they were not counted as documented"
            )


def require_draft(stats, fault=None):
    """Raise unless at least one proposal was evaluated: what ``--require-draft`` promises.

    Parameters
    ----------
    stats : SpecStats
    fault : DrafterFault, optional

    Raises
    ------
    UsageError
    """
    reason = why_nothing(stats, fault)
    if reason:
        raise UsageError(f"a draft was required, but no proposal was made in this answer: {reason}")


def why_nothing(stats, fault=None):
    """Why an answer had no proposal, "" when it had one."""
    if stats.drafted:
        return ""
    if fault is not None:
        return fault.reason
    if not stats.rounds:
        return "it had no round after the prompt"
    listed = ", ".join(f"{reason} ({n} rounds)" for reason, n in sorted(stats.skipped.items()))
    return f"every round was plain, because of {listed}"
