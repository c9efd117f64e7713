"""Byte-level BPE (``tokenizer.ggml.model`` = gpt2).

Owns the byte alphabet, the merge ranks and a cache of words. Must not know special tokens.
Everything is bytes: token texts and merges are compared as they lie in the file, so no vocabulary
is decoded, and a merge is looked up by its own line ``left + b" " + right``.

Why not the ``tokenizers`` library: its ``BPE`` model wants the vocabulary and the merges as Python
objects and copies them; measured numbers are in docs/TOKENIZER.md.

Source: GPT-2 ``bytes_to_unicode``; llama.cpp src/llama-vocab.cpp ``llm_tokenizer_bpe_session``.
"""

from __future__ import annotations

from collections.abc import Sequence

from cudflash.loader.merging import NEVER, merge_symbols
from cudflash.loader.pretokenizers import PreTokenizer
from cudflash.loader.vocabulary import Vocabulary, raw_strings

from cudflash.errors import UsageError

_CACHED_WORDS = 65536  # words kept; a longer text starts the cache afresh
_CACHED_LENGTH = 64  # longest word kept, bytes


def _byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
_SYMBOL = [char.encode() for char in BYTE_TO_CHAR]  # UTF-8 of the stand-in of each byte


def text_of(token: bytes) -> bytes:
    """Return the bytes that a normal token of a byte-level vocabulary stands for.

    A character outside the byte alphabet cannot come from an encoder; it is kept as its UTF-8.
    """
    chars = token.decode("utf-8", "replace")
    try:
        return bytes([CHAR_TO_BYTE[char] for char in chars])
    except KeyError:
        return b"".join(
            bytes([CHAR_TO_BYTE[c]]) if c in CHAR_TO_BYTE else c.encode() for c in chars
        )


class BPE:
    """Encoder of plain text by merge rank.

    Parameters
    ----------
    vocabulary : Vocabulary
    merges : sequence of str
        ``left right`` lines; the index is the rank. Read at the first word that needs them.
    pre : PreTokenizer
    """

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenizer):
        self._ids = vocabulary.ids
        self._vocabulary = vocabulary
        self._merges = merges
        self._ranks: dict[bytes, int] | None = None
        self._pre = pre
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, out: list[int]) -> None:
        """Append the ids of a text without special tokens.

        Raises
        ------
        UsageError
            If a byte has no token in this vocabulary.
        """
        cache = self._cache
        for word in self._pre.split(text):
            ids = cache.get(word)
            if ids is None:
                ids = self._encode_word(word.encode())
                if len(cache) >= _CACHED_WORDS:
                    cache.clear()
                if len(word) <= _CACHED_LENGTH:
                    cache[word] = ids
            out += ids

    def _encode_word(self, word: bytes) -> list[int]:
        symbols = [_SYMBOL[byte] for byte in word]
        if self._pre.ignore_merges:
            whole = self._ids.get(b"".join(symbols))
            if whole is not None:
                return [whole]
        if self._ranks is None:
            self._ranks = self._rank_table()
        rank_of = self._ranks.get
        symbols = merge_symbols(symbols, lambda a, b: rank_of(a + b" " + b, NEVER))
        ids = []
        for symbol in symbols:
            token = self._ids.get(symbol)
            ids += [token] if token is not None else self._byte_by_byte(symbol)
        return ids

    def _rank_table(self) -> dict[bytes, int]:
        lines = raw_strings(self._merges)
        ranks = dict(zip(lines, range(len(lines))))
        if len(ranks) < len(lines):  # a repeated line keeps its first rank
            ranks = {}
            for rank, line in enumerate(lines):
                ranks.setdefault(line, rank)
        return ranks

    def _byte_by_byte(self, symbol: bytes) -> list[int]:
        """Spell a symbol that is no token; a byte is never dropped."""
        ids = []
        for byte in text_of(symbol):
            token = self._ids.get(_SYMBOL[byte])
            if token is None:
                token = self._ids.get(b"<0x%02X>" % byte)
            if token is None:
                raise UsageError(
                    f"the text holds byte 0x{byte:02x}, for which the vocabulary of "
                    f"{self._vocabulary.path} has no token; remove the character from the text"
                )
            ids.append(token)
        return ids
