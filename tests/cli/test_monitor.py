"""`cudflash monitor`, --monitor, --events and --snapshot: views that never touch the answer."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from cudflash.recording import SCHEMA
from tests.cli.conftest import finish, program
from tests.cli.pairs import put_draft, put_target
from tests.helpers.recorded_runs import answer, events_of, recording, state_of
from tests.helpers.vectors import vector_path
from tests.test_recording import lines_of
from tests.tui.test_state import ROUNDS

RUN = str(vector_path("recordings/scripted.jsonl"))
LEAVE = "\x1b[?25h\x1b[?1049l"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Arguments that answer with a tiny pair."""
    folder = tmp_path_factory.mktemp("pair")
    return ("generate", put_target(folder), "-md", put_draft(folder), "-p", "hello", "--temp", 0,
            "-c", 256, "-t", 1, "--ignore-eos")  # fmt: skip


@pytest.fixture(scope="module")
def text(pair):
    """The answer of 60 tokens."""
    return finish(program(*pair, "-n", 60, "-q")).out


# -- generate -----------------------------------------------------------------------------------


def test_answer_is_the_same_bytes_with_everything_that_watches(cli, pair, text, tmp_path):
    """Catches a monitor, a recording or a picture that changes or delays away the answer."""
    watching = ("--monitor", "--events", tmp_path / "run", "--snapshot", tmp_path / "run.svg")
    done = cli(*pair, "-n", 60, *watching)
    assert done.code == 0 and done.out == text
    assert "\x1b" not in done.err and "complete: 60 tokens" in done.err
    run = (tmp_path / "run").read_bytes()
    assert state_of(run).text == text.decode() and json.loads(run.splitlines()[0])["schema"] == SCHEMA
    assert "60/60" in (tmp_path / "run.svg").read_text().replace("&#160;", " ")


def test_events_on_stdout_take_the_place_of_the_answer(cli, pair, text):
    """Catches events and text mixed on one stream."""
    done = cli(*pair, "-n", 60, "--events", "-")
    assert done.code == 0 and state_of(done.out).text == text.decode()
    done = cli(*pair, "-n", 4, "--events", "-", "--json")
    assert done.code == 2 and "both want stdout" in done.sentence


def test_recording_on_a_full_disk_costs_one_sentence_and_exit_code_1(cli, pair, text):
    """Catches an answer lost to a full disk, or a recording that is cut in silence."""
    if not os.path.exists("/dev/full"):
        pytest.skip("/dev/full is not there")
    done = cli(*pair, "-n", 60, "--events", "/dev/full")
    assert done.code == 1 and done.out == text
    assert done.err.count("recording of events stopped after 0 lines (No space left") == 1


def test_reader_of_the_recording_that_leaves_does_not_end_the_answer(pair, text, tmp_path):
    """Catches SIGPIPE from a named pipe that ends the program."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = program(*pair, "-n", 60, "--events", pipe)
    with open(pipe, "rb", buffering=0) as reader:
        assert reader.read(10).startswith(b'{"schema"')
    done = finish(process)
    assert done.out == text
    assert (done.code, "Broken pipe" in done.err) in ((1, True), (0, False))  # it may be quicker


@pytest.mark.parametrize("options, sentence", [
    (("--events", "no/such/folder/run"), "events cannot be written (No such file"),
    (("--snapshot", "no/such/folder/s.svg"), "s.svg: the picture cannot be written (No such file"),
    (("--snapshot", "."), ".: the picture cannot be written (Is a directory"),
    (("--receipt", "no/such/folder/r"), "r: the receipt cannot be written (No such file"),
    (("--receipt", "/proc/r"), "/proc/r: the receipt cannot be written ("),
    (("--snapshot-size", "80x24"), "need --snapshot FILE"),
    (("--snapshot", "x.svg", "--snapshot-size", "big"), "'big' is no size, expected COLUMNSxROWS"),
    (("--snapshot", "x.svg", "--snapshot-size", "9999x24"), "'9999x24' is no size"),
])  # fmt: skip
def test_wrong_options_are_refused_before_loading(cli, options, sentence):
    """Catches a model loaded, or an answer made, for a view that cannot be."""
    done = cli("generate", "no.gguf", "-p", "x", *options)
    assert done.code == 2 and sentence in done.sentence


@pytest.mark.parametrize("command", ["chat", "demo", "monitor"])
def test_picture_that_cannot_be_made_is_refused_by_every_command(cli, command):
    """Catches a whole answer made, or a recording shown, before its picture is refused."""
    files = {"chat": ["no.gguf"], "demo": [], "monitor": [RUN]}[command]
    done = cli(command, *files, "--snapshot", "/proc/x/y", stdin=b"hello\n")
    assert done.code == 2 and "/proc/x/y: the picture cannot be written" in done.sentence
    assert done.out == b"" and len(done.err.splitlines()) == 1


def test_files_asked_for_are_left_as_they_are_until_the_answer(cli, tmp_path):
    """Catches a look at whether a file can be written that empties it, or leaves one behind."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    done = cli("generate", "no.gguf", "-p", "x", "--receipt", old, "--snapshot", new)
    assert done.code == 3 and old.read_text() == "kept" and not new.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is not there")
