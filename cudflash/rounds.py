"""Rounds: how the prompt is evaluated and the next tokens of an answer are made.

The protocol, followed by plain and by speculative rounds:

- ``rewind(wanted)`` begins an answer: the first rows of the session that can be kept stay;
- ``prompt_chunk(tokens, last, remaining)`` evaluates and commits a part of the prompt;
- ``checkpoint()`` makes a rewind to the committed rows possible, where that needs preparing;
- ``choose_first()`` chooses from the logits that the prompt has left (its block is committed);
- ``next(room)`` evaluates the newest token (and drafts after it) and returns the tokens chosen in
  this round, at least one and at most ``room``, leaving its block open;
- ``settle(kept)`` ends the round: the first ``kept`` of its tokens became part of the answer. The
  rows of the token before them and of all of them but the last are committed, the others dropped;
- ``abandon()`` drops an open block, whatever state it is in;
- ``finish(cancelled)`` ends the answer, however it ended; afterwards ``stats()`` and ``receipt()``
  tell.

``events()`` returns what happened since it was last asked.

Invariant: between rounds the newest token of the answer is chosen but not evaluated, and caches hold
exactly the tokens before it.
"""

import time
from functools import partial
from dataclasses import dataclass

from cudflash.spec.costs import Meter


@dataclass(frozen=True)
class Rewound:
    """What ``rewind`` has kept."""

    rows: int
    lost: str  # what no longer holds the rows that were wanted, "" when all are kept


def time_calls(action, n):
    """Do something ``n`` times.

    Returns
    -------
    (float, float)
        Milliseconds that it takes, the first time left out, and how much more the first one took of
        this thread's processor time: preparing a pass is its work alone.
    """
    at, own = [time.perf_counter()], [time.thread_time()]
    for _ in range(n):
        action()
        at.append(time.perf_counter())
        own.append(time.thread_time())
    took, own = ([1e3 * (b - a) for a, b in zip(t, t[1:])] for t in (at, own))
    # the least: one may have been interrupted by another process
    return min(took[1:]), max(0.0, own[0] - min(own[1:]))


class Rounds:
    """What both kinds of rounds share: a target evaluates the prompt, and there is no news.

    Parameters
    ----------
    runner : Runner
    """

    watched = True  # somebody looks at the events; else those that come in numbers are not made

    def __init__(self, runner):
        self._runner = runner

    def rewind(self, wanted):
        """Keep at most the first ``wanted`` rows.

        Returns
        -------
        Rewound
        """
        kept = self._runner.rewind(wanted)
        return Rewound(kept, self._runner.cache.holder if kept < wanted else "")

    def prompt_chunk(self, tokens, last, remaining):
        """Evaluate and commit a part of the prompt.

        Parameters
        ----------
        tokens : sequence of int
        last : bool
            Leave the logits of its last row.
        remaining : int
            Prompt tokens after these.
        """
        self._runner.prefill_chunk(tokens, last)

    def checkpoint(self):
        """Make a rewind to the committed rows possible."""
        self._runner.checkpoint()

    def events(self):
        """Events since the last call."""
        return ()

    def bring_up(self):
        """Show the drafter every committed row, also those that can wait."""

    def context(self):
        """Return the HeldRows of the draft's context, None without one."""
        return None

    def finish(self, cancelled=False):
        """End the answer; nothing is evaluated for one that was cancelled."""

    def rehearse(self, room):
        """Make the coming round and drop it; None where nothing is drafted."""
        return None

    def stats(self):
        """Counters of speculation, None without."""
        return None

    def receipt(self):
        """Return a callable that makes what the receipt says about speculation, under its keys."""
        return dict


class StepMeter(Meter):
    """Time of one plain decoding step, as lately measured on an engine."""

    def __init__(self):
        super().__init__(size=32)

    def add_round(self, ms, index):
        """Take the time of the ``index``-th plain round of an answer; the first records its pass."""
        if index > 1:
            self.add(ms)


class PlainRounds(Rounds):
    """One target pass, one token.

    Parameters
    ----------
    runner : Runner
    chooser : Chooser
    meter : StepMeter
    mode : {"auto", "on", "off"}
    reason : str
        Why nothing is drafted.
    """

    def __init__(self, runner, chooser, meter, mode, reason):
        super().__init__(runner)
        self._chooser, self._meter = chooser, meter
        self._about = {"mode": mode, "used": False, "reason": reason}
        self._newest = None  # chosen, not evaluated
        self._chosen, self._n_steps = None, 0

    def rewind(self, wanted):
        """Keep at most the first ``wanted`` rows; no layers are captured from here on."""
        self._runner.set_taps(())
        return super().rewind(wanted)

    def choose_first(self):
        """Choose from the logits that the prompt's last row has left."""
        self._chooser.read(self._runner.cache.length - 1)
        self._newest = self._chooser.choose()
        return [self._newest]

    def next(self, room):
        """Evaluate the newest token, choose one; ``room`` is at least 1."""
        started = time.perf_counter()
        self._runner.step((self._newest.token,), top=self._chooser.n_largest)
        self._chooser.read(self._runner.cache.length, 1, self._chooser.n_largest)
        self._chosen = self._chooser.choose()
        self._n_steps += 1
        self._meter.add_round(1e3 * (time.perf_counter() - started), self._n_steps)
        return [self._chosen]

    def settle(self, kept):
        """Commit the evaluated row; ``kept`` is 1."""
        self._runner.commit(kept)
        self._newest = self._chosen

    def abandon(self):
        """Drop an open block."""
        self._runner.rollback()

    def receipt(self):
        """The part without a drafter."""
        return partial(dict, speculative=self._about)
