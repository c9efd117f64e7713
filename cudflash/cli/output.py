"""What goes where: the answer to stdout, everything else to stderr.

Owns both streams, colour and the transient progress line. Must not know models or commands.
Invariant: stdout receives only bytes that a command hands to ``answer`` or ``json``; nothing is
coloured and no line is rewritten unless the stream is a terminal.
"""

import errno
import math
import os
import sys
import time
import unicodedata
from contextlib import contextmanager

from cudflash.cli.interrupts import held_interrupts

CLEAR_LINE = "\r\x1b[K"
_UNSEEN = ("Cc", "Zl", "Zp")  # control characters, line and paragraph separators
REWRITE_S = 0.1  # shortest time between two rewrites of the transient line


class StreamClosed(Exception):
    """The reader of stdout or stderr went away (``| head -1``); the program ends quietly."""


class Output:
    """The two streams of one run.

    Attributes
    ----------
    quiet, verbose, no_color : bool
        Set by the options of the same names, which may stand before or after the command.
    as_json : bool
        Set by ``--json``: an error is an object, too.
    """

    def __init__(self):
        self.quiet = self.verbose = self.no_color = False
        self.as_json = False
        self._json_written = False  # one object has been begun: nothing may follow it
        self._unfinished_line = False  # the answer's last byte was no newline
        self._progress = False  # a transient line is on the terminal
        self._shown = 0.0  # when it was written, seconds
        self._held = None  # (stream, bytes) that wait while a screen is up
        self._tell = None  # shows a line on that screen

    # -- stderr ---------------------------------------------------------------------------------

    def note(self, text):
        """Tell the user something that is no error; nothing with ``-q``."""
        if not self.quiet:
            self.say(self._styled(text, "2"))

    def detail(self, text):
        """Tell what only ``-v`` asks for."""
        if self.verbose:
            self.say(self._styled(text, "2"))

    def error(self, text):
        """Tell why the program ends, or why it did not do what was asked."""
        self.say(self._styled("error:", "1;31") + " " + visible(text))

    def prompt(self, text):
        """Ask for input; the line stays open."""
        self.clear_progress()
        self.end_line()
        self._write_err(text)

    def progress(self, text):
        """Rewrite the transient line of a terminal; elsewhere and with ``-q`` nothing.

        A line that would be gone before anybody could read it is left out, and one that would
        wipe out the beginning of an answer's line.
        """
        if self._held is not None:
            if not self.quiet:
                self._tell(text)
            return
        now = time.monotonic()
        soon = self._progress and now - self._shown < REWRITE_S
        if self.quiet or self.mid_line or soon or not self.rewrites:
            return
        self._write_err(CLEAR_LINE + text)
        self._progress, self._shown = True, now

    def clear_progress(self):
        """Take the transient line away."""
        if self._progress:
            self._progress = False
            self._write_err(CLEAR_LINE)

    @property
    def rewrites(self):
        """Whether lines of stderr may be rewritten."""
        return is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"

    def _styled(self, text, code):
        return f"\x1b[{code}m{text}\x1b[0m" if self.colors(sys.stderr) else text

    def say(self, text):
        """Write a line to stderr, whatever the options say."""
        self.clear_progress()
        self.end_line()
        self._write_err(text + "\n")

    @contextmanager
    def screen(self, tell):
        """Leave the terminal to a full screen within the block; what is written waits for its end.

        What goes elsewhere (stdout into a file) is written at once as always.

        Parameters
        ----------
        tell : callable
            Shows on the screen what would be the transient line.
        """
        self.clear_progress()
        self.end_line()
        self._held, self._tell = [], tell
        try:
            yield
        finally:
            held, self._held, self._tell = self._held, None, None
            for stream, data in held:
                _write(stream, data)

    def _write_err(self, text):
        self._put(sys.stderr, text.encode("utf-8", "backslashreplace"))

    def _put(self, stream, data):
        if stream is None:
            return
        if self._held is not None and is_terminal(stream):
            self._held.append((stream, data))
        else:
            _write(stream, data)

    # -- stdout ---------------------------------------------------------------------------------

    def answer(self, text):
        """Write a part of the answer, at once and exactly, as UTF-8.

        Raises
        ------
        StreamClosed
            If nobody reads any more.
        """
        self.raw(text.encode("utf-8", "surrogateescape"))

    def raw(self, data):
        """Write bytes of the answer."""
        if data:
            self.clear_progress()
            self._put(sys.stdout, data)
            self._unfinished_line = not data.endswith(b"\n")

    def line(self, text=""):
        """Write a line of the answer."""
        self.answer(text + "\n")

    def json(self, value):
        """Write one object on one line: ASCII only, so no reader can take it for two.

        A Ctrl-C waits until the object is out: a reader that is slow gets it whole.
        """
        import json

        text = json.dumps(plain(value), allow_nan=False)
        with held_interrupts():
            self._json_written = True
            self.line(text)

    def json_error(self, kind, message, exit_code):
        """With ``--json`` write an error as an object."""
        if self.as_json:
            self.json({"error": {"type": kind, "message": message, "exit_code": exit_code}})

    def json_failure(self, kind, message, exit_code):
        """With ``--json`` write the error that ends the program, unless a result was written."""
        if not self._json_written:
            self.json_error(kind, message, exit_code)

    @property
    def mid_line(self):
        """Whether the answer's last line is not finished."""
        return self._unfinished_line

    def end_line(self):
        """Begin a new line on stderr after an answer that did not end with one.

        A terminal, or a log that holds both streams, then shows them apart; stdout stays exact.
        """
        if self._unfinished_line:
            self._unfinished_line = False
            self._write_err("\n")

    # -- appearance -----------------------------------------------------------------------------

    def colors(self, stream):
        """Whether a stream may carry colour: a terminal, and nobody said no."""
        wanted = not self.no_color and not os.environ.get("NO_COLOR")
        return wanted and is_terminal(stream) and os.environ.get("TERM") != "dumb"

    def table(self, rows, header=None, right=()):
        """Write a table: by Rich on a terminal, else aligned text without decoration.

        Parameters
        ----------
        rows : list of sequences of str
        header : sequence of str, optional
        right : collection of int
            Columns to align on the right.
        """
        if is_terminal(sys.stdout):
            self._rich_table(rows, header, right)
            return
        rows = [list(map(str, row)) for row in ([header] if header else []) + list(rows)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            cells = [
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            ]
            self.line("  ".join(cells).rstrip())

    def _rich_table(self, rows, header, right):
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD if header else None, show_header=bool(header))
        for i, name in enumerate(header or [""] * len(rows[0] if rows else ())):
            table.add_column(
                name,
                justify="right" if i in right else "left",
                style="dim" if i == 0 and not header else "",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))  # Text: no markup in file contents
        Console(no_color=not self.colors(sys.stdout), highlight=False).print(table)


def is_terminal(stream):
    """Whether a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def plain(value):
    """Copy a nest of values with what JSON lacks replaced: NaN and infinities become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def human_bytes(n_bytes):
    """Bytes for people: ``93.8 MiB``."""
    size, unit = n_bytes, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" and size < 100 else f"{size:.0f} {unit}"


def visible(text):
    r"""Text on one line, control characters as escapes: file names may hold ``\n`` and ESC."""
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNSEEN else c
        for c in text
    )


def silence(stream):
    """Send what Python still holds for a broken stream to nowhere, so that its exit is quiet."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):
        pass


def _write(stream, data):
    try:
        buffer = getattr(stream, "buffer", None)
        if buffer is None:
            stream.write(data.decode("utf-8", "replace"))
        else:
            stream.flush()
            _write_all(buffer, data)
        stream.flush()
    except BrokenPipeError:
        raise StreamClosed from None


def _write_all(buffer, data):
    """Write every byte: without a buffer (PYTHONUNBUFFERED) a signal cuts a write short."""
    rest = memoryview(data)
    while rest:
        n_written = buffer.write(rest)
        if n_written is None:  # a stream that does not wait, and has no room
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        rest = rest[n_written:]
