"""The drafter of a DFlash or DFlash2 draft: its passes behind the drafter protocol.

Owns which distribution a proposal was truly drawn from. Must not know targets or acceptance rules.
Invariant: under ``ratio`` every proposed token was drawn with one double of the answer's generator,
in order; without a sampler every token is the draft's own choice, a point mass.

How tokens come about:

============ ============================== ====================================================
kind         ``match``, temperature 0       ``ratio``
============ ============================== ====================================================
dflash       argmax of each row             one draw per row, truncated as ``DraftSampler`` says
dflash2      greedy walk of the selector    one draw per row among the walk's candidates, softmax of
                                            their scores over the request's temperature
============ ============================== ====================================================

A temperature of 0 draws nothing under ``ratio`` either where dynamic temperature makes the target
draw: dflash2 has no entropy to scale by, so it proposes its greedy walk and calls it a point mass.
"""

import numpy as np

from cudflash.errors import NumericsError
from cudflash.model.draft_walk import sample_walk
from cudflash.spec.proposals import POINT_MASS, Proposal, ProposalDistribution


class DFlashDrafter:
    """Drafts with a loaded draft; follows the ``Drafter`` protocol.

    Parameters
    ----------
    runner : DraftRunner
    full_block : bool
        Always condition on the block that the draft was trained with, whatever is proposed of it.
        False runs a block of just the proposed rows and the anchor's, which is cheaper, and another
        conditioning where rows of a block see later ones. In a causal draft they do not: it always
        runs just those rows.

    Attributes
    ----------
    name : str
        "dflash" or "dflash2".
    taps, block_size
        As the draft's file says.
    echoes : list of (int, int)
        Per block since ``rewind``: the most likely token of row 0, and the anchor.
    """

    def __init__(self, runner, full_block=True):
        config = runner.config
        self.runner = runner
        self.full_block = full_block and not config.causal
        self.name, self.taps, self.block_size = config.kind, config.taps, config.block_size
        self.echoes = []
        self._remaining = 0
        self._started = None  # anchor of the block that was started

    @property
    def length(self):
        """Committed rows."""
        return self.runner.length

    @property
    def reach(self):
        """Rows that must follow skipped ones before it drafts; None where none can be skipped."""
        return self.runner.context.reach

    def skip(self, n):
        """Count ``n`` rows as committed that no later block will see."""
        self.runner.context.skip(n)

    def time_pass(self, anchor, n):
        """Run one block as ``propose`` does, whatever rows the context holds."""
        self.runner.time_block(anchor, n, self._rows(n))

    def has_recorded(self, n):
        """Whether the passes over a block of ``n`` drafts and over its context were made before."""
        return self.runner.has_recorded(self._rows(n), n)

    def expect(self, n_rows):
        """Prepare for rows of the prompt that are sure to follow the next observed ones."""
        self._remaining = n_rows

    def propose(self, anchor, n, context):
        """Run one block and propose ``n`` tokens."""
        outcome = self.runner.propose(anchor, n, self._rows(n))
        self.echoes.append((outcome.echo, int(anchor)))
        walks = self.name == "dflash2"
        if context.sampler is None or (walks and context.sampler.temperature == 0):
            return Proposal(outcome.tokens, POINT_MASS, outcome.confidence)
        if walks:
            return self._walk(context)
        logits = self.runner.logits()
        if not np.isfinite(logits).all():
            raise NumericsError("the draft's logits are not finite, expected numbers")
        return context.sampler.propose(logits, context.rng)

    def start(self, anchor, n, context):
        """As ``propose`` without a sampler, the tokens left on the device: the number of them."""
        self.runner.start(anchor, n, self._rows(n))
        self._started = int(anchor)
        return n

    def learn(self, words):
        """Return the Proposal that was started."""
        outcome = self.runner.learn(words)
        self.echoes.append((outcome.echo, self._started))
        return Proposal(outcome.tokens, POINT_MASS, outcome.confidence)

    @property
    def source(self):
        """Where ``start`` leaves the tokens."""
        return self.runner.source

    def _rows(self, n):
        """Rows of a block that proposes ``n`` tokens."""
        return self.block_size if self.full_block else n + 1

    def _walk(self, context):
        ids, scores = self.runner.lattice()
        temperature = context.sampler.temperature
        tokens, probs = sample_walk(ids, scores, temperature, context.rng.uniform_double)
        found = tuple(ProposalDistribution(i, p) for i, p in zip(ids, probs))
        return Proposal(tokens, found, tuple(q.of(t) for q, t in zip(found, tokens)))

    def observe(self, tokens, taps):
        """Compute the context rows of evaluated tokens; tentative until ``commit``."""
        remaining, self._remaining = self._remaining, 0
        self.runner.write(taps, len(tokens), remaining)

    def commit(self, n):
        """Keep the first ``n`` observed rows."""
        self.runner.commit(n)

    def rollback(self):
        """Drop observed rows."""
        self._remaining = 0
        self.runner.rollback()

    def rewind(self, length):
        """Go back to at most ``length`` rows; what a ring has lost is lost."""
        self.echoes = []
        return self.runner.rewind(length)

    def held(self):
        """Return the HeldRows of its context."""
        return self.runner.context.held()

    def boundaries(self):
        """Committed rows at which something of the draft's context ends, for the diagnosis."""
        config = self.runner.config
        if config.window is None:
            return {}
        found = {"window": config.window}
        if config.sink:
            found["sink and window"] = config.sink + config.window
        rings = [la.capacity for la in self.runner.context.layers if la.window is not None]
        return {**found, "ring": rings[0]}
