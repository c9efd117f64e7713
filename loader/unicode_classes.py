"""Character classes for the pre-tokenizers, the same on every Python version.

Owns the mapping from a text to its collapsed form, in which every non-ASCII character is replaced
by one letter that stands for its class. The pre-tokenizer patterns then run on the collapsed text
with the standard ``re`` module, position for position. Must not know any pattern.

Source: the idea of collapsing classes is llama.cpp's (src/unicode.cpp, ``unicode_regex_split``).
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right

# Stand-ins in collapsed text; no ASCII character is ever replaced, so these cannot be confused.
LETTER, NUMBER, MARK, OTHER = "\u00d2", "\u00d1", "\u00d4", "\u00d0"
SPACE = "\u000b"  # VT: whitespace for every pattern, and neither CR nor LF

# White_Space of the Unicode Character Database beyond ASCII (llama.cpp unicode_set_whitespace).
_SPACES = (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
_STAND_IN = {"L": LETTER, "N": NUMBER, "M": MARK, "O": OTHER}


class _CollapseTable(dict):
    """``str.translate`` table that looks a code point up once and remembers it."""

    def __init__(self):
        super().__init__((code, code) for code in range(128))
        self.update((code, SPACE) for code in _SPACES)
        from cudflash.loader.unicode_table import RUNS

        self._starts, self._names, start = [], [], 0
        for name, length in re.findall("([LNMO])([0-9a-z]+)", RUNS):
            self._starts.append(start)
            self._names.append(_STAND_IN[name])
            start += int(length, 36)

    def __missing__(self, code: int) -> str:
        self[code] = stand_in = self._names[bisect_right(self._starts, code) - 1]
        return stand_in


@functools.cache
def _table() -> _CollapseTable:
    return _CollapseTable()


def collapse(text: str) -> str:
    """Replace every non-ASCII character by the stand-in of its class; the length is kept."""
    return text if text.isascii() else text.translate(_table())
