"""The sampler chain of one answer: settings, generator, memory of the text, and the choice.

Owns the order of the samplers and the checks before any decision. Must not know where logits come
from. Invariant: the token chosen is a function of (config, seed, accepted tokens, number of draws
so far, logits); `snapshot` and `restore` carry all of that but the logits and config.
"""

import numpy as np

from cudflash.errors import NumericsError, UsageError
from cudflash.sampling import samplers as s
from cudflash.sampling.candidates import Candidates, Distribution
from cudflash.sampling.config import SamplingConfig
from cudflash.sampling.dry import Dry, sequence_breakers
from cudflash.sampling.mt19937 import resolve_seed
from cudflash.sampling.sorting import SELECT_MIN, column_maxima


class SamplerChain:
    """llama.cpp's default sampler chain with one seed and one text behind it.

    ``sample`` chooses and does not remember; ``accept`` remembers and does not choose, as in
    llama.cpp: call ``accept`` with every token that becomes part of the text, chosen here or not.
    Penalties and DRY count the prompt too: give it to ``accept_prompt`` first.

    The generator of the draw yields exactly one double per ``sample`` (with mirostat: none when one
    candidate is left); XTC has a generator of its own, same seed, one float per ``sample`` that
    reaches it with two candidates or more. A ``config.greedy`` chain draws nothing and takes the
    largest logit after bias, penalties and DRY, the lowest id among equal ones (llama.cpp's choice
    among exactly equal largest logits depends on its unstable sort instead).

    Parameters
    ----------
    config : SamplingConfig
    seed : int or None
        As for `Mt19937`; the seed in use is ``.seed``.
    n_vocab : int or None
        Number of logits; None takes it from the first logits seen.
    tokenizer : object or None
        Needed only for DRY's sequence breakers, see `dry.sequence_breakers`.
    n_ctx : int or None
        Context length in tokens; needed only where a look-back of -1 asks for all of it.

    Raises
    ------
    UsageError
        For a bias on an id outside the vocabulary, or when DRY or -1 lacks what it needs.
    """

    def __init__(
        self, config: SamplingConfig, seed=None, *, n_vocab=None, tokenizer=None, n_ctx=None
    ):
        self.config = config
        self.seed = resolve_seed(seed)
        self._lookups = {"tokenizer": tokenizer, "n_ctx": n_ctx}
        self.n_vocab = None
        self._ids = None
        self._edits = _edit_stages(config, tokenizer, n_ctx)  # change logits, remember the text
        self._stages = self._edits + _choice_stages(config, self.seed)
        self._selector = _selector(config, self.seed)
        if n_vocab is not None:
            self._bind(int(n_vocab))

    def _bind(self, n_vocab):
        outside = [ident for ident in self.config.logit_bias if ident >= n_vocab]
        if outside:
            raise UsageError(
                f"logit_bias: found token id {outside[0]}, "
                f"expected an id below the vocabulary size {n_vocab}"
            )
        self.n_vocab = n_vocab
        self._ids = np.arange(n_vocab, dtype=np.int32)
        if isinstance(self._selector, s.MirostatV1):
            self._selector.n_vocab = np.float32(n_vocab)

    @property
    def rng(self):
        """The generator of the draw (None for a chain without one): the ratio rule shares it."""
        return getattr(self._selector, "rng", None)

    def sample(self, logits) -> int:
        """Return the chosen token id.

        Parameters
        ----------
        logits : ndarray of shape (n_vocab,), float32
            Not changed. Single -inf entries are bans.

        Raises
        ------
        NumericsError
            For NaN or +inf anywhere, or no finite logit, before anything is decided or drawn.
        UsageError
            For another shape or type.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if self.config.greedy:
                return self._largest(self._row(logits))
            candidates = self._run(logits)
            self._selector.apply(candidates)
            return candidates.id_at(candidates.selected)

    @property
    def n_largest(self) -> int:
        """How many of a row's largest logits decide a choice, 0 where others count as well.

        That is ``top_k`` and the one after them, where top-k is the first thing that happens to the
        logits: no bias, no penalty, no DRY, no top-n-sigma.
        """
        first = self._stages[0] if self._stages else None
        fits = isinstance(first, s.TopK) and (self.n_vocab is None or first.k < self.n_vocab)
        return first.k + 1 if fits and not self.config.greedy else 0

    def sample_largest(self, ids, values):
        """As ``sample`` of a row of which only the ``n_largest`` largest logits are known.

        Parameters
        ----------
        ids : ndarray of shape (n_largest,), int32
        values : ndarray of shape (n_largest,), float32
            Finite, descending.

        Returns
        -------
        int or None
            None, and nothing is drawn, where two of them are equal: the order that the chain gives
            them depends on the rest of the row.
        """
        if not (values[1:] < values[:-1]).all():
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            candidates = Candidates.of_largest(values[:-1].copy(), ids[:-1].copy())
            for stage in self._stages[1:]:
                stage.apply(candidates)
            self._selector.apply(candidates)
            return candidates.id_at(candidates.selected)

    def probabilities(self, logits) -> Distribution:
        """Return what is left after the whole chain: ids and probabilities, in list order.

        The distribution ``sample`` would draw from: p of the ratio acceptance rule. Draws nothing
        but XTC's float, which belongs to the chain; so per position call either this or ``sample``.

        Raises
        ------
        UsageError
            With mirostat, whose truncation depends on what it drew.
        """
        if self.config.mirostat:
            raise UsageError(
                "probabilities: mirostat has no distribution before its draw; "
                "use the match acceptance rule or mirostat=0"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            if self.config.greedy:
                best, one = self._largest(self._row(logits)), np.ones(1, np.float32)
                return Distribution(np.array([best], np.int32), one, one)
            candidates = self._run(logits)
            if isinstance(self._selector, s.Greedy):
                self._selector.apply(candidates)
                candidates.take(np.array([candidates.selected]))
            return candidates.distribution()

    def accept(self, token: int) -> None:
        """Remember a token that became part of the text."""
        for stage in self._edits:
            stage.accept(int(token))

    def accept_prompt(self, tokens) -> None:
        """Remember the prompt: penalties and DRY count its tokens, as llama.cpp's server does."""
        for token in tokens:
            self.accept(token)

    def snapshot(self) -> tuple:
        """Return all that changes from token to token; later calls do not change it."""
        return tuple(stage.state() for stage in (*self._stages, self._selector))

    def restore(self, snapshot: tuple) -> None:
        """Return to a snapshot of this chain, or of one built from the same config and seed."""
        stages = (*self._stages, self._selector)
        if len(snapshot) != len(stages):
            raise UsageError(
                f"chain snapshot: found {len(snapshot)} parts, expected {len(stages)}; "
                "restore a snapshot of a chain with the same config"
            )
        for stage, state in zip(stages, snapshot, strict=True):
            stage.set_state(state)

    def fresh(self) -> "SamplerChain":
        """Return another chain as this one was built; ``restore`` gives it this one's state."""
        return SamplerChain(self.config, self.seed, n_vocab=self.n_vocab, **self._lookups)

    def reset(self) -> None:
        """Return to the state just after construction: same seed, no text."""
        for stage in (*self._stages, self._selector):
            stage.reset()

    def _run(self, logits):
        candidates = self._candidates(self._row(logits))
        for stage in self._stages:
            stage.apply(candidates)
        return candidates

    def _candidates(self, row):
        """A fresh list; the pass that finds NaN also gives top-k its lower bound."""
        maxima = column_maxima(row) if len(row) >= SELECT_MIN else row
        _check_largest(maxima.max(), row)
        candidates = Candidates(row, self._ids, None if maxima is row else maxima)
        if self.config.logit_bias:
            _check_bans(row, self.config.logit_bias)
        return candidates

    def _largest(self, row):
        if not self._edits:
            best = int(row.argmax())
            _check_largest(row[best], row)
            return best
        candidates = self._candidates(row)
        for stage in self._edits:
            stage.apply(candidates)
        return int(candidates.logits.argmax())

    def _row(self, logits):
        row = np.asarray(logits)
        if self.n_vocab is None and row.ndim == 1 and len(row):
            self._bind(len(row))
        if row.dtype != np.float32 or row.shape != (self.n_vocab,):
            raise UsageError(
                f"logits: found {row.dtype} of shape {row.shape}, "
                f"expected float32 of shape ({self.n_vocab or 'n_vocab'},)"
            )
        return np.ascontiguousarray(row)


