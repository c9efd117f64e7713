"""What reaches which stream, with and without a terminal."""

import io
import json
import sys

import pytest

from cudflash.cli.kernels import CompileNotice
from cudflash.cli.output import CLEAR_LINE, Output, human_bytes
from cudflash.ops import store
from cudflash.ops.cpu import jit


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal and keeps what it gets."""

    def __init__(self, tty=True):
        self.tty = tty
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self):
        return self.tty

    @property
    def text(self):
        """Everything written so far."""
        return self.buffer.getvalue().decode()


@pytest.fixture
def streams(monkeypatch):
    """Call it for two terminals in place of stdout and stderr (pytest sets its own until then)."""

    def install():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stdout, sys.stderr

    return install


def test_colour_needs_a_terminal_and_nobody_against_it(streams, monkeypatch):
    """Escape codes in a log, or NO_COLOR ignored."""
    out, err = streams()
    Output().error("x")
    assert "\x1b[1;31m" in err.text
    for against in ("option", "NO_COLOR", "no terminal"):
        monkeypatch.setattr(sys, "stderr", Terminal(tty=against != "no terminal"))
        monkeypatch.setenv("NO_COLOR", "1" if against == "NO_COLOR" else "")
        output = Output()
        output.no_color = against == "option"
        output.error("x")
        assert sys.stderr.text == "error: x\n"


def test_progress_is_wiped_before_anything_else_is_written(streams):
    """A rest of a progress line in front of the answer or of a note."""
    out, err = streams()
    output = Output()
    output.progress("loading 1 %")
    output.answer("text")
    assert err.text == f"{CLEAR_LINE}loading 1 %{CLEAR_LINE}" and out.text == "text"


def test_progress_never_wipes_the_answer(streams):
    """A progress line that clears the terminal line on which the answer stands."""
    out, err = streams()
    output = Output()
    output.answer("half a line")
    output.progress("compiling")
    assert err.text == ""


@pytest.mark.parametrize("change", ["no terminal", "quiet", "dumb"])
def test_progress_is_for_terminals_only(streams, monkeypatch, change):
    """Thousands of carriage returns in a log."""
    out, err = streams()
    output = Output()
    output.quiet = change == "quiet"
    err.tty = change != "no terminal"
    if change == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    output.progress("loading")
    assert err.text == ""


def test_notes_begin_on_a_new_line_and_stdout_stays_exact(streams):
    """Statistics glued to the answer's last word, or a newline that is not part of the answer."""
    out, err = streams()
    output = Output()
    output.no_color = True
    output.answer("answer")
    output.note("5 tokens")
    output.answer("line\n")
    output.note("again")
    assert out.text == "answerline\n" and err.text == "\n5 tokens\nagain\n"


def test_json_is_one_line_of_ascii_for_every_reader(streams):
    """Line separators of Unicode that split the object, or NaN that is no JSON."""
    out, err = streams()
    value = {"text": "a\u2028b\x85c\n🙂", "bias": float("-inf"), "list": (1, None, True)}
    Output().json(value)
    (line,) = out.text.splitlines()
    assert line.isascii()
    assert json.loads(line) == {**value, "bias": "-inf", "list": [1, None, True]}


def test_compilation_is_announced_once_and_never_inside_the_answer(streams):
    """A minute of silence, a message per kernel, or one in the middle of a sentence."""
    out, err = streams()
    output = Output()
    output.no_color = True
    with CompileNotice(output):
        listener = store._listeners[-1]
        listener("one")
        listener("two")
        output.answer("text")
        before = err.text
        listener("three")
        assert err.text == before
    listener("after the command")
    assert err.text.count("compiling kernels") == 1
    assert "compiled 3 kernels" in err.text.splitlines()[-1]


def test_compilation_that_could_not_be_kept_says_so(streams, monkeypatch):
    """"Once, cached" on a full disk, and the same minute of waiting at the next start."""
    out, err = streams()
    with CompileNotice(Output()):
        store._listeners[-1]("one")
        monkeypatch.setattr(jit, "stored", lambda: False)
    assert "at every start" in err.text.splitlines()[-1] and "CUDFLASH_CACHE" in err.text
    assert "once" not in err.text


def test_sizes_for_people():
    """1023 KiB shown as 0 MiB, or bytes with a fraction."""
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 150 * 1024: "150 KiB",
             98_362_432: "93.8 MiB", 5 << 40: "5.0 TiB", 3000 << 40: "3000 TiB"}  # fmt: skip
    assert {n: human_bytes(n) for n in sizes} == sizes
