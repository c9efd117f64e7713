"""Does drafting pay? Found out by measurement, at a loss that is bounded by design.

Owns when ``auto`` drafts, and how many tokens, as far as time decides; the acceptance gate
(``spec.gate``) decides beside it. Must not know drafters, targets or clocks: it is given times.
Invariant: it never changes which tokens are emitted, only how many are verified at once.

Times are counted in plain steps: p, the median of the newest plain rounds. A round that drafts n
tokens, takes c milliseconds and emits e tokens loses c / p - e steps (gains, where that is
negative). What is estimated:

* cost(n): median of the newest rounds that drafted n, without the first of an answer, in which
  passes are recorded; of a length never tried, the cost of the next shorter one times the rows (no
  pass costs more per row than a shorter one), ``UNTRIED`` steps if there is none;
* gain(n): tokens that a round emits, 1 + the sum over k <= n of the product of the acceptance rates
  of positions 1 to k. Rates are those of late: each round counts ``KEPT`` times as much as the next
  one. Rounds of one length tell the gains of all shorter ones, because drafts are verified from the
  first on;
* speed-up(n) = gain(n) / (cost(n) / p).

The length with the best speed-up is drafted. When that is below 1 by more than chance explains
(``DOUBT`` over the root of the rounds that count), drafting pauses for 64 tokens, twice as many at
each further pause, up to 512, and is tried again. The shortest length is tried first, a longer one
only if it could pay at the cost of a shorter one.

**The bound.** An account of plain steps begins at ``ALLOWANCE``, never holds more, gets ``REFILL``
per emitted token and pays each loss (what feeding a draft that does not draft costs is a loss, too).
A round drafts only if the account holds what it loses in the worst case, cost(n) / p - 1: all drafts
rejected. So over any T tokens the losses are at most ALLOWANCE + REFILL x T + one error of cost(n):
for 1,000 tokens 12 + 15 = 27 steps, 2.7 %, however bad the draft is and however often the text
changes. What the first round of a length takes beyond that is a debt: it does not stop a draft that
pays, but after a pause drafting is tried again only when it is paid off, too, at the same ``REFILL``,
so a draft that never pays costs ALLOWANCE and its preparations, or 2.7 %, whichever is more. The
rest to 5 % is for what is not seen here: capturing layers, and errors of p. Times far above the
median (``OUTLIER``) are the machine's doing and count as that far above it.

Under the ``ratio`` rule tokens depend on what was drafted, so there the economy stays out of it:
the same seed gives the same tokens.
"""

from collections import deque
from dataclasses import asdict, dataclass
from statistics import median

from cudflash.spec.gate import FIRST_PAUSE, LONGEST_PAUSE
from cudflash.spec.verify_length import LEGAL

ALLOWANCE = 12.0  # plain steps
REFILL = 0.015  # plain steps per emitted token
UNTRIED = 4.0  # plain steps that a round of the shortest length is taken for, before it is measured
MOST_DEBT = 100.0  # plain steps: beyond, it is the machine's doing
KEPT = 0.97  # weight of a round against the next one: about the last 33 rounds count
DOUBT = 0.4  # relative spread of what a round emits: 0.3 to 0.6 for drafts that are worth a thought
PRIOR = 2.0  # rounds by which a position counts as the one before it, until it is known better
RESTART = 0.1  # weight of what was seen before a pause
MIN_ROUNDS = 5  # rounds that drafted before anything is concluded
MIN_PLAIN = 3  # plain rounds before drafting is compared with them
MIN_TIMED = 2  # rounds of a length before its cost counts as measured
REFRESH_ROUNDS = 48  # drafting rounds after which a plain one is made, to see what it costs now
REST_ROUNDS = 16  # rounds of a pause after which the account is brought up to date
OUTLIER = 2.0  # times the median
SWITCH = 1.05  # another length is taken if it is that much faster

DRAFTING, PAUSED = "drafting", "paused"
ECONOMY, MEASURE = "economy", "measure"  # why a round drafts nothing


