"""The monitor at work: a screen that follows events, or lines where there is no terminal.

Owns the terminal while a screen is up, and how often it is drawn. Must not know what is drawn, nor
where events come from. Invariants: whatever happens (an error, Ctrl-C, SIGTERM, Ctrl-Z) the terminal
gets its cursor and its normal screen back; drawing during an answer takes at most ``ALLOWANCE_S``
and ``SHARE`` of the time, but for one slow drawing, whatever terminal and machine are; a terminal
that goes away ends the view, not the answer.
"""

import io
import os
import signal
import threading
import time
from collections import deque

from cudflash.events import RoundFinished, TokenEvent
from cudflash.tui.screen import Screen, as_lines
from cudflash.tui.state import MonitorState
from cudflash.tui.style import ASCII, UNICODE

SHARE = 0.003  # of the time at most, for drawing
ALLOWANCE_S = 0.002  # of drawing before the share counts: a short answer is seen as well
SHORTEST_S = 0.1  # between two drawings
LINE_S = 1.0  # between two lines where there is no terminal
NOW = object()
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"
STOPS = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


def watch(events, console=None, **options):
    """Show events as they come, to their end.

    Parameters
    ----------
    events : iterable of events
        A ``Generation``, say.
    console : rich.console.Console, optional
        Standard error if absent.
    **options
        Of ``Monitor``.

    Returns
    -------
    MonitorState
        As it was at the end; ``.result`` is the answer's.
    """
    with Monitor(console, **options) as monitor:
        for event in events:
            monitor.see(event)
    return monitor.state


