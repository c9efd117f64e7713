"""The end of a text in lines of a width: wrapped once, as it grows.

Owns wrapping and what is done with characters that would move the cursor. Must not know terminals.
Invariant: a line that was complete never changes, so the text does not jump; no control character
gets through.
"""

import re
from collections import deque

from rich.cells import cell_len, chop_cells
from rich.segment import Segment

from cudflash.tui.style import style

_PIECES = re.compile(r"\n|[ \t]+|[^ \t\n]+")
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but newline and tab
    r"\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_TAB = "    "


def safe(text):
    """Text without characters that would move the cursor or turn the direction around.

    C0 controls become their pictures, other ones and lone surrogates a replacement character.
    """
    return _UNSAFE.sub(_picture, text.replace("\r\n", "\n"))


def flat(text):
    """``safe`` text on one line."""
    return " ".join(safe(text).split())


def _picture(match):
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


class TextTail:
    """The last lines of a growing text.

    Parameters
    ----------
    width : int
        Cells of a line.
    keep : int
        Lines kept at least.
    """

    def __init__(self, width, keep=200):
        self.width = max(1, width)
        self._lines = deque(maxlen=keep)
        self._open, self._used = [], 0  # words of the unfinished line and their cells
        self._word, self._word_cells = [], 0  # the last word, which may still grow

    def add(self, text, name):
        """Append text in a style of the theme."""
        look = style(name)
        for piece in _PIECES.findall(safe(text)):
            if piece == "\n":
                self._end_word()
                self._break()
            elif piece[0] in " \t":
                self._end_word()
                self._space(piece.replace("\t", _TAB), look)
            else:
                self._grow(piece, look)

    def lines(self, n):
        """Return the last ``n`` lines, fewer if there are not so many."""
        if n < 1:
            return []
        rest = [[*self._open, *self._word]]
        if self._used + self._word_cells > self.width and self._open:
            rest = [_trimmed(self._open), list(self._word)]
        found = [*list(self._lines)[-n:], *rest]
        if not found[-1]:
            found.pop()
        return found[-n:]

    def _grow(self, piece, look):
        room = self.width - self._word_cells
        cells = cell_len(piece)
        while cells > room:  # a word longer than a line is cut where the line ends
            if self._open:
                self._break()
            head = chop_cells(piece[:room], room)[0] if room > 0 else ""
            if head:
                self._word.append(Segment(head, look))
            elif not self._word:  # a character wider than the line
                head, piece = "", "?" + piece[1:]
                cells = cell_len(piece)
                continue
            piece = piece[len(head) :]
            cells -= cell_len(head)
            self._lines.append(self._word)
            self._word, self._word_cells, room = [], 0, self.width
        if piece:
            self._word.append(Segment(piece, look))
            self._word_cells += cells

    def _end_word(self):
        if not self._word:
            return
        if self._used + self._word_cells > self.width:
            self._break()
        self._open += self._word
        self._used += self._word_cells
        self._word, self._word_cells = [], 0

    def _space(self, piece, look):
        fits = piece[: self.width - self._used]
        if fits:
            self._open.append(Segment(fits, look))
            self._used += len(fits)

    def _break(self):
        self._lines.append(_trimmed(self._open))
        self._open, self._used = [], 0


def _trimmed(segments):
    """A finished line without the spaces at its end, which an underline would show."""
    while segments and not segments[-1].text.rstrip():
        segments = segments[:-1]
    return segments


def wrapped(text, width, n):
    """At most ``n`` lines of a sentence; the last one tells if there was more."""
    words, lines, current = safe(text[:4000]).replace("\n", " ").split(), [], ""
    for word in words:
        while cell_len(word) > width:
            head = chop_cells(word, max(1, width))[0] or word[:1]
            lines, current = [*lines, current] if current else lines, ""
            lines.append(head)
            word = word[len(head) :]
        longer = f"{current} {word}" if current else word
        if cell_len(longer) > width:
            lines.append(current)
            longer = word
        current = longer
    if current:
        lines.append(current)
    if len(lines) > n:
        cut = lines[n - 1] if n else ""
        while cut and cell_len(cut) > width - 2:
            cut = cut[:-1]
        lines = [*lines[: n - 1], cut + " …"] if n else []
    return lines
