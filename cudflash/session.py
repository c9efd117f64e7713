"""One conversation: its caches, and answers that reuse them.

Owns the checks of a request and the one answer that may be in progress. Must not know how an answer
proceeds. Invariant: a request is refused before any work, with both numbers where numbers decide.
"""

import threading

from cudflash import defaults
from cudflash.answer_facts import answer_facts, drafter_facts
from cudflash.checks import whole
from cudflash.choose import Chooser, check_logprobs
from cudflash.errors import ContextLengthError, UsageError
from cudflash.generation import Generation, Request
from cudflash.model.runner import Runner
from cudflash.prompts import prompt_ids
from cudflash.rounds import PlainRounds
from cudflash.spec.acceptance import rule_in_effect
from cudflash.spec.modes import OFF, check_speculative
from cudflash.stop import StopRules, stop_rules


class Session:
    """One conversation on an engine; made by ``Engine.session``. Several may be alive.

    Every ``generate`` gets the whole prompt; the session finds what it has already evaluated and
    evaluates only the rest. The answer has the bits of a fresh session.
    """

    def __init__(self, engine):
        self._engine = engine
        self._runner, draft_runner = engine.parking.take()
        if self._runner is None:
            engine.backend.reserve(engine.session_bytes())
            self._runner = Runner(
                engine.ops, engine.model, engine.work, engine.n_ctx, engine.kv_type,
                defaults.CHECKPOINTS,
            )  # fmt: skip
        # reentrant: an interrupt may leave it held, by the thread that will ask for it again
        self._lock = threading.RLock()
        self._current = None
        self._drafter = self._own_drafter(draft_runner)
        if self._drafter is not None:  # what the first answer would otherwise wait for
            import cudflash.spec_rounds  # noqa: F401

            self._runner.set_taps(self._drafter.taps)

    def _own_drafter(self, draft_runner):
        """The engine's drafter for this conversation, None without one."""
        engine = self._engine
        if engine.draft is not None:
            return engine.draft.drafter(engine.config.vocab_size, draft_runner)
        made = engine.drafter
        if made is not None and (isinstance(made, type) or not hasattr(made, "propose")):
            made = made()
        return None if made is None else self._guard(made)

    def _guard(self, drafter):
        """A drafter made safe to use; its taps must be layers of the model."""
        from cudflash.spec.guard import GuardedDrafter

        guard = GuardedDrafter(drafter, self._engine.config.vocab_size)
        n_layers = self._engine.config.n_layers
        for layer in guard.taps:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < n_layers:
                raise UsageError(
                    f"the drafter '{guard.name}' taps layer {layer!r}, expected 0 to {n_layers - 1}"
                )
        return guard

    @property
    def tokens(self):
        """Ids whose rows the caches hold (the newest token of an answer is not among them)."""
        self._check_open()
        return tuple(self._runner.tokens[: self._runner.cache.length])

    def generate(
        self,
        prompt,
        *,
        max_tokens,
        sampling=None,
        speculative="auto",
        verify_length=None,
        accept="match",
        stop=(),
        logprobs=0,
        seed=None,
        drafter=None,
        ignore_eos=False,
        row_digests=False,
    ):
        """Start an answer.

        Everything is checked here; the work begins with the first event. An unfinished earlier
        answer of this session is closed.

        Parameters
        ----------
        prompt : str, sequence of int, or list of {role, content}
            The whole conversation so far.
        max_tokens : int or None
            Tokens of the answer at most, 0 included; None for as many as the context holds.
        sampling : SamplingConfig, optional
            llama.cpp's defaults if absent.
        speculative : {"auto", "on", "off"}
            "auto" drafts while it pays, as measured, and as much as pays; "on" always (and needs a
            drafter), "off" never. The tokens do not depend on it.
        verify_length : int, optional
            Tokens drafted per round at most: 3, 7 or 15, and less than the draft's block. 7 if
            absent, or the largest legal one below it; the next one with room for its k where the
            MTP block drafts. Needs a drafter.
        accept : {"match", "ratio"}
            "match": the tokens of plain decoding with the same seed. "ratio": their distribution,
            with more drafts accepted at temperatures above 0.
        stop : token ids and strings
            See ``cudflash.stop``. End-of-generation tokens of the model always stop.
        logprobs : int
            Most likely ids reported per token; 0 reports no log-probabilities.
        seed : int, optional
            Drawn from the system if absent; the receipt tells it.
        drafter : Drafter, optional
            Instead of the engine's for this answer; works without a draft.
        ignore_eos : bool
            The model's end-of-generation tokens do not stop; for measurements and proofs.
        row_digests : bool
            Fill ``Result.row_digests``.

        Returns
        -------
        Generation
            Iterator of events (``cudflash.events``); ``.result()`` runs it to the end.
            ``Result.stats``: prompt_ms, prompt_tokens_evaluated, prompt_tps, decode_ms,
            decode_tokens, decode_tps, rounds; times in ms, rates in tokens per second or None; and
            speculative: None without a drafter, else the counters of ``cudflash.spec.stats``.

        Raises
        ------
        UsageError
            For arguments that cannot be honoured, or while another thread runs this session.
        ContextLengthError
            If prompt and ``max_tokens`` do not fit the context.
        """
        engine, runner = self._engine, self._runner
        self._check_open()
        engine.check_files()
        guard = self._drafter if drafter is None else self._guard(drafter)
        verify_length = check_speculative(speculative, verify_length, guard)
        vocab_size = engine.config.vocab_size
        logprobs = check_logprobs(logprobs, vocab_size)
        ids = prompt_ids(
            prompt, engine.tokenizer, engine.chat_template, vocab_size, engine.n_ctx
        )
        max_tokens = check_length(len(ids), max_tokens, engine.n_ctx)
        ends = () if ignore_eos else engine.tokenizer.eog_ids
        rules = stop_rules(stop, ends, vocab_size)
        rules = with_control_tokens(rules, engine.tokenizer)
        chain = self._chain(sampling, seed, ids)
        rule = rule_in_effect(accept, chain)
        chooser = Chooser(
            engine.ops, engine.work, chain, logprobs, row_digests, engine.backend.one_copy
        )
        receipt = {
            "sampling": chain.config.to_dict(),
            "seed": chain.seed,
            "max_tokens": max_tokens,
            "stop": {"strings": list(rules.strings), "ids": sorted(rules.ids)},
        }
        if drafter is not None:
            receipt["draft"] = None  # the loaded one has no part in this answer
        facts = answer_facts(engine, len(ids), max_tokens)
        if guard is None or speculative == OFF:
            reason = "no draft is loaded" if guard is None else "it is switched off for this answer"
            rounds = PlainRounds(runner, chooser, engine.plain_step, speculative, reason)
            facts["reason"] = reason
        else:
            # here: an answer without a drafter starts without these modules
            from cudflash.spec.round import Limits
            from cudflash.spec_options import SpecOptions
            from cudflash.spec_rounds import SpecRounds

            limits = Limits(verify_length, engine.n_ctx, vocab_size, rules.ids)
            settings = engine.draft.settings if guard is self._drafter and engine.draft else ()
            options = SpecOptions(
                speculative, accept, limits, settings, engine.round_costs, engine.backend.one_copy
            )
            rounds = SpecRounds(runner, chooser, guard, options, engine.plain_step)
            own = engine.draft if guard is self._drafter else None
            facts["drafter"] = drafter_facts(guard, own, options, rule, engine)
        request = Request(ids, max_tokens, rules, chooser, receipt, facts)
        with self._lock:
            if self._runner is not runner:  # another thread has closed it meanwhile
                self._check_open()
            self._end_current()
            self._current = Generation(engine, runner, request, rounds, self._ended)
            return self._current

    def close(self):
        """End the answer in progress and give the caches back; the engine calls it when it closes.

        The engine keeps those of one closed session for the next one, with its recorded passes.
        """
        with self._lock:
            whole = self._current is None  # an answer that was cut off may hold on to the runner
            self._end_current()
            runner, drafter = self._runner, self._drafter
            self._runner = self._drafter = None
            if runner is None:
                return
            own = self._engine.draft is not None and drafter is not None
            self._engine.parking.park(runner, drafter.drafter.runner if own else None, whole)

    def _check_open(self):
        self._engine.check_open()
        if self._runner is None:
            raise UsageError("the session is closed; make a new one with engine.session()")

    def _end_current(self):
        """Close an unfinished answer; one that died of an interrupt is dropped."""
        current = self._current
        if current is None:
            return
        try:
            current.close()
        except UsageError:  # another thread runs it
            raise
        except Exception:  # noqa: BLE001 - its rows are dropped when the next answer begins
            pass
        self._current = None

    def check_draft_context(self):
        """Compare the draft's context with one made afresh from ``tokens``; costs a prompt pass.

        Call it between answers, or between two events of one.

        Returns
        -------
        cudflash.spec.diagnosis.Finding or None
            None when every row has the bits it should, or no draft is loaded.
        """
        if self._engine.draft is None:
            return None
        from cudflash.context_check import check_context

        if self._current is not None:
            self._current.bring_up()
        runner, tokens = self._drafter.drafter.runner, self.tokens
        if self._drafter.lags:  # times have put off drafting: it holds the rows before
            tokens = tokens[: runner.length]
        return check_context(self._engine, runner, tokens)

    def cancel(self):
        """End the answer in progress before its next round; safe from any thread."""
        current = self._current
        if current is not None:
            current.cancel()

    def _ended(self, generation):
        if self._current is generation:
            self._current = None

    def _chain(self, sampling, seed, ids):
        from cudflash.sampling.chain import SamplerChain
        from cudflash.sampling.config import SamplingConfig

        if sampling is None:
            sampling = SamplingConfig()
        if not isinstance(sampling, SamplingConfig):
            raise UsageError(
                f"sampling is a {type(sampling).__name__}, expected a SamplingConfig"
            )
        chain = SamplerChain(
            sampling,
            seed,
            n_vocab=self._engine.config.vocab_size,
            tokenizer=self._engine.tokenizer,
            n_ctx=self._engine.n_ctx,
        )
        chain.accept_prompt(ids)
        return chain