def _edit_stages(config, tokenizer, n_ctx):
    stages = []
    if config.logit_bias:
        stages.append(s.LogitBias(config.logit_bias))
    if config.mirostat:
        return stages
    if config.uses_penalties:
        last_n = _look_back("repeat_last_n", config.repeat_last_n, n_ctx)
        stages.append(
            s.Penalties(
                last_n, config.repeat_penalty, config.frequency_penalty, config.presence_penalty
            )
        )
    if config.uses_dry:
        if config.dry_sequence_breakers and tokenizer is None:
            raise UsageError(
                "dry_sequence_breakers: found no tokenizer to turn them into tokens; "
                "pass tokenizer= or an empty sequence"
            )
        last_n = _look_back("dry_penalty_last_n", config.dry_penalty_last_n, n_ctx)
        breakers = sequence_breakers(config.dry_sequence_breakers, tokenizer)
        stages.append(
            Dry(config.dry_multiplier, config.dry_base, config.dry_allowed_length, last_n, breakers)
        )
    return stages


def _choice_stages(config, seed):
    """The samplers between the edits and the draw; one that its settings switch off is left out."""
    stages = []
    if config.mirostat:
        if config.temperature != 1:
            stages.append(s.Temperature(config.temperature))
        return stages
    if config.top_n_sigma > 0:
        stages.append(s.TopNSigma(config.top_n_sigma))
    if config.top_k > 0:
        stages.append(s.TopK(config.top_k))
    if config.typical_p < 1:
        stages.append(s.Typical(config.typical_p, config.min_keep))
    if config.top_p < 1:
        stages.append(s.TopP(config.top_p, config.min_keep))
    if config.min_p > 0:
        stages.append(s.MinP(config.min_p, config.min_keep))
    if config.uses_xtc:
        stages.append(s.Xtc(config.xtc_probability, config.xtc_threshold, config.min_keep, seed))
    if config.dynatemp_range > 0:
        stages.append(
            s.DynamicTemperature(
                config.temperature, config.dynatemp_range, config.dynatemp_exponent
            )
        )
    elif config.temperature not in (0, 1):
        stages.append(s.Temperature(config.temperature))
    return stages