class Meter:
    """Median of the newest times."""

    def __init__(self, size=9, skip=0):
        self._ms = deque(maxlen=size)
        self._left = skip  # first ones that do not count: they may contain preparations

    def add(self, ms):
        """Take a time in milliseconds."""
        if self._left:
            self._left -= 1
        else:
            self._ms.append(ms)

    def clear(self):
        """Forget all times."""
        self._ms.clear()

    @property
    def count(self):
        """Times that count."""
        return len(self._ms)

    @property
    def ms(self):
        """Median, None before there is one."""
        return median(self._ms) if self._ms else None


class RoundCosts:
    """What rounds have cost lately on an engine; shared by its answers.

    Attributes
    ----------
    plain : Meter
    """

    def __init__(self):
        self.plain = Meter(skip=1)
        self._drafting = {}
        self._best = {}

    def meter(self, drafter, length):
        """The Meter of rounds in which a drafter drafted ``length`` tokens."""
        return self._drafting.setdefault((drafter, length), Meter())

    def best(self, drafter):
        """The length that paid most when this was last known, else None."""
        return self._best.get(drafter)

    def remember(self, drafter, length):
        """Take down the length that pays most."""
        self._best[drafter] = length


@dataclass(frozen=True)
class EconomyEvent:
    """A decision, with the numbers it rests on."""

    kind: str  # "paused", "resumed" or "length"
    round: int  # rounds of the answer so far
    committed: int  # tokens of the answer whose rows are committed
    length: int  # tokens drafted per round from here on, 0 while paused
    speedup: float | None  # estimated, of the best length; None where it is not known
    resume_at: int | None  # committed tokens at which drafting is tried again
    reason: str  # one sentence