@pytest.mark.parametrize("full", ["--snapshot", "--receipt"])
def test_full_disk_after_the_answer_costs_that_file_only(cli, pair, text, tmp_path, full):
    """Catches a receipt, a picture or the last line lost with the other file; exit code 2."""
    other = tmp_path / "other"
    kept = "--receipt" if full == "--snapshot" else "--snapshot"
    done = cli(*pair, "-n", 60, full, "/dev/full", kept, other)
    assert done.code == 1 and done.out == text and "; ended by length" in done.err
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "/dev/full: the " in errors[0]
    assert "cannot be written (No space left" in errors[0]
    assert other.read_text().startswith("{" if kept == "--receipt" else "<svg")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is not there")
@pytest.mark.parametrize("full", ["--snapshot", "--receipt"])
def test_full_disk_does_not_cost_a_demo_its_proof(cli, full):
    """Catches a demo that ends with the wrong exit code, or without comparing anything."""
    done = cli("demo", "-n", 24, "--repeats", 1, "-t", 1, full, "/dev/full")
    assert done.code == 1 and "drafted output equals plain output" in done.err
    assert done.err.count("error: /dev/full: the ") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is not there")
def test_full_disk_ends_a_chat_and_a_replay_with_exit_code_1(cli, chat_model):
    """Catches a full disk that looks like wrong arguments."""
    talk = ("chat", chat_model, "-n", 6, "-c", 512, "-t", 1, "--snapshot", "/dev/full")
    replay = ("monitor", RUN, "--speed", "max", "--snapshot", "/dev/full")
    for args in (talk, replay):
        done = cli(*args, stdin=b"hello\n")
        assert done.code == 1 and done.out and "/dev/full: the picture cannot" in done.sentence


@pytest.mark.parametrize("n", [0, 1, 2])
def test_shortest_answers_are_recorded_and_shown(cli, pair, tmp_path, n):
    """Catches an answer without tokens, or with one, that a view divides by."""
    path = tmp_path / "run"
    done = cli(*pair, "-n", n, "--monitor", "--events", path, "--snapshot", tmp_path / "s.svg")
    assert done.code == 0 and len(state_of(path.read_bytes()).result.tokens) == n
    shown = cli("monitor", path, "--speed", "max")
    assert shown.code == 0 and shown.out == done.out and "error" not in shown.err


def test_chat_records_every_answer_and_shows_the_last(cli, chat_model, tmp_path):
    """Catches a recording that is begun anew with each question."""
    path = tmp_path / "run"
    done = cli("chat", chat_model, "-n", 6, "--temp", 0, "-c", 512, "-t", 1, "--monitor",
               "--events", path, "--snapshot", tmp_path / "s.svg", stdin=b"hello\nmore\n")
    assert done.code == 0
    state = state_of(path.read_bytes())
    assert state.answers == 2 and state.text in done.out.decode()
    assert "answer&#160;2" in (tmp_path / "s.svg").read_text()
    shown = cli("monitor", path, "--speed", "max")
    assert shown.out.decode().split("\n")[0] in done.out.decode()


# -- monitor ------------------------------------------------------------------------------------


def test_replay_gives_the_text_on_stdout_and_lines_on_stderr(cli):
    """Catches a replay that is no text any more, or a log full of escape sequences."""
    done = cli("monitor", RUN, "--speed", "max")
    assert done.code == 0 and done.out.decode() == state_of(recording()).text
    assert "\x1b" not in done.err and "gate closed: 11 of 56" in done.err
    assert "274 of 558 drafts accepted" in done.err.splitlines()[-1]


