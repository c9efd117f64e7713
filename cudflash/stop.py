"""When an answer ends and which text it has: stop tokens, stop strings, the token limit.

A pure state machine fed token by token, also by rounds that bring several tokens at once; it knows
no model and no clock. Rules:

- Every pushed token belongs to the answer: ids, log-probabilities and usage count it, the one that
  ends the answer included. A stop token (end of generation, or asked for) has no text.
- A stop string is found wherever it lies, across tokens and across the bytes of a character. The
  answer ends with the token that completes it; the text is cut where the string begins. Of several
  strings the one that is complete first (in characters) counts, the longest of those that are
  complete at the same character: the text does not depend on how it was cut into tokens.
- Text that may be the beginning of a stop string is held back until that is decided.
- Joined deltas equal the final text, which contains no stop string.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cudflash.checks import index_of, shown
from cudflash.errors import UsageError

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


@dataclass(frozen=True)
class StopRules:
    """What ends an answer: made by ``stop_rules``."""

    strings: tuple[str, ...]
    ids: frozenset  # of int: asked for, and the model's end-of-generation tokens


def stop_rules(stop, eog_ids, vocab_size):
    """Check and sort what the user passed as ``stop``.

    Parameters
    ----------
    stop : str, int, or iterable of them
    eog_ids : iterable of int
    vocab_size : int

    Raises
    ------
    UsageError
        For an empty string, an id outside the vocabulary, or another type.
    """
    if isinstance(stop, str) or index_of(stop) is not None:
        items = (stop,)
    elif isinstance(stop, (bytes, bytearray)) or not isinstance(stop, Iterable):
        raise UsageError(f"stop is {shown(stop)}, expected token ids and strings, () for none")
    else:
        items = tuple(stop)
    strings, ids = [], set(eog_ids)
    for item in items:
        if isinstance(item, str):
            if not item:
                raise UsageError("a stop string is empty, expected at least one character")
            strings.append(item)
        elif index_of(item) is None:
            raise UsageError(f"stop holds {shown(item)}, expected token ids and strings")
        elif not 0 <= item < vocab_size:
            raise UsageError(f"stop token {item} is outside the vocabulary of {vocab_size}")
        else:
            ids.add(int(item))
    return StopRules(tuple(dict.fromkeys(strings)), frozenset(ids))


class StopStrings:
    """Search of a growing text; ``push`` returns what is certainly text.

    Attributes
    ----------
    found : str or None
        The stop string that ended the text.
    """

    def __init__(self, strings):
        self._strings = tuple(strings)
        self._held = ""
        self.found = None

    def push(self, text):
        """Take more text, return the part that can no longer belong to a stop string."""
        if self.found is not None or not text:
            return ""
        self._held += text
        cut = self._first_stop()
        if cut is not None:
            ready, self._held = self._held[:cut], ""
            return ready
        keep = self._possible_beginning()
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return ready

    def finish(self):
        """Return the held text: nothing can follow that would make it a stop string."""
        ready, self._held = self._held, ""
        return ready

    def _first_stop(self):
        """Where the text is cut, or None; sets ``found``."""
        best = None
        for string in self._strings:
            start = self._held.find(string)
            if start >= 0:
                # complete first; then longest, that is beginning first
                key = (start + len(string), start)
                if best is None or key < best[0]:
                    best = (key, string)
        if best is None:
            return None
        self.found = best[1]
        return best[0][1]

    def _possible_beginning(self):
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for string in self._strings:
            for length in range(min(len(string) - 1, len(self._held)), longest, -1):
                if self._held.endswith(string[:length]):
                    longest = length
                    break
        return longest


class AnswerText:
    """Text and end of one answer, token by token.

    Parameters
    ----------
    decoder : StreamDecoder
        ``push(id) -> str`` and ``finish() -> str``.
    rules : StopRules
    max_tokens : int
        At least 0.

    Attributes
    ----------
    tokens : list of int
        Every pushed token.
    text : str
        Joined deltas so far.
    finish_reason : {None, "stop", "length", "cancelled"}
    stopped_by : int, str or None
        Token or string that ended the answer.
    """

    def __init__(self, decoder, rules, max_tokens):
        self._decoder, self._rules = decoder, rules
        self._strings = StopStrings(rules.strings)
        self.max_tokens = max_tokens
        self.tokens = []
        self._parts = []
        self.finish_reason = LENGTH if max_tokens == 0 else None
        self.stopped_by = None

    @property
    def text(self):
        """Text released so far; complete once ``finish_reason`` is set."""
        return "".join(self._parts)

    @property
    def room(self):
        """Tokens that may still be pushed."""
        return 0 if self.finish_reason else self.max_tokens - len(self.tokens)

    def push(self, token):
        """Take the next token, return the text it releases.

        Must not be called after ``finish_reason`` is set.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"a token was pushed after the answer ended ({self.finish_reason})")
        self.tokens.append(token)
        if token in self._rules.ids:
            return self._end(STOP, token)
        delta = self._strings.push(self._decoder.push(token))
        if self._strings.found is not None:
            self.finish_reason, self.stopped_by = STOP, self._strings.found
        elif len(self.tokens) == self.max_tokens:
            return self._end(LENGTH, None, delta)
        self._parts.append(delta)
        return delta

    def cancel(self):
        """End the answer here; returns the text that was held back."""
        return "" if self.finish_reason else self._end(CANCELLED, None)

    def _end(self, reason, stopped_by, delta=""):
        self.finish_reason, self.stopped_by = reason, stopped_by
        # the tail of a cut character may itself complete a stop string (U+FFFD in one)
        delta += self._strings.push(self._decoder.finish())
        if self._strings.found is not None:
            self.stopped_by = self.stopped_by if reason == STOP else self._strings.found
            self.finish_reason = STOP
        else:
            delta += self._strings.finish()
        self._parts.append(delta)
        return delta