def with_control_tokens(rules, tokenizer):
    """Let a stop string that spells a control token stop at the token, which has no text."""
    ids = set(rules.ids)
    for string in rules.strings:
        if tokenizer.control_texts_in(string)[:1] == [string]:
            ids.update(tokenizer.encode(string, add_special=False, parse_special=True))
    return StopRules(rules.strings, frozenset(ids))


def check_length(n_prompt, max_tokens, n_ctx):
    """Return the tokens an answer may have.

    Raises
    ------
    ContextLengthError
        If the prompt alone, or with ``max_tokens``, exceeds the context.
    UsageError
        If ``max_tokens`` is neither a whole number of at least 0 nor None.
    """
    if max_tokens is not None:
        max_tokens = whole("max_tokens", max_tokens, 0)
    if n_prompt > n_ctx:
        raise ContextLengthError(
            f"the prompt has {n_prompt} tokens, the context holds {n_ctx}; shorten the prompt or "
            "load the model with a larger n_ctx"
        )
    if max_tokens is None:
        return n_ctx - n_prompt
    if n_prompt + max_tokens > n_ctx:
        raise ContextLengthError(
            f"prompt and answer need {n_prompt} + {max_tokens} = {n_prompt + max_tokens} tokens, "
            f"the context holds {n_ctx}; lower max_tokens, shorten the prompt or load the model "
            "with a larger n_ctx"
        )
    return max_tokens
