"""Token by token text: characters leave only when all their bytes have arrived.

Owns the incomplete tail of a UTF-8 stream. Must not know models or stop rules. Invariant: the
joined results of ``push`` and ``finish`` equal ``decode(ids).decode("utf-8", "replace")``.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudflash.loader.tokenizer import Tokenizer


class StreamDecoder:
    """Incremental text of a growing list of ids; made by ``Tokenizer.stream``.

    Bytes that cannot become a character (a lone continuation byte, a cut sequence followed by
    something else) are shown as U+FFFD as soon as that is certain, never before.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool, continuation: bool):
        self._tokenizer = tokenizer
        self._special = special
        self._strip = tokenizer.add_space_prefix and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        piece = self._tokenizer.decode_piece(token, self._special)
        if self._strip and piece:
            piece = piece.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(piece)

    @property
    def pending(self) -> bytes:
        """Bytes held back because their character is incomplete (at most three)."""
        return self._decoder.getstate()[0]

    def finish(self) -> str:
        """Flush: an incomplete tail becomes U+FFFD. The decoder can then be used afresh."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
