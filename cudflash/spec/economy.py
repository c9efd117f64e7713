"""Does drafting pay? Found out by measurement, at a loss that is bounded by design.

Owns when ``auto`` drafts, and how many tokens, as far as time decides; the acceptance gate
(``spec.gate``) decides beside it. Must not know drafters, targets or clocks: it is given times.
Invariant: it never changes which tokens are emitted, only how many are verified at once.

Times are counted in plain steps: p, the median of the newest plain rounds. What is estimated:

* cost(n): median of the newest rounds that drafted n, without the first of an answer, in which
  passes are recorded; else the sum of its passes, where they were timed by themselves; of a length
  never tried, the cost of the next shorter one times the rows (no pass costs more per row than a
  shorter one), ``UNTRIED`` steps if there is none;
* gain(n): tokens that a round emits, 1 + the sum over k <= n of the product of the acceptance rates
  of positions 1 to k. Rates are those of late: each round counts ``KEPT`` times as much as the next
  one. Rounds of one length tell the gains of all shorter ones, because drafts are verified from the
  first on;
* speed-up(n) = gain(n) / (cost(n) / p).

The length with the best speed-up is drafted. When that is below 1 by more than chance explains
(``DOUBT`` over the root of the rounds that count), drafting pauses for 64 tokens, twice as many at
each further pause, up to 512, and is tried again. The shortest length is tried first, a longer one
only if it could pay at the cost of a shorter one. What that may lose is bounded by the account
(``spec.account``, with the arithmetic). Times far above the median (``OUTLIER``) are the machine's
doing and count as that far above it.

A target so quick that preparing to draft takes more than ``PREPARATION`` plain steps does not begin
with drafting: it decodes plainly and, as the account allows, times the parts of a round first
(``spec.prospects``), and drafts only if what they take leaves a draft a chance to pay. A target with
a step of 20 ms never comes to that; it drafts from the fourth token on.

Under the ``ratio`` rule tokens depend on what was drafted, so there the economy stays out of it:
the same seed gives the same tokens.
"""

from dataclasses import asdict

from cudflash.spec.account import ALLOWANCE, PREPARATION, PURSE, REFILL, Account
from cudflash.spec.costs import Gains
from cudflash.spec.decisions import EconomyEvent, account_reason, length_reason, slow_reason
from cudflash.spec.gate import FIRST_PAUSE, LONGEST_PAUSE
from cudflash.spec.prospects import DRAFT, QUICK_MS, TRY, WORTH, Prospects, Stage
from cudflash.spec.verify_length import LEGAL

UNTRIED = 4.0  # plain steps that a round of the shortest length is taken for, before it is measured
DOUBT = 0.4  # relative spread of what a round emits: 0.3 to 0.6 for drafts that are worth a thought
RESTART = 0.1  # weight of what was seen before a pause
MIN_ROUNDS = 5  # rounds that drafted before anything is concluded
MIN_PLAIN = 3  # plain rounds before drafting is compared with them
MIN_TIMED = 2  # rounds of a length before its cost counts as measured
# Drafting rounds after which plain ones are made, to see what a step costs now; soon at first, for
# what is known may come from a busier machine.
FIRST_REFRESH, REFRESH_ROUNDS = 8, 48
OUTLIER = 2.0  # times the median
UNSEEN = 0.1  # of a quick target's round that drafts: what no clock of its own shows
SWITCH = 1.05  # another length is taken if it is that much faster

