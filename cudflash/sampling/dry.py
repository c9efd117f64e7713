"""DRY: penalise tokens that would continue a repetition of the recent text.

Owns the recent tokens and the search for repeated endings. Invariant: a penalty depends only on the
last ``last_n`` accepted tokens and on the sequence breakers.

Source: llama.cpp ``src/llama-sampler.cpp`` (after p-e-w's DRY and pi6am's implementation in
Koboldcpp); behaviour reproduced, no code taken.
"""

from collections import deque

import numpy as np

from cudflash.sampling.floatmath import logf
from cudflash.sampling.samplers import Sampler

MAX_BREAKER_BYTES = 40
MAX_TAIL_TOKENS = 20
_FLOAT_MAX_LOG = np.float32(88.7228391)


class Dry(Sampler):
    """Subtract multiplier * base ** (length - allowed) from tokens that extend a repetition.

    Parameters
    ----------
    multiplier, base : float
    allowed_length : int
        Repetitions shorter than this are free.
    last_n : int
        How many accepted tokens are searched, at least 1. Cost per token is linear in it.
    breakers : dict of int to list of tuple of int
        Head token to the tails that together end a repetition; see `sequence_breakers`.
    """

    def __init__(self, multiplier, base, allowed_length, last_n, breakers):
        self.multiplier = float(np.float32(multiplier))
        self.base = float(np.float32(base))
        self.allowed_length = allowed_length
        self.last_n = last_n
        self.breakers = breakers
        self.single = {head for head, tails in breakers.items() if () in tails}
        self.max_exponent = 0
        if self.base > float(np.float32(1.000001)):
            self.max_exponent = int(_FLOAT_MAX_LOG / log_f32(self.base))
        self.reset()

    def reset(self):
        self._recent = deque(maxlen=self.last_n)

    def accept(self, token):
        self._recent.append(token)

    def state(self):
        return tuple(self._recent)

    def set_state(self, state):
        self._recent = deque(state, maxlen=self.last_n)

    def apply(self, candidates):
        if len(self._recent) <= self.allowed_length:
            return
        newest_first = list(self._recent)[::-1]
        limit = self._limit(newest_first)
        if limit < self.allowed_length:
            return
        longest = self._extensions(newest_first, limit)
        longest = {token: n for token, n in longest.items() if token not in self.single}
        if longest:
            logits = candidates.logits.copy()
            places = _places(candidates, longest)
            for place, token in places:
                exponent = longest[token] - self.allowed_length
                if 0 < self.max_exponent < exponent:
                    exponent = self.max_exponent
                logits[place] -= np.float32(self.multiplier * self.base**exponent)
            candidates.replace_logits(logits)
        candidates.sorted = False

    def _limit(self, newest_first):
        """Tokens since the newest complete sequence breaker: no repetition counts for more."""
        for i, token in enumerate(newest_first):
            match = -1
            for tail in self.breakers.get(token, ()):
                n = len(tail)
                if match < n <= i and tail == tuple(newest_first[i - n : i][::-1]):
                    match = n
            if match >= 0:
                return i - match
        return len(newest_first)

    def _extensions(self, newest_first, limit):
        """Token that once followed the present ending -> longest such ending, in tokens."""
        longest = {}
        for distance, length in enumerate(_repeats(newest_first, limit)):
            if distance and length >= self.allowed_length:
                token = newest_first[distance - 1]
                if length > longest.get(token, -1):
                    longest[token] = length
        return longest


def log_f32(x) -> np.float32:
    """``logf`` of one number."""
    return logf(np.array([x], np.float32))[0]


def _places(candidates, tokens):
    if candidates.fresh:
        return [(token, token) for token in tokens]
    return [(i, ident) for i, ident in enumerate(candidates.ids.tolist()) if ident in tokens]


def _repeats(sequence, limit):
    """For each k: how far sequence[k:] agrees with sequence, capped at ``limit`` (Z-algorithm).

    note: the cap is applied to the stored numbers, which later steps read again, as llama.cpp does.
    """
    n = len(sequence)
    z = [0] * n
    left = right = 0
    for k in range(1, n):
        if k > right:
            length = 0
            while length + k < n and sequence[length] == sequence[length + k]:
                length += 1
            z[k] = min(length, limit)
            if length > 0:
                left, right = k, k + length - 1
        elif z[k - left] < right - k + 1:
            z[k] = min(z[k - left], limit)
        else:
            end = right + 1
            while end < n and sequence[end] == sequence[end - k]:
                end += 1
            z[k] = min(end - k, limit)
            left, right = k, end - 1
    return z


def sequence_breakers(texts, tokenizer):
    """Tokens, and token sequences, in which a breaker text appears.

    A token that contains the text is a breaker alone (empty tail). A token whose end is a beginning
    of the text is a head; the tokens of the text's remainder are its tail.

    Parameters
    ----------
    texts : iterable of str
        Each is cut to 40 bytes.
    tokenizer : object
        Needs ``vocab_size``, ``decode_piece(id, special=True) -> bytes`` and
        ``encode(text, add_special=False, parse_special=False) -> list of int``.

    Returns
    -------
    dict of int to list of tuple of int
    """
    wanted = [text.encode()[:MAX_BREAKER_BYTES] for text in texts if text]
    breakers = {}
    if not wanted:
        return breakers
    firsts = {text[:1] for text in wanted}
    for ident in range(tokenizer.vocab_size):
        piece = tokenizer.decode_piece(ident, special=True)
        if not any(first in piece for first in firsts):
            continue
        tails = []
        for text in wanted:
            for tail in _tails(piece, text, tokenizer):
                if tail not in tails:
                    tails.append(tail)
        if tails:
            breakers[ident] = tails
    return breakers


def _tails(piece, text, tokenizer):
    if text in piece:
        yield ()
        return
    start = piece.find(text[:1])
    while start >= 0:
        overlap = len(piece) - start
        if piece[start:] == text[:overlap]:
            rest = text[overlap:].decode("utf-8", "replace")
            ids = tokenizer.encode(rest, add_special=False, parse_special=False)
            yield tuple(ids[:MAX_TAIL_TOKENS])
        start = piece.find(text[:1], start + 1)