def _selector(config, seed):
    if config.mirostat == 1:
        return s.MirostatV1(0, seed, config.mirostat_tau, config.mirostat_eta)
    if config.mirostat == 2:
        return s.MirostatV2(seed, config.mirostat_tau, config.mirostat_eta)
    if config.temperature == 0 and config.dynatemp_range == 0:
        return s.Greedy()
    return s.Dist(seed)


def _look_back(name, last_n, n_ctx):
    if last_n == -1 and n_ctx is None:
        raise UsageError(f"{name}: found -1 (the whole context) but no context length; pass n_ctx=")
    return int(n_ctx) if last_n == -1 else last_n


def _check_largest(largest, row):
    if np.isfinite(largest):
        return
    if largest == -np.inf:
        raise NumericsError(
            f"logits: found none of {len(row)} finite, all are -inf; expected at least one; "
            "the forward pass or the weights are damaged"
        )
    first = int(np.argmax(np.isnan(row) | (row == np.inf)))
    raise NumericsError(
        f"logits: found {row[first]} at token id {first}, expected finite numbers or -inf; "
        "the forward pass or the weights are damaged"
    )


def _check_bans(row, bias):
    """Only bans can leave nothing: then every finite logit has one."""
    banned = [ident for ident, amount in bias.items() if amount == -np.inf]
    if len(banned) and np.count_nonzero(row != -np.inf) <= len(banned):
        left = np.ones(len(row), bool)
        left[banned] = False
        if not (row[left] != -np.inf).any():
            raise NumericsError(
                f"logit_bias: found {len(banned)} bans that leave no token to choose; "
                "expected at least one left; remove a ban"
            )