class Monitor:
    """Shows the events it is told; use it in a ``with`` block.

    Parameters
    ----------
    console : rich.console.Console, optional
        Standard error if absent.
    live : bool, optional
        Draw a screen. If absent: where the console is a terminal that can move its cursor.
    clock : callable
        Seconds; nothing else tells the time.
    say : callable, optional
        Takes a line where no screen is drawn; the console prints it if absent.
    state : MonitorState, optional
        To go on from, in a conversation.

    Attributes
    ----------
    state : MonitorState
    live : bool
    drawn : int
        Screens drawn.
    spent : float
        Seconds that drawing took, the first and the last screen left out.
    """

    def __init__(self, console=None, *, live=None, clock=time.monotonic, say=None, state=None):
        if console is None:
            from rich.console import Console

            console = Console(stderr=True)
        self.console, self._clock = console, clock
        self.live = console.is_terminal and not console.is_dumb_terminal if live is None else live
        self._say = say or self._print
        self.state = MonitorState() if state is None else state
        utf8 = (console.encoding or "").lower().replace("-", "").startswith("utf8")
        self._screen = Screen(UNICODE if utf8 else ASCII)
        self._before, self._size, self._pen = [], None, None
        self._up = False
        self._handlers = {}
        self._began = self._soonest = self.spent = 0.0
        self._costs = deque(maxlen=3)  # of the last drawings
        self.drawn = 0
        self._next_line, self._last_line = 0.0, ""
        self._said = self.state.notices[-1] if self.state.notices else None

    def __enter__(self):
        if self.live:
            self._take_signals()
            self._enter()
            self._draw()  # everything is loaded now, before there is anything to be late for
            self.spent, self._began = 0.0, self._clock()
            self._costs.clear()
        return self

    def __exit__(self, *exc):
        try:
            if self.live and exc[0] is None:
                spent = self.spent
                self._draw()
                self.spent = spent
        finally:
            try:
                self._leave()
            finally:
                self._give_signals()
                self._leave()  # an interrupt may have come in between
        if not self.live and exc[0] is None:
            self._line()

    def see(self, event, at=NOW):
        """Take an event and show it when it is time to.

        Parameters
        ----------
        event : one of ``cudflash.events``
        at : float or None, optional
            Seconds of the clock that the events were made by; None where it is not known, now if
            absent.
        """
        now = self._clock()
        self.state.see(event, now if at is NOW else at)
        if type(event) is TokenEvent and self.state.pending:
            return  # its round is told right after it
        if not self.live:
            self._lines(now, type(event) is RoundFinished)
        elif self._due(now):
            self._draw()

    def tell(self, sentence):
        """Show a sentence that is no event, at once."""
        self.state.tell(sentence)
        if self.live:
            self._draw()
        else:
            self._lines(self._clock(), False)

    def compose(self, width, height):
        """Return the rows of the screen at another size."""
        return self._screen.rows(self.state, width, height)

    def last_screen(self):
        """Return the screen as lines of text, for the scrollback."""
        width, height = self.console.size
        return self._rendered(as_lines(self.compose(width, max(1, min(height, 48) - 1))))

    def flash(self, sentence):
        """Show what goes on until the next event; nothing where no screen is drawn."""
        self.state.transient = sentence
        self.refresh()

    def refresh(self):
        """Draw if it is time to: the size may have changed while nothing came."""
        if self.live and self._due(self._clock()):
            self._draw()

    # -- the screen -------------------------------------------------------------------------------

    def _due(self, now):
        """Whether drawing is affordable."""
        cost = min(self._costs, default=0.0)
        return now >= self._soonest and (
            self.spent + cost <= ALLOWANCE_S + SHARE * (now - self._began)
        )

    def _draw(self):
        """Write what differs from what the terminal shows."""
        if not self._up:
            return
        started = self._clock()
        size = tuple(self.console.size)
        if size != self._size:
            self._before, self._size = [], size
            self._write("\x1b[2J")
        rows = self._screen.rows(self.state, *size)
        text = self._differences(rows)
        self._before = rows
        if text:
            self._write(text)
        ended = self._clock()
        self.drawn += 1
        self.spent += ended - started
        self._costs.append(ended - started)
        self._soonest = ended + SHORTEST_S

    def _differences(self, rows):
        """Escape sequences and text of the parts that have changed, each at its own place.

        A character that is wider or narrower than the terminal thinks then moves nothing but the
        rest of its part.
        """
        from rich.control import Control

        segments = []
        for y, row in enumerate(rows):
            old = self._before[y] if y < len(self._before) else None
            for i, part in enumerate(row):
                if old is None or i >= len(old) or old[i] != part:
                    segments += [Control.move_to(part[0], y).segment, *part[2]]
        return self._rendered(segments) if segments else ""

    def _rendered(self, segments):
        """Segments as text with the escape sequences of the console.

        By a console that writes nowhere: the one of the terminal ends the program when that is gone.
        """
        from rich.console import Console
        from rich.segment import Segments

        if self._pen is None:
            self._pen = Console(
                file=io.StringIO(), force_terminal=True, color_system=self.console.color_system,
                no_color=self.console.no_color, legacy_windows=False, width=1000, _environ={},
            )  # fmt: skip
        out = self._pen.file
        out.seek(0)
        out.truncate()
        self._pen.print(Segments(segments), end="", crop=False)
        return out.getvalue()

    def _write(self, text):
        file = self.console.file
        try:
            encoding = getattr(file, "encoding", None) or "utf-8"
            file.write(text.encode(encoding, "replace").decode(encoding))
            file.flush()
        except (OSError, ValueError):  # the terminal is gone; the answer is not
            self.live = self._up = False

    def _raw(self, text):
        """Write past all buffers: a signal may have come in the middle of a write."""
        try:
            handle = self.console.file.fileno()
        except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
            self._write(text)
            return
        try:
            os.write(handle, text.encode())
        except OSError:
            self.live = self._up = False

    def _enter(self):
        self._up, self._before, self._size = True, [], tuple(self.console.size)
        self._raw(ENTER)

    def _leave(self):
        if self._up:
            self._raw(LEAVE)
            self._up = False

    # -- signals that would leave the terminal as it is ---------------------------------------------

    def _take_signals(self):
        if threading.current_thread() is not threading.main_thread():
            return
        handlers = dict.fromkeys(STOPS, self._stopped)
        if hasattr(signal, "SIGTSTP"):
            handlers[signal.SIGTSTP] = self._suspended
        for number, handler in handlers.items():
            if signal.getsignal(number) == signal.SIG_DFL:
                self._handlers[number] = handler
                signal.signal(number, handler)

    def _give_signals(self):
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.SIG_DFL)
        self._handlers = {}

    def _stopped(self, number, frame):
        self._leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _suspended(self, number, frame):
        self._leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when the shell lets it go on
        signal.signal(number, self._suspended)
        if self.live:
            self._enter()

    # -- lines --------------------------------------------------------------------------------------

    def _lines(self, now, round_over):
        state = self.state
        new = len(state.notices) and state.notices[-1]
        if new and new is not self._said:
            self._said = new
            self._say(new)
        if round_over and now >= self._next_line:
            self._next_line = now + LINE_S
            self._line()

    def _line(self):
        text = summary(self.state)
        if text and text != self._last_line:
            self._last_line = text
            self._say(text)

    def _print(self, text):
        self._write(text + "\n")


def summary(state):
    """The state in one line."""
    stats, parts = state.stats, []
    if not state.n_tokens and not stats.rounds:
        return ""
    parts.append(f"{state.n_tokens} tokens")
    if stats.drafted:
        parts.append(f"{stats.accepted} of {stats.drafted} drafts accepted")
        parts.append(f"{stats.acceptance_length:.2f} tokens a drafted round")
    gate = state.gate
    if gate is not None:
        sample = f" ({gate.accepted} of {gate.proposals} in its sample)" if gate.proposals else ""
        parts.append(f"gate {gate.state}{sample}")
    if state.tokens_per_second:
        parts.append(f"{state.tokens_per_second:.1f} tokens/s")
    if stats.estimated_speedup:
        parts.append(f"about {stats.estimated_speedup:.2f} times plain decoding")
    return f"round {stats.rounds}: {', '.join(parts)}"