class Economy:
    """State machine of one answer: drafting or paused, and with which length.

    Parameters
    ----------
    costs : RoundCosts
        Of the engine.
    drafter : str
        Its name.
    verify_length : int
        The longest that may be drafted; shorter legal ones are tried, too.

    Attributes
    ----------
    state : {"drafting", "paused"}
    length : int
        Drafted per round while drafting.
    balance, debt : float
        Of the account, plain steps.
    events : list of EconomyEvent
    """

    def __init__(self, costs, drafter, verify_length):
        self._costs, self._drafter = costs, drafter
        self.lengths = tuple(n for n in LEGAL if n <= verify_length) or (verify_length,)
        best = costs.best(drafter)
        self.length = best if best in self.lengths else self.lengths[-1]
        self.state, self.resume_at = DRAFTING, None
        self.balance, self.debt = ALLOWANCE, 0.0
        self._prepared = set()  # lengths drafted in this answer: their passes are recorded
        self.events, self.pauses, self.switches = [], 0, 0
        self._weight = 0.0  # rounds that count
        self._tested = [0.0] * self.lengths[-1]  # per position, weighted
        self._accepted = [0.0] * self.lengths[-1]
        self._rounds = 0  # that drafted, since the start or the last pause
        self._since_plain = 0
        self._since_switch = 0
        self._rested, self._feed_ms = 0, 0.0  # plain rounds of a pause that are not paid for yet
        self._checked = False  # p was measured since the rounds began that speak against drafting

    # -- one round ----------------------------------------------------------------------------

    def choose(self, budget, round_index, committed):
        """How many tokens the next round may draft.

        Parameters
        ----------
        budget : int
            At most, at least 1.
        round_index, committed : int

        Returns
        -------
        (int, str)
            0 with the reason: "measure" (a plain round is needed to compare with) or "economy".
        """
        if self._costs.plain.count < MIN_PLAIN or self._since_plain >= REFRESH_ROUNDS:
            return 0, MEASURE
        if self.state == PAUSED and not self._resume(round_index, committed):
            return 0, ECONOMY
        if self._rounds >= MIN_ROUNDS and not self._review(round_index, committed):
            return 0, MEASURE if self.state == DRAFTING else ECONOMY
        length = min(self._next_length(), budget)
        if self._worst(length) > self.balance:
            fitting = [n for n in self.lengths if n < length and self._worst(n) <= self.balance]
            if not fitting:
                self._pause(round_index, committed, self._account_reason())
                return 0, ECONOMY
            length = fitting[-1]
        return length, ""

    def record(self, drafted, accepted, emitted, ms, feed_ms, ended):
        """Take note of a finished round.

        Parameters
        ----------
        drafted, accepted, emitted : int
        ms : float
            All of it, but for ``feed_ms`` where nothing was drafted.
        feed_ms : float
            What a round without drafts has spent on the drafter.
        ended : bool
            The answer ended in it: its drafts may be cut, so they say nothing.
        """
        plain = self._costs.plain
        if not drafted:
            plain.add(ms)
            self._since_plain = 0
            if plain.ms is not None:
                self._pay(min(feed_ms, plain.ms) / plain.ms - REFILL * emitted)
            return
        self._since_plain += 1
        self._since_switch += 1
        first = drafted not in self._prepared
        if plain.ms is not None:  # another answer on the engine may be measuring it anew
            most = self._cost(drafted) * (1.0 if first else OUTLIER)
            self._pay(min(ms, most) / plain.ms - emitted - REFILL * emitted)
            if first:
                self.debt += min(max(0.0, ms - most) / plain.ms, MOST_DEBT)
        self._prepared.add(drafted)
        if drafted in self.lengths and not first:
            self._costs.meter(self._drafter, drafted).add(ms)
        if not ended:
            self._see(drafted, accepted)

    def rest(self, ms, feed_ms):
        """Take note of a plain round of a pause; little work, because it is done for every token."""
        self._costs.plain.add(ms)
        self._rested += 1
        self._feed_ms += feed_ms
        if self._rested == REST_ROUNDS:
            plain = self._costs.plain.ms
            if plain is not None:
                self._pay(min(self._feed_ms / plain, REST_ROUNDS) - REFILL * REST_ROUNDS)
            self._since_plain, self._rested, self._feed_ms = 0, 0, 0.0

    def rests(self, committed):
        """Whether the next round is surely a plain one of a pause."""
        return self.state == PAUSED and committed < self.resume_at

    def restart(self):
        """Drafting was stopped and begins anew: what was seen before counts little."""
        self._rounds = 0
        self._age(RESTART)
        self._checked = False

    # -- estimates ----------------------------------------------------------------------------

    def gain(self, length):
        """Tokens that a round of ``length`` drafts is expected to emit."""
        total, survive, rate = 1.0, 1.0, 1.0
        for tested, accepted in zip(self._tested[:length], self._accepted[:length]):
            rate = (accepted + PRIOR * rate) / (tested + PRIOR)
            survive *= rate
            total += survive
        return total

    def speedup(self, length):
        """Estimated speed of a length against plain decoding; None before it is measured."""
        plain = self._costs.plain.ms
        if plain is None or not self._weight or self._is_untried(length):
            return None
        return self.gain(length) * plain / self._cost(length)

    def to_dict(self):
        """Constants, state, estimates and events as plain values, for receipts."""
        plain = self._costs.plain.ms
        measured = []
        for length in self.lengths:
            if plain is not None and not self._is_untried(length):
                steps, speedup = self._cost(length) / plain, self.speedup(length)
                measured.append({
                    "length": length, "cost": round(steps, 3),
                    "speedup": None if speedup is None else round(speedup, 3),
                })  # fmt: skip
        return {
            **constants(), "state": self.state, "length": self.length, "pauses": self.pauses,
            "measured": measured, "events": [asdict(event) for event in self.events],
        }  # fmt: skip

    def _see(self, drafted, accepted):
        self._rounds += 1
        self._age(KEPT)
        self._weight += 1
        for position in range(min(accepted + 1, drafted)):
            self._tested[position] += 1
            self._accepted[position] += position < accepted

    def _age(self, factor):
        self._weight *= factor
        self._tested = [factor * n for n in self._tested]
        self._accepted = [factor * n for n in self._accepted]

    def _cost(self, length):
        """Milliseconds of a round that drafts ``length`` tokens, also of one never made."""
        plain = self._costs.plain.ms
        for known in self.lengths:  # the next longer one stands for a length that is none of these
            meter = self._costs.meter(self._drafter, known)
            if known >= length and meter.count:
                return meter.ms
        shorter = [n for n in self.lengths if n < length]
        if not shorter:
            return UNTRIED * plain
        return self._cost(shorter[-1]) * (length + 1) / (shorter[-1] + 1)

    def _worst(self, length):
        """Plain steps that a round loses when all its drafts are rejected."""
        return self._cost(length) / self._costs.plain.ms - 1.0

    def _is_untried(self, length):
        return self._costs.meter(self._drafter, length).count < MIN_TIMED

    def _untried(self):
        """A length whose cost is not known and that might pay, None for none."""
        shorter = None
        for length in self.lengths:
            if self._is_untried(length):
                if shorter is None:
                    return length
                best = self.gain(length) * self._costs.plain.ms / self._cost(shorter)
                return length if best >= 1.0 and self._rounds >= MIN_ROUNDS else None
            shorter = length
        return None

    def _next_length(self):
        untried = self._untried()
        if untried is not None:
            return untried
        known = [n for n in self.lengths if not self._is_untried(n)]
        return self.length if self.length in known else known[-1]

    # -- decisions ----------------------------------------------------------------------------

    def _pay(self, loss):
        if loss < 0 and self.debt > 0 and self.state == PAUSED:
            paid = min(self.debt, -loss)
            self.debt, loss = self.debt - paid, loss + paid
        self.balance = min(ALLOWANCE, self.balance - loss)

    def _review(self, round_index, committed):
        """Whether drafting goes on; settles the length or pauses. False, too, to measure p first."""
        known = {n: s for n in self.lengths if (s := self.speedup(n)) is not None}
        if not known:
            return True
        best = max(known, key=lambda n: (known[n], -n))
        doubt = DOUBT / max(self._weight, 1.0) ** 0.5
        if known[best] < 1.0 - doubt and self._untried() is None:
            if not self._checked:  # before it is given up, what a plain step costs now
                self._checked = True
                self._costs.plain.clear()
                return False
            self._pause(round_index, committed, self._slow_reason(best), known[best])
            return False
        now = known.get(self.length)
        if best != self.length and (now is None or known[best] >= SWITCH * now):
            if self._since_switch >= MIN_ROUNDS or now is None:
                self._switch(best, round_index, committed, known)
        return True

    def _switch(self, length, round_index, committed, known):
        others = ", ".join(f"{n}: {s:.2f}" for n, s in known.items() if n != length)
        self._costs.remember(self._drafter, length)
        self.length, self._since_switch = length, 0
        self.switches += 1
        self._event(
            "length", round_index, committed, known[length],
            f"{length} tokens are drafted per round, at about {known[length]:.2f} times the speed "
            f"of plain decoding" + (f" ({others})" if others else ""),
        )  # fmt: skip

    def _pause(self, round_index, committed, reason, speedup=None):
        pause = min(FIRST_PAUSE << min(self.pauses, 16), LONGEST_PAUSE)
        self.pauses += 1
        self.state, self.resume_at = PAUSED, committed + pause
        self._event(
            "paused", round_index, committed, speedup,
            f"{reason}; drafting pauses for {pause} tokens or more",
        )  # fmt: skip

    def _resume(self, round_index, committed):
        """End a pause that is over, if the account holds what a trial may cost."""
        trial = min(MIN_ROUNDS * self._worst(self._next_length()), ALLOWANCE - 0.5)
        if committed < self.resume_at or self.debt > 0 or self.balance < trial:
            return False
        self.state, self.resume_at = DRAFTING, None
        self.restart()
        self._event(
            "resumed", round_index, committed, None,
            f"drafting is tried again, {self._next_length()} tokens per round",
        )  # fmt: skip
        return True

    def _slow_reason(self, best):
        cost = self._cost(best) / self._costs.plain.ms
        return (
            f"drafting does not pay: {best} drafts per round emit {self.gain(best):.2f} tokens in "
            f"the time of {cost:.2f} plain steps, about {self.gain(best) / cost:.2f} times the "
            "speed of plain decoding"
        )

    def _account_reason(self):
        return (
            f"drafting has cost {ALLOWANCE - self.balance + self.debt:.0f} plain steps more than it "
            "saved of late, and another round could cost more than is allowed"
        )

    def _event(self, kind, round_index, committed, speedup, reason):
        length = 0 if self.state == PAUSED else self.length
        self.events.append(
            EconomyEvent(
                kind, round_index, committed, length,
                None if speedup is None else round(speedup, 3), self.resume_at, reason,
            )
        )  # fmt: skip


def constants():
    """The numbers that the economy decides by, as receipts name them."""
    return {
        "allowance": ALLOWANCE,
        "refill": REFILL,
        "min_rounds": MIN_ROUNDS,
        "first_pause": FIRST_PAUSE,
        "longest_pause": LONGEST_PAUSE,
    }
