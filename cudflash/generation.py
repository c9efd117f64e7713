"""One answer in progress: prompt, rounds, events, and a clean end whatever happens.

Owns the life of an answer. Must not know how rounds are made, nor how events are shown. Invariant:
whenever control is outside (an event was yielded, the iterator was closed, an exception went
through), the session's caches hold committed rows only.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

from cudflash.errors import UsageError
from cudflash.events import Finished, PrefixReused, PromptProgress, Started, TokenEvent
from cudflash.result import Result, Usage
from cudflash.stop import CANCELLED, AnswerText


@dataclass(frozen=True)
class Request:
    """A checked request; nothing in it can fail any more."""

    prompt: list  # token ids, at least one
    max_tokens: int
    rules: object  # StopRules
    chooser: object  # Chooser
    receipt: dict  # what the receipt says about the request
    facts: dict | None = None  # for the first event; None where nobody asks


class Generation:
    """Iterator over the events of one answer; made by ``Session.generate``.

    Iterate to the end, or ``close()`` it at any point, or call ``cancel()`` from anywhere;
    ``result()`` then returns what was produced. A ``with`` block closes it at the end.
    """

    def __init__(self, engine, runner, request, rounds, on_end, clock=time.perf_counter):
        self._engine, self._runner, self._request = engine, runner, request
        self._rounds, self._on_end, self._clock = rounds, on_end, clock
        # the answer continues the prompt: its first token keeps a leading space
        decoder = engine.tokenizer.stream(continuation=True)
        self._answer = AnswerText(decoder, request.rules, request.max_tokens)
        self._logprobs, self._row_digests = [], []
        self._cached = self._evaluated = self._same = 0
        self._make_receipt = engine.receipt_maker(request.receipt)  # threads as they are now
        self._times = {}
        self._n_rounds = 0
        self._result = None
        self._error = None
        self._cancelled = threading.Event()
        self._events = self._run()

    def __iter__(self):
        return self

    def __next__(self):
        return self._advance(self._events.__next__)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def cancel(self):
        """Ask for the end before the next round or prompt chunk; safe from any thread."""
        self._cancelled.set()

    def close(self):
        """End now; what was produced so far is the result."""
        self._advance(self._events.close)
        if self._result is None and self._error is None:  # not started, or interrupted at its end
            self._rounds.abandon()
            self._finish()

    def rehearse(self):
        """Make the coming round twice from one snapshot and drop it; the answer stays as it was.

        For proofs; between two events of a drafted answer.

        Returns
        -------
        cudflash.rehearsal.Rehearsal or None
            None where no round with drafts is to come.
        """
        with self._engine.lock:
            return None if self.ended else self._rounds.rehearse(self._answer.room)

    def bring_up(self):
        """Have the drafter's context hold every committed row, between two events."""
        with self._engine.lock:
            if not self.ended:  # else another answer may be at work on its memory
                self._rounds.bring_up()

    def result(self):
        """Run to the end if that has not happened, return the outcome.

        Raises
        ------
        CudflashError
            The error that ended the answer, if one did.
        """
        if self._result is None and self._error is None:
            self._rounds.watched = False
            self._advance(partial(deque, self._events, 0))
            if self._result is None and self._error is None:
                self.close()
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def ended(self):
        """Whether there is a result, or an error."""
        return self._result is not None or self._error is not None

    @property
    def running(self):
        """Whether it is being advanced right now, by another thread or further up the stack."""
        return self._events.gi_running

    def _advance(self, move):
        """Move the events; they themselves know whether they run, so no interrupt leaves a mark."""
        try:
            if not self.running:
                return move()
        except ValueError as err:
            # begun by another thread since: the only ValueError that does not come from inside
            if err.__traceback__.tb_next is not None or not self.running:
                raise
        raise UsageError(
            "this answer is being generated in another thread or further up the stack; "
            "use one session per thread, or cancel() it"
        )

    # -- the answer -----------------------------------------------------------------------------

    def _run(self):
        try:
            if self._request.facts is not None:
                yield Started(self._request.facts)
            yield from self._prompt()
            if not self._answer.finish_reason:
                yield from self._decode()
            finished = self._finish()
            yield from self._rounds.events()
            yield finished
        except (GeneratorExit, KeyboardInterrupt):
            # a finished answer that is dropped later must not touch the rows of the next one
            if self._result is None:
                self._rounds.abandon()
                self._finish()
            raise
        except BaseException as err:
            if self._result is None:
                self._rounds.abandon()
            self._error = err
            self._on_end(self)
            raise

    def _prompt(self):
        """Rewind to the common prefix and evaluate the rest, chunk by chunk."""
        started = self._clock()
        prompt = self._request.prompt
        with self._engine.lock:
            reused = self._reuse(prompt)
        self._cached = reused.cached_tokens
        if reused.reason:
            yield reused
        done = self._cached
        stops = self._runner.prompt_stops(done, len(prompt), self._same)
        for n_rows in self._chunks(done, len(prompt), stops):
            if self._cancelled.is_set():
                self._answer.cancel()
                break
            with self._engine.lock:
                remaining = len(prompt) - done - n_rows
                last = not remaining
                try:
                    self._engine.begin_pass(self)
                    self._rounds.prompt_chunk(prompt[done : done + n_rows], last, remaining)
                    done += n_rows
                    self._evaluated += n_rows
                    if done in stops:
                        self._rounds.checkpoint()
                    choices = self._rounds.choose_first() if last and self._answer.room else []
                finally:
                    self._engine.end_pass(self)
            if last:
                self._times["prompt_ms"] = 1e3 * (self._clock() - started)
            yield PromptProgress(done, len(prompt), self._rounds.context())
            if choices:
                yield from self._emit(choices)
        self._times.setdefault("prompt_ms", 1e3 * (self._clock() - started))

    def _chunks(self, start, end, stops):
        """Rows of each pass over the prompt; a pass ends at every stop."""
        for stop in [*stops, end]:
            while start < stop:
                n_rows = min(stop - start, self._runner.max_rows)
                yield n_rows
                start += n_rows

    def _reuse(self, prompt):
        """Keep the rows of the longest common prefix; the last prompt token is always evaluated."""
        self._runner.rollback()  # whatever an interrupt in an earlier answer has left
        held = self._runner.tokens
        n_held = len(held)
        same = 0
        for same, (a, b) in enumerate(zip(held, prompt)):
            if a != b:
                break
        else:
            same = min(n_held, len(prompt))
        self._same = same
        wanted = min(same, len(prompt) - 1)
        difference = same if same < min(n_held, len(prompt)) else None
        parted = self._difference(held, prompt, difference)  # first: a rewind drops what was held
        rewound = self._rounds.rewind(wanted)
        reason = _reason(n_held, wanted, rewound, parted)
        return PrefixReused(rewound.rows, len(prompt), difference, reason)

    def _difference(self, held, prompt, at):
        """Where the prompt leaves the session's tokens, in words; "" where it does not."""
        if at is None:
            return ""
        old, new = (
            self._engine.tokenizer.decode([ids[at]]).decode("utf-8", "replace")
            for ids in (held, prompt)
        )
        return f"the prompt differs from the session's tokens at index {at}: {new!r}, not {old!r}"

    def _decode(self):
        started = self._clock()
        first = len(self._answer.tokens)
        try:
            while not self._answer.finish_reason:
                if self._cancelled.is_set():
                    return
                with self._engine.lock:
                    try:
                        self._engine.begin_pass(self)
                        choices = self._rounds.next(self._answer.room)
                        events = list(self._emit(choices))
                        self._rounds.settle(len(events))
                        events += self._rounds.events()
                    except BaseException:
                        self._rounds.abandon()
                        raise
                    finally:
                        self._engine.end_pass(self)
                self._n_rounds += 1
                self._times["decode_ms"] = 1e3 * (self._clock() - started)
                self._times["decoded"] = len(self._answer.tokens) - first
                yield from events
        finally:
            self._times.setdefault("decode_ms", 0.0)

    def _emit(self, choices):
        for choice in choices:
            index = len(self._answer.tokens)
            text = self._answer.push(choice.token)
            if choice.logprob is not None:
                self._logprobs.append(choice.logprob)
            if choice.row_digest is not None:
                self._row_digests.append(choice.row_digest)
            yield TokenEvent(index, choice.token, text, choice.logprob)
            if self._answer.finish_reason:
                return

    def _finish(self):
        """Make the result; an answer that has not ended by itself was cancelled."""
        text = self._answer.cancel()
        with self._engine.lock:
            self._rounds.finish(self._answer.finish_reason == CANCELLED)
        answer, request = self._answer, self._request
        part = self._rounds.receipt()
        self._result = Result(
            text=answer.text,
            tokens=tuple(answer.tokens),
            logprobs=tuple(self._logprobs),
            usage=Usage(len(request.prompt), len(answer.tokens), self._cached),
            finish_reason=answer.finish_reason,
            stopped_by=answer.stopped_by,
            stats=self._stats(),
            make_receipt=self._make_receipt.of(part),
            row_digests=tuple(self._row_digests),
            make_part=part,
        )
        self._on_end(self)
        return Finished(self._result, text)

    def _stats(self):
        prompt_ms = self._times.get("prompt_ms", 0.0)
        decode_ms = self._times.get("decode_ms", 0.0)
        evaluated = self._evaluated  # less than the rest of the prompt when it was cancelled
        decoded = self._times.get("decoded", 0)
        return {
            "prompt_ms": prompt_ms,
            "prompt_tokens_evaluated": evaluated,
            "prompt_tps": 1e3 * evaluated / prompt_ms if prompt_ms else None,
            "decode_ms": decode_ms,
            "decode_tokens": decoded,  # all but the first, which the prompt pass gives
            "decode_tps": 1e3 * decoded / decode_ms if decode_ms else None,
            "rounds": self._n_rounds,
            "speculative": self._rounds.stats(),
        }


def _reason(n_held, wanted, rewound, parted):
    """Why the session's rows were reused no further; "" for an empty session.

    ``parted`` says where the prompt differs, "" where it does not.
    """
    if n_held == 0:
        return ""
    kept = rewound.rows
    if kept < wanted:
        start = f"from token {kept}" if kept else "from its start"
        return (
            f"the first {wanted} tokens are the same, but {rewound.lost} no longer holds the rows "
            f"before them, so the prompt is evaluated {start}" + (f"; {parted}" if parted else "")
        )
    if parted:
        return parted
    if kept == n_held:
        return "the prompt continues the session's tokens"
    return "the prompt is a beginning of the session's tokens"
