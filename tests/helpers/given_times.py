"""Answers whose economy is told given times: no decision depends on a clock or the machine's load."""

from cudflash.spec.costs import RoundCosts
from cudflash.spec.economy import Economy
from cudflash.spec.prospects import DRAFT


class _Given:
    """A meter that says what it was told."""

    first, count = None, 9

    def __init__(self, ms):
        self._ms = ms

    @property
    def ms(self):
        return self._ms() if callable(self._ms) else self._ms

    def add(self, ms):
        pass

    def add_round(self, ms, index):
        pass

    def extend(self, times):
        pass

    def clear(self):
        pass


class GivenCosts(RoundCosts):
    """Costs that were not measured: what the clock says is left out.

    Parameters
    ----------
    cost : callable
        Milliseconds of a round that drafts so many tokens, 0 for a plain one.
    prepare_ms : float, optional
        What preparing a pass takes.
    """

    def __init__(self, cost, prepare_ms=None):
        super().__init__()
        self.plain, self._cost = _Given(lambda: cost(0)), cost
        self.prepare_ms = prepare_ms

    def note_rows(self, n_rows, ms):
        pass

    def meter(self, drafter, length):
        return _Given(lambda: self._cost(length))


def given_times(monkeypatch, one, cost, prepare_ms=None, draft_ms=0.0):
    """Let all that the economy of an engine is told be given, nothing come from a clock."""
    monkeypatch.setattr(one, "round_costs", GivenCosts(cost, prepare_ms))
    monkeypatch.setattr(one, "plain_step", _Given(None))
    record, rest, done = Economy.record, Economy.rest, Economy.done

    def given_record(self, drafted, accepted, emitted, ms, feed_ms, ended):
        record(self, drafted, accepted, emitted, cost(drafted), 0.0, ended)

    monkeypatch.setattr(Economy, "record", given_record)
    def given_rest(self, times, feed_ms):
        rest(self, [cost(0)] * len(times), 0.0)

    def given_done(self, stage, pass_ms, all_ms, *place):
        ms = draft_ms if stage.what == DRAFT else cost(stage.length) - draft_ms
        done(self, stage, ms, 3 * ms + prepare_ms, *place)

    monkeypatch.setattr(Economy, "rest", given_rest)
    monkeypatch.setattr(Economy, "done", given_done)
