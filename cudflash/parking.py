"""What a closed session leaves for the next one: its caches, and the passes recorded on them.

Owns at most one such pair of runners. Must not know answers. Invariant: what is kept holds no row of
an earlier conversation, and nobody else works on it.
"""


class Parking:
    """The memory that waits for the next session of an engine.

    Parameters
    ----------
    lock : RLock
        Of the engine.

    Attributes
    ----------
    kept : tuple
        (Runner, DraftRunner or None), or (None, None).
    """

    def __init__(self, lock):
        self._lock, self._open = lock, True
        self.kept = None, None

    def take(self):
        """Return what is kept, which is the caller's from then on."""
        with self._lock:
            found, self.kept = self.kept, (None, None)
            return found

    def park(self, runner, draft_runner, whole):
        """Take back what a session has used; released if something is kept already.

        Parameters
        ----------
        runner : Runner
        draft_runner : DraftRunner or None
        whole : bool
            False: an answer was cut off in it, so it is released.
        """
        with self._lock:
            if not self._open or not whole or self.kept[0] is not None:
                _release(runner, draft_runner)
                return
            if draft_runner is None:
                runner.reset()
            else:
                runner.reset(draft_runner.config.taps, draft_runner.source)
            self.kept = runner, draft_runner

    def close(self):
        """Release what is kept, and all that comes later."""
        with self._lock:
            self._open = False
            _release(*self.take())


def _release(*runners):
    for runner in runners:
        if runner is not None:
            runner.release()