NEVER = 1 << 62
DRAFTING, PAUSED = "drafting", "paused"
ECONOMY, MEASURE = "economy", "measure"  # why a round drafts nothing


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
    timed : bool
        Whether the draft's pass can be timed by itself.
    unrecorded : callable, optional
        As ``Prospects`` takes it.
    steady : Meter, optional
        Of plain steps one after the other.

    Attributes
    ----------
    reach : int or None
        Rows that the draft has to be given before it drafts, if it has missed some; None: all.
    quick : bool
        A plain step is so short that the work around it shows.
    state : {"drafting", "paused"}
    length : int
        Drafted per round while drafting.
    account : Account
    events : list of EconomyEvent
    """

    def __init__(self, costs, drafter, verify_length, timed=False, unrecorded=None, steady=None):
        self._costs, self._drafter, self._steady = costs, drafter, steady
        self.reach, self.quick, self._staged, self._ready = 0, False, False, True
        self.lengths = tuple(n for n in LEGAL if n <= verify_length) or (verify_length,)
        best = costs.best(drafter)
        self.length = best if best in self.lengths else self.lengths[-1]
        self.prospects = Prospects(costs, drafter, self.lengths, timed, unrecorded)
        self.state, self.resume_at = DRAFTING, None
        self.account = Account()
        self._prepared = set()  # lengths drafted in this answer: their passes are recorded
        self.events, self.pauses, self.switches = [], 0, 0
        self._gains = Gains(self.lengths[-1])
        self._rounds = 0  # that drafted, since the start or the last pause
        self._since_plain, self._refresh_after = 0, FIRST_REFRESH
        self._since_switch = 0
        self._checked = False  # p was measured since the rounds began that speak against drafting

    # -- before rounds ------------------------------------------------------------------------

    def begin(self, reach):
        """Decide how the answer starts: with drafting, or with finding out whether it could pay.

        Parameters
        ----------
        reach : int or None
            See the class.
        """
        plain = self._costs.plain.ms
        self.reach, self.quick = reach, plain is not None and plain < QUICK_MS
        if self.quick:  # the last answer's steps may have had twice as much to attend to
            for meter in filter(None, (self._costs.plain, self._steady)):
                meter.clear()
        if self.quick and self.prospects.preparation > PREPARATION:
            self._staged, self._ready = True, False
            self.account.save_up()
            self._wait(0, 0)

    @property
    def _plain_ms(self):
        """Milliseconds of a plain step, None before it is known.

        Of a quick target no more than one step after the other takes: one between drafting rounds
        finds neither its code in the caches nor the other threads awake.
        """
        plain, steady = self._costs.plain.ms, None if self._steady is None else self._steady.ms
        both = self.quick and plain is not None and steady is not None
        return min(plain, steady) if both else plain

    @property
    def lean(self):
        """A pause leaves the draft alone, which then misses rows."""
        return self.quick and self.reach is not None

    @property
    def waits(self):
        """Whether it is not even due at the start of the answer to find out more."""
        return self._staged and self.resume_at != 0

    def due(self, round_index, committed):
        """The Stage that is to be done before the next round, None for none.

        After ``DRAFT`` and ``VERIFY`` comes ``done``; after ``TRY``, when the draft has all rows
        that it needs, ``ready``.
        """
        if self.state != PAUSED or self._ready or self.resume_at is None:
            return None
        if committed < self.resume_at:
            return None
        if not self._staged:
            enough = self.account.debt <= 0 and self.account.holds(self._trial())
            return Stage(TRY, self._next_length(), 0.0) if enough else None
        stage = self._stage()
        if stage is None or not self.account.holds(stage.steps):
            self._wait(round_index, committed)
            return None
        return stage

    def done(self, stage, pass_ms, all_ms, round_index, committed):
        """Take note of a pass that was timed by itself, and of all that it took to do so."""
        if stage.what == DRAFT:
            self._costs.note_draft(self._drafter, pass_ms)
        else:
            self._costs.note_verify(stage.length, pass_ms)
        self._pay(min(all_ms / self._plain_ms, OUTLIER * stage.steps))
        self._wait(round_index, committed)

    def ready(self, stage):
        """The draft has its rows: the next round may end the pause."""
        self._ready = True
        if self._staged:
            self._pay(max(0.0, stage.steps - self._lost_in_trial(stage.length)))
            self.prospects.warmed = True
            self.lengths = tuple(n for n in self.lengths if n >= stage.length)
            self.length = stage.length

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
        if self.state == DRAFTING and self._since_plain >= self._refresh_after:
            self._refresh_after = REFRESH_ROUNDS
            self._costs.plain.clear()
        if self._costs.plain.count < MIN_PLAIN:
            return 0, MEASURE
        if self.state == PAUSED and not self._resume(round_index, committed):
            return 0, ECONOMY
        if self._rounds >= MIN_ROUNDS and not self._review(round_index, committed):
            return 0, MEASURE if self.state == DRAFTING else ECONOMY
        wanted = self._next_length()
        length = min(wanted, budget)
        if self.quick and length < wanted and length not in self._prepared:
            # the end of an answer: passes of a shape of its own are not worth recording
            length = max((n for n in self._prepared if n < length), default=0)
            if not length:
                return 0, ECONOMY
        balance = self.account.balance
        if self._worst(length) > balance:
            fitting = [n for n in self.lengths if n < length and self._worst(n) <= balance]
            if not fitting:
                self._pause(round_index, committed, account_reason(self.account.spent))
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
        if not drafted:
            self._costs.plain.add(ms)
            self._since_plain = 0
            if (plain := self._plain_ms) is not None:
                self._pay(min(feed_ms, plain) / plain - REFILL * emitted)
            return
        if self.quick:
            ms *= 1.0 + UNSEEN
        self._since_plain += 1
        self._since_switch += 1
        first = drafted not in self._prepared
        if (plain := self._plain_ms) is not None:
            most = self._cost(drafted) * (1.0 if first else OUTLIER)
            self._pay(min(ms, most) / plain - emitted - REFILL * emitted)
            if first:
                self.account.owe(max(0.0, ms - most) / plain)
        self._prepared.add(drafted)
        if drafted in self.lengths and not first:
            self._costs.meter(self._drafter, drafted).add(ms)
        if not ended:
            self._rounds += 1
            self._gains.see(drafted, accepted)

    def rest(self, times, feed_ms):
        """Take note of the plain rounds of a pause, all at once.

        Parameters
        ----------
        times : list of float
            Milliseconds of each.
        feed_ms : float
            What was spent on the drafter in them.
        """
        if not times:
            return
        self._costs.plain.extend(times[-MIN_PLAIN:])
        plain, n = self._costs.plain.ms, len(times)
        self._since_plain = 0
        self._pay(min(feed_ms / plain, n) - REFILL * n)

    def rests_until(self, committed):
        """Committed tokens up to which rounds are surely plain ones; 0 if the next is not."""
        if self.state != PAUSED:
            return 0
        if self.resume_at is None:
            return NEVER
        until = self.resume_at
        if not self._staged and not self._ready:
            until = max(until, committed + self.account.tokens_until(self._trial()))
        return until if until > committed else 0

    def restart(self):
        """Drafting was stopped and begins anew: what was seen before counts little."""
        self._rounds, self._refresh_after = 0, FIRST_REFRESH
        self._gains.age(RESTART)
        self._checked = False

    # -- estimates ----------------------------------------------------------------------------

    def gain(self, length):
        """Tokens that a round of ``length`` drafts is expected to emit."""
        return self._gains.of(length)

    def speedup(self, length):
        """Estimated speed of a length against plain decoding; None before it is measured."""
        plain = self._plain_ms
        if plain is None or not self._gains.weight or self._is_untried(length):
            return None
        return self.gain(length) * plain / self._cost(length)

    def to_dict(self):
        """Constants, state, estimates and events as plain values, for receipts."""
        plain = self._plain_ms
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

    def _cost(self, length):
        """Milliseconds of a round that drafts ``length`` tokens, also of one never made."""
        plain = self._plain_ms
        if not self._costs.meter(self._drafter, length).count:
            parts = self.prospects.measured(length)
            if parts is not None:
                return parts
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
        return self._cost(length) / self._plain_ms - 1.0

    def _is_untried(self, length):
        timed = self._costs.meter(self._drafter, length).count
        return timed < MIN_TIMED and self.prospects.measured(length) is None

    def _lost_in_trial(self, length):
        """Plain steps that the first rounds may lose before anything is concluded."""
        return min(MIN_ROUNDS * max(0.0, self._worst(length)), ALLOWANCE - 0.5)

    def _trial(self):
        return self._lost_in_trial(self._next_length())

    def _stage(self):
        """The next Stage on the way to drafting, None if it will not come to that."""
        if self.reach is None:
            return None
        stage = self.prospects.next_stage(self.reach, self._lost_in_trial)
        return None if stage is None or stage.steps > PURSE else stage

    def _untried(self):
        """A length whose cost is not known and that might pay, None for none."""
        shorter = None
        for length in self.lengths:
            if self._is_untried(length):
                if shorter is None:
                    return length
                best = self.gain(length) * self._plain_ms / self._cost(shorter)
                could_pay = best >= 1.0 and self._rounds >= MIN_ROUNDS
                return length if could_pay and self._may_prepare(length, shorter) else None
            shorter = length
        return None

    def _may_prepare(self, length, known):
        """To a quick target: whether preparing a length can be paid, and would bring well more."""
        if not self._staged or length in self._prepared:
            return True
        if not self.account.holds(self.prospects.price_of_length(length)):
            return False
        cost = self._cost(length) if not self._is_untried(length) else (
            self._cost(known) + (length - known) * self.prospects.row() * self._plain_ms
        )
        speed, now = self.gain(length) / cost, self.gain(known) / self._cost(known)
        return speed * self._plain_ms >= WORTH * max(1.0, now * self._plain_ms)

    def _next_length(self):
        untried = self._untried()
        if untried is not None:
            return untried
        known = [n for n in self.lengths if not self._is_untried(n)]
        return self.length if self.length in known else known[-1]

    # -- decisions ----------------------------------------------------------------------------

    def _pay(self, loss):
        self.account.pay(loss, self.state == PAUSED)

    def _review(self, round_index, committed):
        """Whether drafting goes on; settles the length or pauses. False, too, to measure p first."""
        known = {n: s for n in self.lengths if (s := self.speedup(n)) is not None
                 and (n == self.length or self._may_prepare(n, self.length))}  # fmt: skip
        if not known:
            return True
        best = max(known, key=lambda n: (known[n], -n))
        doubt = DOUBT / max(self._gains.weight, 1.0) ** 0.5
        if known[best] < 1.0 - doubt and self._untried() is None:
            if not self._checked:  # before it is given up, what a plain step costs now
                self._checked = True
                self._costs.plain.clear()
                return False
            reason = slow_reason(best, self.gain(best), self._cost(best) / self._plain_ms)
            self._pause(round_index, committed, reason, known[best])
            return False
        now = known.get(self.length)
        if best != self.length and (now is None or known[best] >= SWITCH * now):
            if self._since_switch >= MIN_ROUNDS or now is None:
                self._switch(best, round_index, committed, known)
        return True

    def _switch(self, length, round_index, committed, known):
        self._costs.remember(self._drafter, length)
        self.length, self._since_switch = length, 0
        self.switches += 1
        self._event(
            "length", round_index, committed, known[length],
            length_reason(length, known),
        )  # fmt: skip

    def _pause(self, round_index, committed, reason, speedup=None):
        pause = min(FIRST_PAUSE << min(self.pauses, 16), LONGEST_PAUSE)
        self.pauses += 1
        self.state, self.resume_at = PAUSED, committed + pause
        self._ready = not self.lean
        self._event(
            "paused", round_index, committed, speedup,
            f"{reason}; drafting pauses for {pause} tokens or more",
        )  # fmt: skip

    def _wait(self, round_index, committed):
        """Pause until the next stage can be paid for, and say what is known."""
        stage, known = self._stage(), self.prospects.sentence()
        self.state, self._ready, speedup = PAUSED, False, self.prospects.ceiling(
            self.prospects.best()
        )
        if stage is not None:
            wait = self.account.tokens_until(stage.steps)
            self.resume_at = committed + wait
            if not wait:
                return
            reason = (
                f"{known}; finding out more would cost about {stage.steps:.0f} plain steps and "
                "waits until that is within what may be spent"
            )
        else:
            self.resume_at = None
            reason = f"drafting cannot pay: {known}" if speedup < 1 else (
                f"{known}; finding out more would cost more than it is worth"
            )
        self.pauses = max(1, self.pauses)
        self._event("paused", round_index, committed, speedup, reason)

    def _resume(self, round_index, committed):
        """End a pause that is over, if the account holds what a trial may cost."""
        if not self._ready or committed < self.resume_at:
            return False
        account = self.account
        if not self.lean and (account.debt > 0 or account.balance < self._trial()):
            return False
        again = " again" if self._prepared else ""
        self.state, self.resume_at = DRAFTING, None
        self.restart()
        self._event(
            "resumed", round_index, committed, None,
            f"drafting is tried{again}, {self._next_length()} tokens per round",
        )  # fmt: skip
        return True

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
        "allowance": ALLOWANCE, "refill": REFILL, "min_rounds": MIN_ROUNDS,
        "first_pause": FIRST_PAUSE, "longest_pause": LONGEST_PAUSE,
    }  # fmt: skip
