"""The drafter of a target's own MTP block: k passes in a row behind the drafter protocol.

Owns how many tokens are proposed and which distribution they were drawn from. Must not know targets
or acceptance rules. Invariant: under ``ratio`` every proposed token was drawn with one double of
the answer's generator, in order, truncated as ``DraftSampler`` says; without a sampler every token
is the block's most likely one, a point mass.
"""

from cudflash.errors import UsageError
from cudflash.spec.proposals import POINT_MASS, Proposal
from cudflash.spec.verify_length import covering

DEFAULT_K = 3
MAX_K = 15


def check_k(k, name="k"):
    """Return k, which the caller knows as ``name``, as an int.

    Raises
    ------
    UsageError
        Unless it is 1 to 15.
    """
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= int(k) <= MAX_K:
        raise UsageError(f"{name} is {k!r}, expected a whole number from 1 to {MAX_K}")
    return int(k)


class MTPDrafter:
    """Drafts with the MTP block of the target; follows the ``Drafter`` protocol.

    Made by ``Engine.mtp_drafter``.

    Parameters
    ----------
    runner : MTPRunner
    tap : int
        Last layer of the target (0-based).
    k : int
        Tokens proposed per round, 1 to 15: as many passes of the block, one after the other. A
        round may ask for fewer.

    Attributes
    ----------
    name : str
        "mtp".
    block_size : None
        Any verify length will do; a longer one than ``k`` is not filled.

    Raises
    ------
    UsageError
        For another k.
    """

    name = "mtp"
    block_size = None

    def __init__(self, runner, tap, k=DEFAULT_K):
        self.runner, self.k, self.taps = runner, check_k(k), (int(tap),)

    @property
    def usual_length(self):
        """The verify length where none is asked for: the next one with room for ``k``."""
        return covering(self.k)

    @property
    def length(self):
        """Committed rows."""
        return self.runner.length

    def propose(self, anchor, n, context):
        """Propose at most ``k`` of the ``n`` tokens that are asked for."""
        n = min(n, self.k)
        if context.sampler is None:
            return Proposal(self.runner.draft(anchor, n), POINT_MASS)
        found = []

        def choose(logits):
            token, distribution = context.sampler.draw(logits, context.rng)
            found.append(distribution)
            return token

        tokens = self.runner.draw(anchor, n, choose)
        return Proposal(tuple(tokens), tuple(found))

    def start(self, anchor, n, context):
        """As ``propose`` without a sampler, the tokens left on the device: the number of them."""
        n = min(n, self.k)
        self.runner.start(anchor, n)
        return n

    def learn(self, words):
        """Return the Proposal that was started."""
        return Proposal(self.runner.learn(words), POINT_MASS)

    @property
    def source(self):
        """Where ``start`` leaves the tokens."""
        return self.runner.source

    def observe(self, tokens, taps):
        """Catch up: compute the block's keys and values of evaluated tokens."""
        self.runner.observe(tokens, taps)

    def commit(self, n):
        """Keep the first ``n`` observed rows."""
        self.runner.commit(n)

    def rollback(self):
        """Drop observed rows."""
        self.runner.rollback()

    def checkpoint(self):
        """Make ``rewind`` to the committed rows possible later."""
        self.runner.checkpoint()

    def rewind(self, length):
        """Go back to at most ``length`` rows: to these, or to a checkpoint before them."""
        return self.runner.rewind(length)
