"""How committed rows reach the drafter: at once, in one go after a pause, or not at all for a time.

Owns the rows that the drafter has yet to see. Must not know rounds or why there are pauses.
Invariant: before the drafter is asked for anything it has been shown every committed row, or, when
rows were kept from it, all that its next block sees (``GuardedDrafter.lags`` is true until then).
"""

import time

from cudflash.model.runner import ALL, LAST
from cudflash.spec.prospects import Unrecorded


class DraftFeed:
    """Between a target's passes and a drafter.

    Parameters
    ----------
    runner : Runner
    drafter : GuardedDrafter

    Attributes
    ----------
    captures : bool
        Passes leave what the drafter reads; always true of one that reads ids alone.
    n_keepable : int
        Rows that can wait before they have to be handed over.
    """

    def __init__(self, runner, drafter):
        self._runner, self._drafter = runner, drafter
        self.captures, self.n_keepable = True, 0
        self._kept, self._first = [], 0  # tokens whose rows wait, position of the first
        self._owed = ()  # tokens of the newest pass that wait in its place

    # -- what passes leave ----------------------------------------------------------------------

    def capture(self, wanted=True):
        """Have the passes from here on leave what the drafter reads, or not."""
        self._runner.set_taps(self._drafter.taps)
        self.n_keepable = self._runner.n_keepable_taps
        self.captures = wanted or not self._drafter.taps
        taps = self._drafter.taps
        # Recording a pass takes dozens of a quick target's steps, capturing in vain next to nothing.
        if not self.captures and not self._runner.has_recorded_step(taps):
            self._runner.set_taps(())

    @property
    def reach(self):
        """Rows that the drafter has to see before it drafts when it has missed some; None: all."""
        reach = self._drafter.reach
        return None if reach is None or reach > self.n_keepable else reach

    def missing(self, reach):
        """Rows still to be kept until it can draft; 0 if it has missed none."""
        lags = self._drafter.lags and self._drafter.taps
        return max(0, reach - len(self._kept)) if lags else 0

    def leave_alone(self):
        """Let the drafter miss the rows to come, and those that wait."""
        self._owed, self._kept = (), []
        self._drafter.lags = True
        self.capture(False)

    def unrecorded(self, top, length):
        """Passes of rounds that draft ``length`` tokens which were never made on this memory.

        Parameters
        ----------
        top : int
            As ``Runner.step`` takes it.
        length : int

        Returns
        -------
        Unrecorded
        """
        taps, steps = self._drafter.taps, ((1, LAST), (length + 1, ALL))
        known = [self._runner.has_recorded(*step, taps, top) for step in steps]
        known += self._drafter.has_recorded(length)
        return Unrecorded(*(int(not k) for k in known))

    # -- rows ---------------------------------------------------------------------------------

    def owe(self, tokens):
        """Leave the rows of the newest pass in their place until ``pay``."""
        self._owed = tuple(tokens)

    def pay(self):
        """Show the drafter the rows of the newest pass, if they are owed."""
        owed, self._owed = self._owed, ()
        if owed:
            self._drafter.observe(owed, self._runner.tap_rows(len(owed)))
            self._drafter.commit(len(owed))

    def keep_back(self, token):
        """Let the one row of the newest pass wait; it is committed in the target already."""
        if not self._kept:
            self._first = self._runner.cache.length - 1
        self._runner.keep_taps(len(self._kept))
        self._kept.append(token)
        room = self.n_keepable
        if len(self._kept) == room:  # the older half; the newer one is sure to follow
            half, left = room - room // 2, room // 2
            older, self._kept = self._kept[:half], self._kept[half:]
            self._show(older, self._first, left)
            self._first += half
            self._runner.drop_kept(half, left)

    def rest(self, token):
        """Take the one row of a round of a pause; returns the milliseconds spent."""
        started = time.perf_counter()
        if self.n_keepable:
            self.keep_back(token)
        else:
            self._drafter.observe((token,), self._runner.tap_rows(1))
            self._drafter.commit(1)
        return 1e3 * (time.perf_counter() - started)

    def hand_over(self):
        """Show the drafter the rows that wait; done before it is asked for anything."""
        drafter = self._drafter
        self.pay()
        if not drafter.taps:  # ids are never lost
            self._catch_up()
            return
        if drafter.lags and not self._enough():
            return
        kept, self._kept = self._kept, []
        if kept:
            self._show(kept, self._first)
            drafter.lags = False

    def _enough(self):
        """Whether as many rows wait as must follow those that are skipped."""
        reach = self.reach
        return reach is not None and len(self._kept) >= reach

    def _catch_up(self):
        drafter, tokens = self._drafter, self._runner.tokens
        held, n_rows = drafter.length, self._runner.cache.length
        if held < n_rows and drafter.fault is None:
            drafter.observe(tokens[held:n_rows])
            drafter.commit(n_rows - held)
        drafter.lags = False

    def _show(self, tokens, first, remaining=0):
        """Hand kept rows over; those that were missed before them are skipped."""
        drafter, held = self._drafter, self._drafter.length
        if drafter.lags and held < first:
            drafter.skip(self._runner.tokens[held:first])
        drafter.observe(tokens, self._runner.kept_taps(len(tokens)), remaining)
        drafter.commit(len(tokens))
