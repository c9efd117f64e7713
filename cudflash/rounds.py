"""Rounds: how the next tokens of an answer are made. Plain decoding makes one per round.

The protocol, followed by plain and by speculative rounds:

- ``choose_first()`` chooses from the logits that the prompt has left (its block is committed);
- ``next(room)`` evaluates the newest token (and drafts after it) and returns the tokens chosen in
  this round, at least one and at most ``room``, leaving its block open;
- ``settle(kept)`` ends the round: the first ``kept`` of its tokens became part of the answer. The
  rows of the token before them and of all of them but the last are committed, the others dropped;
- ``abandon()`` drops an open block, whatever state it is in.

Invariant: between rounds the newest token of the answer is chosen but not evaluated, and caches hold
exactly the tokens before it.
"""


class PlainRounds:
    """One target pass, one token.

    Parameters
    ----------
    runner : Runner
    chooser : Chooser
    """

    def __init__(self, runner, chooser):
        self._runner, self._chooser = runner, chooser
        self._newest = None  # chosen, not evaluated
        self._chosen = None

    def choose_first(self):
        """Choose from the logits that the prompt's last row has left."""
        self._chooser.read(self._runner.cache.length - 1)
        self._newest = self._chooser.choose()
        return [self._newest]

    def next(self, room):
        """Evaluate the newest token, choose one; ``room`` is at least 1."""
        self._runner.step((self._newest.token,))
        self._chooser.read(self._runner.cache.length)
        self._chosen = self._chooser.choose()
        return [self._chosen]

    def settle(self, kept):
        """Commit the evaluated row; ``kept`` is 1."""
        self._runner.commit(kept)
        self._newest = self._chosen

    def abandon(self):
        """Drop an open block."""
        self._runner.rollback()
