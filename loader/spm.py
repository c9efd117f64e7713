"""SentencePiece-style BPE by score (``tokenizer.ggml.model`` = llama).

Owns the whitespace marker, merging by score and the fall-back to byte tokens. Must not know
special tokens or pre-tokenizers.

A text is one long word here: merges may cross spaces in principle. They cannot cross into a new
word unless some token has the marker after another character, and such tokens are rare (gemma-3
has one, ``>▁</``). So the text is cut before each marker whose predecessor never stands there
inside a token; the words are merged one by one and cached, with the ids of the whole text.

Source: llama.cpp src/llama-vocab.cpp ``llm_tokenizer_spm_session``. Why our own code: the
sentencepiece library reads its own model file, and a GGUF file does not contain one.
"""

from __future__ import annotations

import re

from cudflash.loader.merging import NEVER, merge_symbols
from cudflash.loader.vocabulary import Vocabulary

from cudflash.errors import UsageError

MARKER = "\u2581"
_MARKER = MARKER.encode()
_CACHED_WORDS = 65536
_CACHED_LENGTH = 64


def text_of(token: bytes) -> bytes:
    """Return the bytes that a normal token stands for."""
    return token.replace(_MARKER, b" ")


class SPM:
    """Encoder of plain text by token score."""

    def __init__(self, vocabulary: Vocabulary):
        self._ids = vocabulary.ids
        self._vocabulary = vocabulary
        self._scores: list[float] = vocabulary.scores.tolist()
        self._cut: re.Pattern | None = None
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, out: list[int]) -> None:
        """Append the ids of a text without special tokens; spaces become the marker.

        Raises
        ------
        UsageError
            If a byte has no token in this vocabulary.
        """
        if self._cut is None:
            self._cut = self._word_ends()
        text = text.replace(" ", MARKER)
        cache = self._cache
        for word in self._cut.split(text):
            ids = cache.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(cache) >= _CACHED_WORDS:
                    cache.clear()
                if len(word) <= _CACHED_LENGTH:
                    cache[word] = ids
            out += ids

    def _word_ends(self) -> re.Pattern:
        """Return the places between words: before a marker that no merge can reach from the left.

        Notes
        -----
        The vocabulary is searched as one string: a loop over its tokens is ten times slower. 0xff
        is in no UTF-8 text, so it separates tokens; leading markers are taken away first.
        """
        joined = b"\xff" + b"\xff".join(self._vocabulary.tokens)
        joined = joined.replace(b"\xff" + _MARKER, b"\xff")
        before, at = {MARKER}, joined.find(_MARKER)
        while at >= 0:
            token = joined[joined.rfind(b"\xff", 0, at) + 1 : at]
            if token:
                before.add(token.decode("utf-8", "replace")[-1])
            at = joined.find(_MARKER, at + len(_MARKER))
        kept = "".join(map(re.escape, sorted(before)))
        return re.compile(f"(?<=[^{kept}])(?={MARKER})")

    def _encode_word(self, word: str) -> list[int]:
        ids, scores = self._ids.get, self._scores

        def cost(left: bytes, right: bytes) -> float:
            token = ids(left + right)
            return NEVER if token is None else -scores[token]

        out = []
        for symbol in merge_symbols([char.encode() for char in word], cost):
            token = ids(symbol)
            out += [token] if token is not None else self._byte_by_byte(symbol)
        return out

    def _byte_by_byte(self, symbol: bytes) -> list[int]:
        """Spell a character that is no token."""
        out = []
        for byte in symbol:
            token = self._ids.get(b"<0x%02X>" % byte)
            if token is None:
                token = self._ids.get(bytes([byte]))
            if token is None:
                raise UsageError(
                    f"the text holds byte 0x{byte:02x}, for which the vocabulary of "
                    f"{self._vocabulary.path} has no token; remove the character from the text"
                )
            out.append(token)
        return out
