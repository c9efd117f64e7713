"""How far back does a draft really look? Measured on the draft in memory, held against its file.

Owns the experiment and its finding. Must not change a conversation. A window that is not the trained
one hardly shows in acceptance, so it is not looked for there: a context row is altered, and whether
any bit of the block changes tells whether the row is seen. Exact, for trained and random drafts
alike: the row at distance W - 1 from the block must be seen, the row at distance W must not.
"""

import numpy as np

from cudflash.model.draft_runner import DraftRunner
from cudflash.spec.diagnosis import Finding

TRIES = 3  # alterations of a row: one may vanish in rounding
WINDOW_REACH = "window-reach"


def check_reach(engine, seed=1):
    """Measure how far back the draft sees and compare it with the window that its file states.

    Parameters
    ----------
    engine : Engine
        With a draft; not locked by the caller.
    seed : int
        Of the rows that the context is filled with; what they mean does not matter.

    Returns
    -------
    Finding or None
        None when it sees as far as the file says, or when nothing can be measured: no window is
        stated, a layer sees everything, or the context is too short.
    """
    windows = engine.draft.file_windows()
    stated = windows[0]
    with engine.lock:
        engine.begin_pass()
        if stated is None or set(windows) != {stated}:
            return None
        seen = _Reach(engine, stated, seed)
        if not seen.possible:
            return None
        if seen.sees(stated - 1) and not seen.sees(stated):
            return None
        reach = seen.farthest()
    sees = f"{reach + 1} rows" if reach < seen.most else f"at least {reach + 1} rows"
    return Finding(
        WINDOW_REACH,
        f"the draft sees {sees} back from its block, its file states a window of {stated}; a draft "
        "conditioned otherwise than in training proposes worse",
        {"reach": reach + 1, "stated": stated, "in_effect": engine.draft.config.window},
    )


class _Reach:
    """A context longer than the window, and blocks after it with one row altered."""

    def __init__(self, engine, stated, seed):
        self._ops, self._draft = engine.ops, engine.draft
        config = engine.draft.config
        self._sink = config.sink or 0
        self._n = self._sink + 2 * stated + config.block_size
        self.most = self._n - self._sink - 1  # farthest distance that can be told from the sink
        self.possible = self._n + config.block_size <= engine.n_ctx
        self._rng = np.random.default_rng(seed)
        shape = (self._n, len(config.taps), engine.config.hidden_dim)
        self._rows = self._rng.standard_normal(shape).astype(np.float32)
        self._base = None

    def _block(self, rows):
        runner = DraftRunner(self._ops, self._draft.model, self._draft.work)
        runner.observe(self._ops.upload(rows), self._n)
        runner.propose(1, runner.config.block_size - 1)
        return runner.hidden(runner.config.block_size).view(np.uint32)

    def sees(self, distance):
        """Whether a block changes with the row so far before it."""
        if self._base is None:
            self._base = self._block(self._rows)
        for _ in range(TRIES):
            rows = self._rows.copy()
            rows[self._n - distance] = self._rng.standard_normal(rows.shape[1:])
            if (self._block(rows) != self._base).any():
                return True
        return False

    def farthest(self):
        """The largest distance that is seen; what is seen has no gaps."""
        if self.sees(self.most):
            return self.most
        low, high = 0, self.most  # low is seen, high is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.sees(middle) else (low, middle)
        return low
