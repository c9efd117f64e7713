"""The monitor at work: on a recorded console with a manual clock, and where there is no terminal."""

import io
import os
import re
import signal

import pytest
from rich.console import Console

from cudflash.events import RoundFinished, TokenEvent
from cudflash.tui import Monitor, watch
from cudflash.tui import monitor as module
from cudflash.tui.monitor import ALLOWANCE_S, ENTER, LEAVE, SHARE, SHORTEST_S
from tests.helpers.recorded_runs import answer, events_of, recording
from tests.tui import screens
from tests.tui.test_state import ROUNDS


class Clock:
    """Seconds that pass only when told to; drawing takes ``cost`` of them."""

    def __init__(self, cost=0.0):
        self.now, self.cost = 100.0, cost

    def __call__(self):
        self.now += self.cost / 2  # asked twice a drawing
        return self.now


class Terminal(io.StringIO):
    """What a terminal of a size shows: understands what the monitor writes."""

    MOVE = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[[0-9;?]*[a-zA-Z]")

    def __init__(self, width=80, height=24):
        super().__init__()
        self.width, self.height = width, height

    @property
    def encoding(self):
        return "utf-8"

    def screen(self, text=None):
        cells = [[" "] * self.width for _ in range(self.height)]
        x = y = at = 0
        text = self.getvalue() if text is None else text
        while at < len(text):
            found = self.MOVE.match(text, at)
            if found:
                if found[1]:
                    y, x = int(found[1]) - 1, int(found[2]) - 1
                elif found[0] == "\x1b[2J":
                    cells = [[" "] * self.width for _ in range(self.height)]
                at = found.end()
                continue
            assert y < self.height and x < self.width and text[at] not in "\n\r", (y, x, text[at])
            cells[y][x] = text[at]
            x, at = x + 1, at + 1
        return "\n".join("".join(row).rstrip() for row in cells) + "\n"


def console_of(terminal, **options):
    """A console that draws on it."""
    return Console(
        file=terminal, width=terminal.width, height=terminal.height, force_terminal=True,
        color_system="truecolor", legacy_windows=False, _environ={}, **options,
    )  # fmt: skip


def latin(events):
    """Events whose text has one cell a character, which the test's terminal assumes."""
    for event in events:
        if isinstance(event, TokenEvent):
            event = TokenEvent(event.index, event.token, chr(97 + event.token % 26), None)
        yield event


def test_screen_drawn_in_differences_is_the_screen_drawn_whole():
    """Catches a part that is not written again where it has changed, at any moment of a run."""
    terminal, clock = Terminal(), Clock()
    with Monitor(console_of(terminal), clock=clock) as monitor:
        for event in latin(e for _, e in events_of(recording())):
            clock.now += 1
            monitor.see(event)
            if isinstance(event, RoundFinished) and event.record.index % 7 == 0:
                rows = monitor.compose(80, 24)
                whole = "\n".join(
                    "".join(s.text for _, _, part in row for s in part).rstrip() for row in rows
                )
                assert terminal.screen() == whole + "\n"
    assert monitor.drawn > 100
    assert terminal.getvalue().startswith(ENTER) and terminal.getvalue().endswith(LEAVE)
    assert terminal.getvalue().count("\x1b[?1049h") == terminal.getvalue().count("\x1b[?1049l") == 1


def test_size_is_followed():
    """Catches a screen that keeps the size of the beginning."""
    terminal, clock = Terminal(160, 48), Clock()
    console = console_of(terminal)
    with Monitor(console, clock=clock) as monitor:
        for event in answer(ROUNDS):
            monitor.see(event)
        before = len(terminal.getvalue())
        console.size = (80, 24)
        clock.now += 1
        monitor.refresh()
        text = terminal.getvalue()[before:]
        assert text.startswith("\x1b[2J")
        assert terminal.screen(text).splitlines()[2].startswith("── answer 10/20")


@pytest.mark.parametrize("cost", [0.0001, 0.001, 0.02, 0.3])
def test_drawing_stays_within_its_share_whatever_it_costs(cost):
    """Catches a monitor that slows the answer down on a slow machine or terminal."""
    clock = Clock()
    with Monitor(console_of(Terminal()), clock=clock) as monitor:
        clock.cost, began, drawn = cost, clock.now, monitor.drawn
        for index in range(4000):
            clock.now += 0.005
            clock.cost, was = 0.0, clock.cost
            due = monitor._due(clock.now)
            clock.cost = was
            if due:
                monitor.refresh()
        n = monitor.drawn - drawn
        elapsed = clock.now - began
        assert monitor.spent <= ALLOWANCE_S + SHARE * elapsed + 2 * cost
        assert n <= elapsed / SHORTEST_S + 1
        assert n >= min(10, (ALLOWANCE_S + SHARE * 20) / cost / 3 - 1)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_terminal_is_given_back_after_any_end(error):
    """Catches a hidden cursor, or an alternate screen that stays, after an error or Ctrl-C."""
    terminal = Terminal()
    with pytest.raises(type(error)):
        with Monitor(console_of(terminal), clock=Clock()) as monitor:
            monitor.see(next(answer(ROUNDS)))
            raise error
    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l") and text.endswith("\x1b[?1049l")


def test_terminal_that_goes_away_ends_the_view_only():
    """Catches an answer that ends because a window was closed."""
    terminal = Terminal()
    with Monitor(console_of(terminal), clock=Clock()) as monitor:
        terminal.write = lambda text: (_ for _ in ()).throw(BrokenPipeError(32, "gone"))
        for event in answer(ROUNDS):
            monitor._soonest = 0
            monitor.see(event)
    assert not monitor.live and monitor.state.result is not None


def test_signals_are_given_back():
    """Catches handlers of SIGTERM and Ctrl-Z that outlive the screen."""
    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP]
    before = [signal.getsignal(number) for number in numbers]
    with Monitor(console_of(Terminal())):
        assert all(signal.getsignal(n) != signal.SIG_DFL for n in numbers)
    assert [signal.getsignal(number) for number in numbers] == before


def test_what_goes_on_is_shown_until_the_next_event():
    """Catches "compiling ..." that stays on the screen for the whole answer."""
    terminal, clock = Terminal(), Clock()
    with Monitor(console_of(terminal), clock=clock) as monitor:
        clock.now += 1
        monitor.flash("compiling kernel 3: rms_norm")
        assert "> compiling kernel 3: rms_norm" in terminal.screen()
        clock.now += 1
        monitor.see(next(answer(ROUNDS)))
        assert "compiling" not in terminal.screen()


# -- no terminal ----------------------------------------------------------------------------------


def test_lines_where_there_is_no_terminal():
    """Catches escape sequences in a log, a line per token, notices that are lost or doubled."""
    clock, said = Clock(), []
    console = Console(file=io.StringIO(), _environ={}, width=80)
    with Monitor(console, clock=clock, say=said.append) as monitor:
        assert not monitor.live
        for t, event in events_of(recording()):
            clock.now = 100 + 20 * t
            monitor.see(event, t)
    assert said[0].startswith("round 1: ")
    assert sum(line.startswith("gate closed: ") for line in said) == 1
    assert sum(line.startswith("gate reopened: ") for line in said) == 1
    assert said[-2] == "complete: 420 tokens, ended by length"
    assert "274 of 558 drafts accepted" in said[-1] and "gate open" in said[-1]
    assert 4 < len(said) < 20 and not any("\x1b" in line for line in said)
    assert console.file.getvalue() == ""


def test_dumb_terminals_get_lines():
    """Catches cursor movements sent to a terminal that has none."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, _environ={"TERM": "dumb"}, width=80)
    watch(answer(ROUNDS), console)
    assert "\x1b" not in out.getvalue() and "complete: 10 tokens" in out.getvalue()


def test_watch_returns_the_state_at_the_end():
    """Catches a front end that has to look at events a second time."""
    state = watch(answer(ROUNDS), console_of(Terminal()), clock=Clock())
    assert state.result.tokens == tuple(range(65, 75)) and state.text == "ABCDEFGHIJ"


def test_terminal_without_unicode_gets_ascii():
    """Catches boxes of question marks on a terminal that is not UTF-8."""

    class Old(Terminal):
        encoding = "latin-1"

    terminal = Old()
    watch(answer(ROUNDS), console_of(terminal), clock=Clock())
    text = terminal.getvalue()
    assert text.encode("latin-1") and "── " not in text and "-- " in text


def test_importing_the_monitor_imports_no_rich():
    """Catches a start-up that pays for a monitor nobody asked for."""
    import subprocess
    import sys

    code = (
        "import sys, cudflash.cli.generate, cudflash.cli.watching, cudflash.tui, cudflash.engine; "
        "sys.exit(any(name.startswith('rich') or name == 'cudflash.recording' "
        "for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_golden_screens_are_drawn_by_the_monitor_too():
    """Catches a monitor that composes otherwise than a picture does."""
    terminal = Terminal()
    with Monitor(console_of(terminal), clock=Clock(), state=screens.long_blocks()) as monitor:
        assert monitor.drawn == 1
        text = terminal.screen()
    golden = (screens.FOLDER / "verify-15-80x24.txt").read_text(encoding="utf-8")
    assert text == golden


def test_stop_leaves_the_screen_before_the_process_ends(monkeypatch):
    """Catches a terminal that SIGTERM leaves on the alternate screen."""
    killed = []
    monkeypatch.setattr(module.os, "kill", lambda pid, number: killed.append((pid, number)))
    terminal = Terminal()
    with Monitor(console_of(terminal), clock=Clock()) as monitor:
        monitor._stopped(signal.SIGTERM, None)
        assert terminal.getvalue().endswith(LEAVE)
    assert killed == [(os.getpid(), signal.SIGTERM)]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_suspended_monitor_comes_back_whole(monkeypatch):
    """Catches Ctrl-Z that leaves the shell on the alternate screen, or an empty screen after it."""
    terminal, seen = Terminal(), []
    monkeypatch.setattr(module.os, "kill", lambda pid, number: seen.append(terminal.getvalue()))
    clock = Clock()
    with Monitor(console_of(terminal), clock=clock) as monitor:
        monitor.see(next(answer(ROUNDS)))
        monitor._suspended(signal.SIGTSTP, None)
        assert seen[0].endswith(LEAVE)
        clock.now += 1
        monitor.refresh()
        text = terminal.getvalue()[len(seen[0]) :]
        assert text.startswith(ENTER) and "target.gguf" in terminal.screen(text)
