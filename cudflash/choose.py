"""From rows of logits to tokens: finite check, greedy or sampled choice, log-probabilities.

Owns the order of decisions of one answer. Must not know how the rows were computed, nor whether
tokens are later cut. Invariant: a token is chosen from one row of logits and from the tokens chosen
before it, in the order of emission.
"""

from dataclasses import dataclass

import numpy as np

from cudflash.checks import whole
from cudflash.errors import NumericsError
from cudflash.model.outcome import CANDIDATES
from cudflash.result import TokenLogprob
from cudflash.spec.acceptance import DecidedRows, LogitRows, TokenRows


@dataclass(frozen=True)
class Choice:
    """A chosen token."""

    token: int
    logprob: TokenLogprob | None
    row_digest: str | None = None  # of the full row of logits it was decided from, if asked for


class Chooser:
    """Chooses the tokens of one answer from the logits that a workspace holds.

    Temperature 0 without bias, penalties or DRY reads only the argmax that the device has computed;
    its ties are resolved as in ``SamplerChain``: the lowest id.

    Parameters
    ----------
    ops : module
    work : Workspace
    chain : SamplerChain
    n_logprobs : int
        Entries of ``TokenLogprob.top``; 0 for no log-probabilities at all.
    row_digests : bool
        Add the SHA-256 of each deciding row to its Choice.
    compact : bool
        Decide from the largest logits of a row where they decide: it is dear to fetch whole rows.

    Attributes
    ----------
    chain : SamplerChain
    on_device : bool
        Whether only ids are read.
    n_largest : int
        Largest logits of each row to fetch with the outcome, 0 for none.
    """

    def __init__(self, ops, work, chain, n_logprobs, row_digests=False, compact=False):
        self._ops, self._work, self._n_logprobs = ops, work, n_logprobs
        self._row_digests = row_digests
        self.chain = chain
        self._told = None
        self._rows = None
        self._drafted = False
        config = chain.config
        edited = bool(config.logit_bias) or config.uses_penalties or config.uses_dry
        self.on_device = config.greedy and not edited
        whole_rows = n_logprobs or row_digests  # are fetched in any case
        fits = compact and not whole_rows and chain.n_largest <= CANDIDATES
        self.n_largest = chain.n_largest if fits else 0

    def read(self, position, n_rows=1, n_largest=0):
        """Fetch the outcome of the pass that has just run; comes before everything else.

        Parameters
        ----------
        position : int
        n_rows, n_largest : int
            As the pass was asked for.

        Raises
        ------
        NumericsError
            If any of its logits is not finite; names ``position``, the first one it evaluated.
        """
        if not self.fetch(n_rows, n_largest):
            raise NumericsError(
                f"the logits after position {position} are not all finite, expected finite numbers; "
                "the weights or the numerics are damaged, run 'cudflash doctor'"
            )

    def fetch(self, n_rows, n_largest=0, drafted=False):
        """As ``read``, but return whether all logits are finite.

        ``drafted``: the pass was told nothing of its drafts (``Runner.step_drafted``).
        """
        self._told = self._work.outcome.read(self._ops, n_rows, n_largest, drafted)
        self._drafted = drafted
        self._rows = HostRows(self._ops, self._work.logits)
        return self._told.finite

    @property
    def box(self):
        """What the drafter has told with the outcome."""
        return self._told.box

    def rows(self, by_device=True):
        """What an acceptance rule reads: ids where they decide, logits with the chain elsewhere.

        ``by_device`` False leaves a decision that the device has made already to the host.
        """
        if not self.on_device:
            return LogitRows(self.chain, self._rows, self._told.candidates)
        if self._drafted and by_device:
            return DecidedRows(*self._told.decision)
        return TokenRows(self._told.next_ids)

    def row(self, index):
        """One row of the logits that were fetched: float32 (vocab_size,), host copy."""
        return np.array(self._rows[index])

    def choose(self, row=0):
        """Choose from one row of ``work.logits`` and remember the choice.

        Returns
        -------
        Choice
        """
        if self.on_device:
            token = int(self._told.next_ids[row])
            self.chain.accept(token)
        else:
            token = self.rows().choose(row)
        return self.made(token, row)

    def made(self, token, row):
        """Return the Choice of a token that was decided from a row."""
        digest = None
        if self._row_digests:
            import hashlib  # here: it loads OpenSSL, 1 % of a start

            digest = hashlib.sha256(np.ascontiguousarray(self._rows[row])).hexdigest()
        if not self._n_logprobs:
            return Choice(token, None, digest)
        from cudflash.sampling.logprobs import log_softmax_top

        found = log_softmax_top(self._rows[row], self._n_logprobs)
        return Choice(token, TokenLogprob(token, found.of(token), tuple(found.top)), digest)


class HostRows:
    """Rows of a device buffer, each copied to the host when it is first read."""

    def __init__(self, ops, buffer):
        self._ops, self._buffer, self._read = ops, buffer, {}

    def __getitem__(self, row):
        if row not in self._read:
            self._read[row] = self._ops.download(self._buffer[row])
        return self._read[row]


def check_logprobs(n_logprobs, vocab_size):
    """Return ``logprobs`` as an int; raise UsageError unless it is a count of ids, 0 for none."""
    return whole("logprobs", n_logprobs, 0, vocab_size)
