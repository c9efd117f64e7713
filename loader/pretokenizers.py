"""Pre-tokenizers: how a text is cut into words before byte-pair merging.

Owns the patterns and the names under which GGUF files ask for them. Must not know vocabularies.
Invariant: the words of a text, joined, are the text.

A pattern list is applied in order, each pattern cutting the pieces that the previous one left;
stretches that no alternative matches become pieces too. Patterns see collapsed text
(``unicode_classes``), so the classes below are plain ``re`` character sets. A look-ahead sees the
end of its piece, not the next piece: ``\\s+(?!\\S)`` takes a whole run at the end of a piece.

Source: llama.cpp src/llama-vocab.cpp (``llm_tokenizer_bpe`` and the names in ``load``), commit
0c1e57098bba. The gpt-4o pattern follows llama.cpp, which counts every non-ASCII letter as both
upper and lower case and ends a word at a combining mark; the original separates them by case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cudflash.loader.unicode_classes import LETTER, MARK, NUMBER, collapse

from cudflash.errors import UnsupportedError

_L = "A-Za-z" + LETTER  # \p{L}
_N = "0-9" + NUMBER  # \p{N}
_M = MARK  # \p{M}
_S = r" \t\n\x0b\x0c\r"  # \s; non-ASCII whitespace collapses to \x0b

_CONTRACTIONS = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = rf"[{_S}]*[\r\n]+|[{_S}]+(?![^{_S}])|[{_S}]+"
_OPENER = rf"[^\r\n{_L}{_N}]?"  # one leading character that is no newline, letter or number
_GPT2 = (
    rf"'(?:[stmd]|re|ve|ll)| ?[{_L}]+| ?[{_N}]+| ?[^{_S}{_L}{_N}]+"
    rf"|[{_S}]+(?![^{_S}])|[{_S}]+"
)


def _gpt3_words(numbers: str) -> str:
    """Pattern of llama-bpe and qwen2, which differ in the length of a number."""
    return (
        rf"{_CONTRACTIONS}|{_OPENER}[{_L}]+|[{_N}]{numbers}| ?[^{_S}{_L}{_N}]+[\r\n]*|{_SPACES}"
    )


_QWEN35 = (
    rf"{_CONTRACTIONS}|{_OPENER}[{_L}{_M}]+|[{_N}]| ?[^{_S}{_L}{_M}{_N}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = "A-Z" + LETTER, "a-z" + LETTER
_GPT4O = (
    rf"{_OPENER}[{_UPPER}]*[{_LOWER}]+(?:{_CONTRACTIONS})?"
    rf"|{_OPENER}[{_UPPER}]+[{_LOWER}]*(?:{_CONTRACTIONS})?"
    rf"|[{_N}]{{1,3}}| ?[^{_S}{_L}{_N}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text into words, with what llama.cpp ties to its name."""

    patterns: tuple[str, ...]  # applied in order, on collapsed text
    ignore_merges: bool = False  # a word that is a token is emitted without merging
    add_bos: bool = False  # default when the file has no add_bos_token
    clean_spaces: bool = False  # detokenize() drops spaces before punctuation

    def split(self, text: str) -> list[str]:
        """Cut a text into words.

        Parameters
        ----------
        text : str

        Returns
        -------
        list of str
            Non-empty words; joined they are ``text``.
        """
        collapsed = collapse(text)
        pieces = [(0, len(text))]
        for pattern in self.patterns:
            find = re.compile(pattern).finditer  # compiled once, kept by re
            cut = []
            for begin, end in pieces:
                if len(self.patterns) == 1:
                    matches = find(collapsed)
                else:  # a copy, so that look-ahead ends with the piece
                    matches = find(collapsed[begin:end])
                at = begin
                for match in matches:
                    low, high = match.start() + begin, match.end() + begin
                    if low > at:
                        cut.append((at, low))
                    cut.append((low, high))
                    at = high
                if at < end:
                    cut.append((at, end))
            pieces = cut
        return [text[begin:end] for begin, end in pieces if begin < end]


_LLAMA3 = PreTokenizer((_gpt3_words("{1,3}"),), ignore_merges=True, add_bos=True, clean_spaces=True)
_QWEN2 = PreTokenizer((_gpt3_words("{1}"),))
_DIGITS_THEN_GPT2 = PreTokenizer((f"[{_N}]", _GPT2))
_DIGITS_THEN_GPT2_CLEAN = PreTokenizer((f"[{_N}]", _GPT2), clean_spaces=True)
_PLAIN_GPT2 = PreTokenizer((_GPT2,), clean_spaces=True)
_O200K = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    "qwen35": PreTokenizer((_QWEN35,)),
    **dict.fromkeys(("smollm", "command-r"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("starcoder", "refact", "codeshell", "exaone"), _DIGITS_THEN_GPT2_CLEAN),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "exaone4"), _PLAIN_GPT2),
    # muse-glimmer files carry "llama4", the name llama.cpp's converter gives its tokenizer
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "muse-glimmer"), _O200K),
}


def pre_tokenizer(name: str | None, path: str) -> PreTokenizer:
    """Return the pre-tokenizer a file asks for.

    Parameters
    ----------
    name : str or None
        Value of ``tokenizer.ggml.pre``.
    path : str
        The file, for the message.

    Raises
    ------
    UnsupportedError
        If the name is missing or unknown: a wrong split changes ids without any visible error.
    """
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = "is missing" if name is None else f"is {name!r}"
    raise UnsupportedError(
        f"{path}: tokenizer.ggml.pre {found}, expected one of {', '.join(sorted(PRE_TOKENIZERS))}; "
        "convert the model again with a converter that knows its tokenizer"
    )
