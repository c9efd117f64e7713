"""Options to watch an answer: the monitor, the recording of its events, a picture of the screen.

Owns who sees the events of a command. Must not know what a screen looks like. Invariant: the answer
reaches stdout whole, whatever happens to those who watch.
"""

import sys
import time
from contextlib import contextmanager

import click

from cudflash.cli.common import check_writable, options
from cudflash.errors import CudflashError, UsageError

FAILED = 1  # exit code where the answer is complete, but a file about it is not


def _size(ctx, param, value):
    if value is None:
        return None
    columns, _, rows = value.lower().partition("x")
    if columns.isdigit() and rows.isdigit():
        size = int(columns), int(rows)
        if 20 <= size[0] <= 400 and 4 <= size[1] <= 200:
            return size
    raise click.BadParameter(
        f"{value!r} is no size, expected COLUMNSxROWS from 20x4 to 400x200, such as 120x36"
    )


snapshot_options = options(
    click.option(
        "--snapshot",
        type=click.Path(),
        metavar="FILE",
        help="Write the last screen of the monitor as an SVG picture.",
    ),
    click.option(
        "--snapshot-size",
        metavar="WxH",
        callback=_size,
        help="Columns and rows of the picture. Default: 120x36.",
    ),
    click.option("--snapshot-light", is_flag=True, help="The picture as on a light terminal."),
)

watch_options = options(
    click.option(
        "--monitor",
        is_flag=True,
        help="Watch the answer being made, on a screen of its own on stderr; where that is no "
        "terminal, as lines.",
    ),
    snapshot_options,
    click.option(
        "--events",
        "events_file",
        type=click.Path(),
        metavar="FILE",
        help="Record what happens, a line of JSON each, for 'cudflash monitor'; '-' writes it to "
        "stdout in place of the answer.",
    ),
)


def take_watch(output, params):
    """Take the options out of a command's parameters and open the recording.

    Returns
    -------
    Watch or None
        None where nobody watches.

    Raises
    ------
    UsageError
        For options that contradict each other, or a file that cannot be written.
    """
    monitor, events_file = params.pop("monitor"), params.pop("events_file")
    snapshot = take_snapshot(params)
    if events_file == "-" and params.get("as_json"):
        raise UsageError("--events - and --json both want stdout; record to a file")
    if not monitor and events_file is None and snapshot is None:
        return None
    recorder = None
    if events_file is not None:
        from cudflash.recording import Recorder

        to_stdout = events_file == "-"
        make = Recorder.to_file
        recorder = Recorder(output.raw, "standard output") if to_stdout else make(events_file)
    return Watch(output, monitor, recorder, snapshot, events_file == "-")


def take_snapshot(params):
    """Take the options about a picture: a callable that saves a state's, None without.

    Raises
    ------
    UsageError
        For options that contradict each other, or a file that cannot be written.
    """
    path, size = params.pop("snapshot"), params.pop("snapshot_size")
    light = params.pop("snapshot_light")
    if path is None:
        if size is not None or light:
            raise UsageError("--snapshot-size and --snapshot-light need --snapshot FILE")
        return None
    check_writable(path, "the picture")

    def save(output, state):
        from cudflash.tui import save_snapshot

        try:
            save_snapshot(path, state, size, light=light, no_color=output.no_color)
        except UsageError as err:  # it could be written when the command began
            raise CudflashError(str(err)) from None

    return save


def make_monitor(output, state, say=None):
    """A monitor on stderr, with the colours that the user wants."""
    from rich.console import Console

    from cudflash.tui import Monitor

    console = Console(file=sys.stderr, no_color=not output.colors(sys.stderr), highlight=False)
    return Monitor(console, live=output.rewrites, say=say or output.note, state=state)


class Watch:
    """Who sees the events of a command, one answer or several.

    Attributes
    ----------
    on_stdout : bool
        Stdout gets events, not text.
    tells : bool
        The monitor says as lines what would be notes otherwise.
    failed : bool
        A recording or a picture is not complete.
    """

    def __init__(self, output, monitor, recorder, snapshot, on_stdout):
        self._output, self._recorder, self._snapshot = output, recorder, snapshot
        self._wanted, self._monitor, self._state = monitor, None, None
        if monitor or snapshot is not None:
            from cudflash.tui.state import MonitorState

            self._state = MonitorState()
        self.on_stdout = on_stdout
        self.tells = monitor and not output.rewrites
        self.failed = False

    @contextmanager
    def answer(self):
        """Around the events of one answer."""
        try:
            if not self._wanted:
                yield
                return
            self._monitor = make_monitor(self._output, self._state)
            if not self._monitor.live:
                with self._monitor:
                    yield
                return
            with self._output.screen(self._monitor.flash), self._monitor:
                yield
        finally:
            self._monitor = None
            self._check()

    def see(self, event):
        """Hand an event on."""
        if self._recorder is not None:
            self._recorder.see(event)
        if self._monitor is not None:
            self._monitor.see(event)
        elif self._state is not None:
            self._state.see(event, time.monotonic())

    def close(self):
        """End the recording, write the picture; a failure is told and noted in ``failed``."""
        if self._recorder is not None:
            self._recorder.close()
            self._check()
            self._recorder = None
        if self._snapshot is not None:
            try:
                self._snapshot(self._output, self._state)
            except CudflashError as err:
                self.failed = True
                self._output.error(str(err))

    def _check(self):
        """Tell once that a recording has failed."""
        if self._recorder is not None and self._recorder.trouble and not self.failed:
            self.failed = True
            self._output.error(self._recorder.trouble)
