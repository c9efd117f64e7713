"""``cudflash monitor``: watch an answer that another process makes, or made."""

import sys
import time
from contextlib import nullcontext

import click

from cudflash.cli.common import Command, output_of, output_options
from cudflash.cli.watching import make_monitor, snapshot_options, take_snapshot
from cudflash.errors import FormatError, UsageError

MOST_TROUBLES = 5  # sentences about lines that could not be read
LONGEST_WAIT_S = 5.0  # a pause in a recording is not waited out longer: somebody went for coffee


def _speed(ctx, param, value):
    if value == "max":
        return 0.0
    try:
        speed = float(value)
    except ValueError:
        speed = -1.0
    if not 0 < speed <= 1e6:
        raise click.BadParameter(f"{value!r} is no speed, expected a number above 0, or max")
    return speed


@click.command("monitor", cls=Command)
@click.argument("path", metavar="FILE|-")
@click.option(
    "--follow", is_flag=True, help="Wait for what is still written, as 'tail -f' does."
)
@click.option(
    "--speed",
    default="1",
    show_default=True,
    metavar="X",
    callback=_speed,
    help="Replay a file at X times the speed it was recorded at; max: at once.",
)
@click.option(
    "--until", type=float, metavar="S", help="Stop S seconds into the recording."
)
@snapshot_options
@output_options
@click.pass_context
def command(ctx, path, follow, speed, until, **params):
    """Show a recording of events (generate --events FILE), or a receipt.

    A file is replayed; with --follow, and from standard input ('-'), events are shown when they
    come. The screen is on stderr; where that is no terminal, lines are. Stdout gets the text of
    the answers and nothing else. Any number of monitors may read one file. Ctrl-C ends.
    """
    from cudflash.replay import entries, open_source

    output, snapshot = output_of(ctx), take_snapshot(params)
    if until is not None and not until > 0:
        raise UsageError(f"--until is {until}, expected seconds above 0")
    source = open_source(path, follow, getattr(sys.stdin, "buffer", None))
    live = follow or path == "-"
    shown = Shown(output, 0.0 if live else speed, until)
    try:
        shown.run(entries(source, idle=shown.monitor.refresh))
    finally:  # after Ctrl-C, too: that is how following a recording ends
        if snapshot is not None and shown.events:
            snapshot(output, shown.state)
    shown.report(source.name)
    if not shown.events:
        raise FormatError(
            f"{source.name}: nothing to show was found, expected a recording "
            "(generate --events FILE) or a receipt (--receipt FILE)"
        )


class Shown:
    """Entries on their way to the monitor, at their pace.

    Parameters
    ----------
    output : Output
    speed : float
        Of the replay; 0 for no pace.
    until : float or None
        Seconds.
    """

    def __init__(self, output, speed, until):
        from cudflash.tui.state import MonitorState

        self._output, self._speed, self._until = output, speed, until
        self.state = MonitorState()
        self.monitor = make_monitor(output, self.state)
        self.events = 0
        self._troubles = []
        self._began = None  # when the recording would have begun, at this speed
        self._ends_line = True

    def run(self, found):
        """Show everything; the screen is gone afterwards, its last state stays."""
        from cudflash.recording import Recorded

        screen = self._output.screen(self.monitor.flash) if self.monitor.live else nullcontext()
        with screen, self.monitor:
            for entry in found:
                if not isinstance(entry, Recorded):
                    self._trouble(entry.sentence)
                    continue
                if self._until is not None and (entry.t or 0.0) > self._until:
                    break
                self._pace(entry.t)
                self._text(entry.event)
                self.events += 1
                self.monitor.see(entry.event, entry.t)
        if self.monitor.drawn:
            self._output.say(self.monitor.last_screen().rstrip("\n"))

    def _pace(self, t):
        """Wait until a recorded time has come."""
        if t is None or not self._speed:
            return
        now = time.monotonic()
        if self._began is None:
            self._began = now - t / self._speed
        while (ahead := self._began + t / self._speed - now) > 0:
            if ahead > LONGEST_WAIT_S:
                self._began -= ahead - LONGEST_WAIT_S
                continue
            time.sleep(min(ahead, 0.1))
            self.monitor.refresh()
            now = time.monotonic()

    def _text(self, event):
        """Text of the answers to stdout, as 'generate' writes it; each answer begins a line."""
        from cudflash.events import Finished, Started, TokenEvent

        if isinstance(event, Started) and not self._ends_line:
            self._output.answer("\n")
        elif isinstance(event, TokenEvent | Finished) and event.text:
            self._output.answer(event.text)
        else:
            return
        self._ends_line = isinstance(event, Started) or event.text.endswith("\n")

    def _trouble(self, sentence):
        self._troubles.append(sentence)
        if self.monitor.live:
            self.monitor.tell(sentence)

    def report(self, name):
        """Tell what could not be read."""
        for sentence in self._troubles[:MOST_TROUBLES]:
            self._output.note(f"note: {name}: {sentence}")
        more = len(self._troubles) - MOST_TROUBLES
        if more > 0:
            self._output.note(f"note: {name}: {more} more of the kind")