def test_replay_at_its_own_speed_takes_as_long_as_the_run(cli, monkeypatch):
    """Catches a replay that ignores its clock, or waits for what is due."""
    now = [1000.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    last = events_of(recording())[-1][0]
    for speed in (1, 4):
        began = now[0]
        assert cli("monitor", RUN, "--speed", speed).code == 0
        assert last / speed - 0.01 <= now[0] - began <= last / speed + 0.2


def test_until_stops_in_the_middle(cli, tmp_path):
    """Catches a picture of the end where one of the middle was asked for."""
    picture = tmp_path / "s.svg"
    done = cli("monitor", RUN, "--speed", "max", "--until", "0.2", "--snapshot", picture,
               "--snapshot-size", "80x24")  # fmt: skip
    assert done.code == 0 and len(done.out) < len(state_of(recording()).text.encode())
    assert "closed" in picture.read_text()


def test_two_monitors_on_one_growing_file(tmp_path):
    """Catches monitors that disturb one another, or do not end with the recording."""
    path, data = tmp_path / "run", recording()
    path.write_bytes(data[:30000])
    both = [program("monitor", path, "--follow") for _ in range(2)]
    time.sleep(1.0)
    assert all(process.poll() is None for process in both)
    with open(path, "ab") as file:
        file.write(data[30000:])
    for process in both:
        done = finish(process)
        assert done.code == 0 and done.out.decode() == state_of(data).text


def test_events_through_a_pipe_are_shown_as_they_come(pair, text):
    """Catches a pipe that is read to its end before anything is shown."""
    process = program("monitor", "-", stdin=subprocess.PIPE)
    events = finish(program(*pair, "-n", 60, "--events", "-", "-q")).out
    head, tail = events[: len(events) // 2], events[len(events) // 2 :]
    process.stdin.write(head)
    process.stdin.flush()
    # past the buffer of process.stdout, which communicate does not read
    assert os.read(process.stdout.fileno(), 1) == text[:1]
    out, _ = process.communicate(tail, timeout=120)
    assert process.returncode == 0 and text[:1] + out == text


def test_receipt_is_shown_without_text(cli, pair, tmp_path):
    """Catches a receipt that is refused, or shown with a text it does not have."""
    path = tmp_path / "receipt.json"
    assert cli(*pair, "-n", 60, "--receipt", path, "--speculative", "on").code == 0
    drafted = json.loads(path.read_text())["speculative"]["counts"]["drafted"]
    done = cli("monitor", path, "--snapshot", tmp_path / "s.svg")
    assert done.code == 0 and done.out == b""
    assert f"of {drafted} drafts accepted" in done.err
    assert "rows&#160;held&#160;are&#160;not&#160;recorded" in (tmp_path / "s.svg").read_text()


@pytest.mark.parametrize("data, code, words", [
    (b"", 3, "there is no event in it"),
    (b"# a text file\n", 3, "is no JSON, expected one event"),
    (b'{"schema": "cudflash-receipt/0"}\n', 3, "receipt."),
    (b'{"a": 1', 3, "cut after 7 bytes"),
    (recording()[:20000], 0, "is cut after"),
    (recording()[:20000].rsplit(b"\n", 1)[0] + b"\n", 0, "the recording has no end"),
    (recording().split(b"\n", 1)[1], 0, "comes before any header"),
    (recording().replace(b"events/1", b"events/9"), 0, "has the schema 'cudflash-events/9'"),
])  # fmt: skip
def test_damaged_files_get_a_sentence_and_show_what_they_have(cli, tmp_path, data, code, words):
    """Catches a traceback, silence, or a refusal of what can still be read."""
    path = tmp_path / "run"
    path.write_bytes(data)
    done = cli("monitor", path, "--speed", "max")
    assert done.code == code and words in done.err and "Traceback" not in done.err
    assert bool(done.out) == (code == 0)
    if code:
        assert str(path) in done.sentence


@pytest.mark.parametrize("arguments, words", [
    (("no-such-file",), "no-such-file: cannot be read"),
    (("no-such-file", "--follow"), "no-such-file: cannot be read"),
    ((RUN, "--speed", "fast"), "'fast' is no speed"),
    ((RUN, "--speed", "0"), "'0' is no speed"),
    ((RUN, "--until", "-1"), "--until is -1.0"),
    ((), "Missing argument"),
])  # fmt: skip
def test_wrong_arguments(cli, arguments, words):
    """Catches arguments that are taken for something else."""
    done = cli("monitor", *arguments)
    assert done.code == 2 and words in done.err


def test_many_bad_lines_get_few_sentences(cli, tmp_path):
    """Catches a screen of errors for one damaged block."""
    path = tmp_path / "run"
    path.write_bytes(lines_of(answer(ROUNDS)) + b"rubbish\n" * 50)
    done = cli("monitor", path, "--speed", "max")
    assert done.code == 0 and done.err.count("is no JSON") == 5
    assert "45 more of the kind" in done.err


# -- terminals ----------------------------------------------------------------------------------


class Terminal:
    """A program on a terminal of its own; optionally with stdout elsewhere."""

    def __init__(self, *args, stdout=None, size=(80, 24), env=None):
        master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        environment = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        import fcntl
        import struct
        import termios

        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cudflash", *map(str, args)], stdin=slave, env=environment,
            stdout=slave if stdout is None else stdout, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.master, self.text = master, ""

    def read_until(self, words, timeout=120):
        """Read until words have come, or (None) until the end."""
        end = time.monotonic() + timeout
        while words is None or words not in self.text:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, self.text[-500:]
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other side is closed
                data = b""
            if not data:
                assert words is None, self.text[-500:]
                break
            self.text += data.decode("utf-8", "replace")
        return self.text

    def finish(self):
        """Everything that was written, and the exit code."""
        self.read_until(None)
        code = self.process.wait(timeout=60)
        os.close(self.master)
        return self.text, code


def assert_clean(text):
    """The terminal is as it was: normal screen, a cursor, no style."""
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") >= 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    return text[text.rindex("\x1b[?1049l") + len("\x1b[?1049l") :]


def test_answer_is_left_on_the_terminal_after_the_screen(pair, text):
    """Catches an answer that vanishes with the alternate screen, or was written over it."""
    shown, code = Terminal(*pair, "-n", 60, "--monitor").finish()
    after = assert_clean(shown)
    assert code == 0 and text.decode(errors="replace").replace("\n", "\r\n")[:20] in after
    assert "60 tokens" in after


def test_answer_goes_into_a_file_while_the_screen_is_up(pair, text, tmp_path):
    """Catches escape sequences in the answer's file, or an answer held back from it."""
    with open(tmp_path / "out", "wb") as file:
        shown, code = Terminal(*pair, "-n", 60, "--monitor", stdout=file).finish()
    assert_clean(shown)
    assert code == 0 and (tmp_path / "out").read_bytes() == text
    assert "accepted by position" in shown and "draft context" in shown


def test_no_color_has_no_colour(pair):
    """Catches colour sequences although NO_COLOR is set, or with --no-color."""
    for options, env in (((), {"NO_COLOR": "1"}), (("--no-color",), {})):
        shown, _ = Terminal(*pair, "-n", 8, "--monitor", *options, env=env).finish()
        codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", shown)
                 for code in found.split(";") if code}  # fmt: skip
        assert codes <= {"0", "1", "2", "4"}, codes


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_leaves_the_terminal_clean_and_the_answer_whole(pair, tmp_path, presses):
    """Catches a hidden cursor or a lost answer after Ctrl-C, once and twice; exit code 130."""
    path = tmp_path / "run"
    terminal = Terminal(*pair[:-5], "-c", 4096, "-t", 1, "--ignore-eos", "-n", 4000, "--monitor",
                        "--events", path)  # fmt: skip
    terminal.read_until("decide")
    for press in range(presses):
        os.killpg(terminal.process.pid, signal.SIGINT)
        time.sleep(0.02)
    shown, code = terminal.finish()
    after = assert_clean(shown)
    assert code == 130
    if presses == 1:
        made = state_of(path.read_bytes())
        assert made.result.finish_reason == "cancelled" and made.text
        assert "cancelled" in after


def test_ctrl_c_ends_a_following_monitor(tmp_path):
    """Catches a monitor that cannot be left, or that leaves the screen as it is."""
    path = tmp_path / "run"
    path.write_bytes(recording()[:30000])
    terminal = Terminal("monitor", path, "--follow")
    terminal.read_until("accepted by position")
    os.killpg(terminal.process.pid, signal.SIGINT)
    shown, code = terminal.finish()
    assert code == 130 and "interrupted" in assert_clean(shown)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_leave_the_terminal_clean(tmp_path, number):
    """Catches a terminal that `kill` leaves on the alternate screen."""
    path = tmp_path / "run"
    path.write_bytes(recording()[:30000])
    terminal = Terminal("monitor", path, "--follow")
    terminal.read_until("accepted by position")
    os.kill(terminal.process.pid, number)
    shown, code = terminal.finish()
    assert code == -number
    assert_clean(shown)


def test_replay_leaves_its_last_screen_and_the_text(tmp_path):
    """Catches a replay at full speed of which nothing can be seen."""
    shown, code = Terminal("monitor", RUN, "--speed", "max", size=(160, 48)).finish()
    after = assert_clean(shown)
    assert code == 0 and "accepted by position, of proposed" in after and "gate" in after
