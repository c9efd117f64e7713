"""One round over several states: all of them move, or none does.

Owns begin, commit and rollback of target caches, drafter and sampler chain together. Must not know
what a round decides. Invariant: outside an open transaction every part holds committed rows only.
"""


class Transaction:
    """Begin, then commit or roll back; also usable as ``with transaction:``.

    Leaving the ``with`` block without a commit, by an exception, a cancellation or otherwise, rolls
    back.

    Parameters
    ----------
    target : object
        ``commit(n)`` and ``rollback()``; opens its block itself when it evaluates one.
    drafter : GuardedDrafter or None
    chain : SamplerChain or None
        Restored by a rollback to its state at ``begin``.
    """

    def __init__(self, target, drafter=None, chain=None):
        self._target, self._drafter, self._chain = target, drafter, chain
        self._snapshot = None
        self.open = False

    def begin(self):
        """Remember the state to which a rollback returns."""
        if self.open:
            raise RuntimeError("a transaction is open; commit or roll it back")
        self._snapshot = None if self._chain is None else self._chain.snapshot()
        self.open = True

    def commit(self, n_rows, observed=True):
        """Keep the first ``n_rows`` rows everywhere; on an exception, nothing is kept open.

        Parameters
        ----------
        n_rows : int
        observed : bool
            Whether the drafter was shown the rows; False keeps them in the target alone.
        """
        if not self.open:
            raise RuntimeError("no transaction is open; begin one")
        try:
            self._target.commit(n_rows)
        except BaseException:
            self.rollback()
            raise
        self.open = False
        if self._drafter is not None and observed:
            self._drafter.commit(n_rows)

    def rollback(self):
        """Return every part to ``begin``; does nothing when none is open.

        All parts are rolled back even if one of them raises; the first exception goes on.
        """
        if not self.open:
            return
        try:
            self._target.rollback()
        finally:
            try:
                if self._drafter is not None:
                    self._drafter.rollback()
            finally:
                if self._chain is not None:
                    self._chain.restore(self._snapshot)
                self.open = False  # last: a rollback that was interrupted can be done again

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, *exc):
        self.rollback()
