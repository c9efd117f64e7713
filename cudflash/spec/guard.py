"""A drafter behind a guard: what goes wrong in it costs speed, never the answer.

Owns the isolation of drafter faults. Must not know targets. Invariant: no ``Exception`` of a
drafter leaves a guard; after the first one the drafter is not asked again in this answer.
Interruptions (``KeyboardInterrupt``, ``GeneratorExit``) are no faults and go through.
"""

from dataclasses import dataclass

from cudflash.spec.diagnosis import context_hole
from cudflash.spec.drafters import check_drafter
from cudflash.spec.proposals import check_proposal


@dataclass(frozen=True)
class DrafterFault:
    """Why a drafter is no longer asked."""

    step: str  # "propose", "observe", "commit", "rollback", "rewind" or "context"
    n_past: int  # committed rows at that time
    kind: str  # name of the exception's class
    reason: str  # one sentence


class GuardedDrafter:
    """Calls a drafter, checks what it returns, and remembers its first fault.

    Parameters
    ----------
    drafter : Drafter
    vocab_size : int

    Attributes
    ----------
    fault : DrafterFault or None
    lags : bool
        Rows of the session are kept from it for the time being: it holds the ones before them.
    name, taps, block_size
        The drafter's.
    """

    def __init__(self, drafter, vocab_size):
        self.drafter = check_drafter(drafter)
        self.name, self.taps = str(drafter.name), tuple(drafter.taps)
        self.block_size = drafter.block_size
        self._vocab_size = vocab_size
        self._n_past = 0
        self._ids, self._observed = [], ()  # tokens of the rows that the drafter holds
        self.fault, self.lags = None, False

    @property
    def length(self):
        """Committed rows that the drafter holds, or 0 after a fault."""
        return self._call("context", lambda: self.drafter.length) or 0

    @property
    def reach(self):
        """Rows that it needs to see before it drafts, when it has missed some; None for all."""
        return 0 if not self.taps else getattr(self.drafter, "reach", None)

    @property
    def timed(self):
        """Whether its pass can be timed by itself."""
        return hasattr(self.drafter, "time_pass")

    def has_recorded(self, n):
        """Whether the passes over a block of ``n`` drafts and over its context were made before."""
        try:
            block, context = self.drafter.has_recorded(n)
        except Exception:  # noqa: BLE001 - it does not tell; this is a matter of prices alone
            return False, False
        return bool(block), bool(context)

    def time_pass(self, anchor, n):
        """Run the pass that proposes ``n`` tokens once, to see what it takes; proposes nothing."""
        self._call("propose", lambda: self.drafter.time_pass(anchor, n))

    def skip(self, tokens):
        """Count rows as held that no later block will see; they come from an earlier time."""
        self._call("observe", lambda: self.drafter.skip(len(tokens)))
        if self.fault is None:
            self._ids += tokens

    @property
    def drafter_max(self):
        """Tokens that it can propose at once, None for any number."""
        return None if self.block_size is None else self.block_size - 1

    @property
    def usual_length(self):
        """Verify length that it wants where none is asked for; None for the usual one."""
        return getattr(self.drafter, "usual_length", None)

    def propose(self, anchor, n, context):
        """Return a checked Proposal, or None after a fault."""
        self._n_past = context.n_past
        if self.fault is None:
            self._check_length(context.n_past)
        return self._call(
            "propose",
            lambda: check_proposal(self.drafter.propose(anchor, n, context), n, self._vocab_size),
        )

    @property
    def source(self):
        """Where ``start`` leaves drafts, None for a drafter that proposes to the host only."""
        found = getattr(self.drafter, "source", None)
        whole = found is not None and callable(getattr(self.drafter, "start", None))
        return found if whole and found.fits else None

    def start(self, anchor, n, context):
        """Let the drafter leave at most ``n`` tokens on the device.

        Returns
        -------
        int or None
            How many, None after a fault. ``learn`` follows.
        """
        self._n_past = context.n_past
        if self.fault is None:
            self._check_length(context.n_past)
        return self._call("propose", lambda: self.drafter.start(anchor, n, context))

    def learn(self, words, n):
        """Return the checked Proposal of ``n`` tokens that was started, None after a fault."""
        return self._call(
            "propose", lambda: check_proposal(self.drafter.learn(words), n, self._vocab_size)
        )

    def observe(self, tokens, taps=None, remaining=0):
        """Hand over evaluated rows; ``remaining`` rows of a prompt will follow them."""
        if remaining and hasattr(self.drafter, "expect"):
            self._call("observe", lambda: self.drafter.expect(remaining))
        self._observed = tuple(tokens)
        self._call("observe", lambda: self.drafter.observe(tokens, taps))

    def commit(self, n):
        """Keep the first ``n`` observed rows."""
        self._ids += self._observed[:n]
        self._observed = ()
        self._call("commit", lambda: self.drafter.commit(n))

    def rollback(self):
        """Drop what is tentative."""
        self._observed = ()
        self._call("rollback", self.drafter.rollback)

    def checkpoint(self):
        """Let a drafter that has a use for it remember its committed state."""
        if hasattr(self.drafter, "checkpoint"):
            self._call("commit", self.drafter.checkpoint)

    def rewind(self, length, tokens=None):
        """Go back to at most ``length`` rows for a new answer and forget an earlier fault.

        After a fault the drafter's rows cannot be trusted: it starts from none. Nor can rows be
        kept that are not those of the session: answers without this drafter may have come between.

        Parameters
        ----------
        length : int
        tokens : sequence of int, optional
            Committed ids of the session, at least ``length``.

        Returns
        -------
        int
            Rows kept: the target must be evaluated again from there.
        """
        wanted = 0 if self.fault is not None else length
        if tokens is not None:
            wanted = min(wanted, self._shared(tokens))
        self.fault, self._observed, self.lags = None, (), False
        kept = self._call("rewind", lambda: self.drafter.rewind(wanted))
        if self.fault is None and not 0 <= kept <= wanted:
            self._set_fault("rewind", "ValueError", f"it kept {kept!r} rows of {wanted}")
        kept = 0 if self.fault is not None else int(kept)
        del self._ids[kept:]
        return kept

    def _shared(self, tokens):
        """Leading rows that are those of ``tokens``; none of a drafter that was used elsewhere."""
        if self._call("rewind", lambda: self.drafter.length) != len(self._ids):
            return 0
        same = 0
        for same, (a, b) in enumerate(zip(self._ids, tokens)):
            if a != b:
                return same
        return min(len(self._ids), len(tokens))

    def held(self):
        """Return the HeldRows of a drafter that tells them, else None."""
        tell = getattr(self.drafter, "held", None)
        return self._call("context", tell) if callable(tell) else None

    def _check_length(self, n_past):
        """Fault on a hole between the drafter's context and the committed rows."""
        finding = self._call("context", lambda: context_hole(self.drafter.length, n_past))
        if finding is not None:
            self._set_fault("context", finding.name, finding.sentence)

    def _call(self, step, action):
        if self.fault is not None:
            return None
        try:
            return action()
        except Exception as err:  # noqa: BLE001 - any fault of a drafter, that is the point
            self._set_fault(step, type(err).__name__, str(err) or type(err).__name__)
            return None

    def _set_fault(self, step, kind, reason):
        self.fault = DrafterFault(
            step, self._n_past, kind, f"the drafter '{self.name}' failed in {step}: {reason}"
        )
        try:
            self.drafter.rollback()
        except Exception:  # noqa: BLE001
            pass  # it is not asked again; its state no longer matters
