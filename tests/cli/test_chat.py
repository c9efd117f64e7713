"""`cudflash chat`: the conversation, its commands, its interruptions."""

import json
import os
import select
import signal
import time

import pytest

from cudflash.cli.conversation import read_messages
from cudflash.errors import UsageError
from tests.cli.conftest import finish, program

ARGS = ("--temp", "0", "-n", "6")


@pytest.fixture
def chat(cli, chat_model):
    """Call ``chat(*lines, args=())`` with the lines piped in."""

    def run(*lines, args=()):
        stdin = "".join(line + "\n" for line in lines).encode()
        return cli("chat", "-m", chat_model, *ARGS, *args, stdin=stdin)

    return run


def saved(path):
    """Messages of a saved file, read without our own reader."""
    return json.loads(path.read_text(encoding="utf-8"))


def test_answers_go_to_stdout_and_everything_else_to_stderr(chat, tmp_path):
    """A prompt sign, a banner or a command's output between the answers."""
    path = tmp_path / "a.json"
    done = chat("one", "/stats", "two", f"/save {path}", "/help")
    messages = saved(path)
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    expected = "".join(a if a.endswith("\n") else a + "\n" for a in answers)
    assert done.code == 0 and done.out == expected.encode()
    assert "tokens" in done.err and "/retry" in done.err and "no draft" in done.err


def test_saved_file_has_the_exact_text_of_both_sides(chat, tmp_path):
    """A save that strips, escapes or renders what was said."""
    path = tmp_path / "a.json"
    said = '  **bold** <b> \\n "quoted" 🙂\té  '
    chat(said, f"/save {path}")
    # the one leading space that marks a line as text is not part of it
    assert saved(path)[0] == {"role": "user", "content": said[1:]}


def test_conversation_goes_on_after_load(chat, tmp_path):
    """A loaded conversation that answers as if nothing had been said."""
    whole, half = tmp_path / "whole.json", tmp_path / "half.json"
    chat("one", f"/save {half}", "two", f"/save {whole}")
    again = tmp_path / "again.json"
    done = chat(f"/load {half}", "two", f"/save {again}")
    assert done.code == 0 and saved(again) == saved(whole)


def test_clear_forgets_and_system_stays(chat, tmp_path):
    """A cleared conversation that still influences answers, or loses its system prompt."""
    cleared, fresh = tmp_path / "cleared.json", tmp_path / "fresh.json"
    chat("one", "/clear", "two", f"/save {cleared}", args=("--system", "be kind"))
    chat("/system be kind", "two", f"/save {fresh}")
    assert saved(cleared) == saved(fresh)
    assert saved(fresh)[0] == {"role": "system", "content": "be kind"}


def test_system_shows_sets_and_removes(chat, tmp_path):
    """A system prompt that is doubled, or that cannot be taken back."""
    path = tmp_path / "a.json"
    done = chat("/system", "/system a", "/system b", "/system", "/system -", f"/save {path}")
    assert "there is no system prompt" in done.err and "system prompt: b" in done.err
    assert saved(path) == [] and read_messages(path) == []


def test_retry_replaces_the_last_answer(chat, tmp_path):
    """A retry that appends a second answer, or repeats the same one under a fixed seed."""
    path, sampled = tmp_path / "a.json", ("--temp", "3", "--top-k", "0", "--min-p", "0")
    done = chat("one", "/retry", "/retry", f"/save {path}", args=(*sampled, "-s", "7"))
    assert [m["role"] for m in saved(path)] == ["user", "assistant"]
    assert done.out.count(b"\n") >= 3
    first, again = tmp_path / "b.json", tmp_path / "c.json"
    chat("one", f"/save {first}", "/retry", f"/save {again}", args=(*sampled, "-s", "7"))
    assert saved(first) != saved(again)
    assert "same answer" in chat("one", "/retry").err


def test_several_lines_between_quotes_are_one_question(chat, tmp_path):
    """Pasted text sent line by line."""
    path = tmp_path / "a.json"
    chat('"""first', "", 'last"""', f"/save {path}", '"""one line"""', f"/save {path}")
    questions = [m["content"] for m in saved(path) if m["role"] == "user"]
    assert questions == ["first\n\nlast", "one line"]


@pytest.mark.parametrize("leave", ["/exit", "/quit", "/bye"])
def test_exit_leaves_before_later_lines(chat, leave):
    """A program that answers what was typed after leaving."""
    done = chat(leave, "one")
    assert done.code == 0 and done.out == b""


def test_unknown_commands_say_so_and_are_not_sent(chat):
    """A mistyped command answered by the model, or one that ends the program."""
    done = chat("/foo bar", "one")
    assert "there is no command /foo" in done.err and done.out and done.code == 2


@pytest.mark.parametrize(
    "line, words",
    [
        ("/retry", "no question"),
        ("/stats", "no answer"),
        ("/save", "name of a file"),
        ("/load", "name of a file"),
        ("/load /no/such/file", "cannot be read"),
        ("/save /no/such/folder/a.json", "cannot be written"),
    ],
)
def test_commands_that_cannot_be_done_say_why(chat, line, words):
    """A traceback that ends the conversation."""
    done = chat(line, "one")
    assert words in done.err and done.out and "Traceback" not in done.err


def test_only_saved_conversations_are_overwritten_and_loaded(chat, tmp_path):
    """A slip of the finger that replaces a file of the user, or loads half of one."""
    path = tmp_path / "precious.txt"
    for text in ("notes", '{"role": "user"}', '[{"role": "user"}]', "[1]", "3"):
        path.write_text(text)
        done = chat("one", f"/save {path}", f"/load {path}")
        assert done.err.count("not a saved conversation") == 2 and path.read_text() == text
    with pytest.raises(UsageError):
        read_messages(path)


def test_too_long_a_question_leaves_the_conversation_as_it_was(chat, tmp_path):
    """A question that does not fit and then blocks every later one."""
    path = tmp_path / "a.json"
    done = chat("long " * 50, "hi", f"/save {path}", args=("-c", "64"))
    assert "context holds 64" in done.err and done.code == 7
    assert [m["content"] for m in saved(path)][:1] == ["hi"]


def test_later_turns_reuse_what_was_evaluated(chat):
    """Each turn evaluating the whole conversation again."""
    done = chat("one", "two", "/stats")
    assert " reused)" in done.err


def test_json_is_one_object_per_answer(chat):
    """A program that talks with chat and has to guess where an answer ends."""
    done = chat("one", "/stats", "two", args=("--json",))
    first, second = map(json.loads, done.out.decode().splitlines())
    assert first["usage"]["completion_tokens"] <= 6 and first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] > 0


def test_json_of_an_error_is_one_object_and_the_conversation_goes_on(chat):
    """A program that waits for the answer to a question which was refused."""
    done = chat("long " * 50, "hi", args=("-c", "64", "--json"))
    first, second = map(json.loads, done.out.decode().splitlines())
    assert first["error"]["type"] == "ContextLengthError" and first["error"]["exit_code"] == 7
    assert second["text"] is not None and done.code == 7


def test_model_without_template_is_refused(cli, model):
    """A chat with a base model that answers with nonsense."""
    done = cli("chat", model, stdin=b"hi\n")
    assert done.code == 2 and "no chat template" in done.sentence


def test_input_that_is_not_utf8_is_left_out(cli, chat_model, tmp_path):
    """One stray byte that ends the conversation, or a block whose rest becomes questions."""
    path = tmp_path / "a.json"
    block = b'"""first\n\xff\nlast"""\n'
    done = cli(
        "chat", chat_model, *ARGS, stdin=b"one\n\xff\n" + block + f"/save {path}\n".encode()
    )
    assert done.code == 2 and done.err.count("not UTF-8") == 2 and "Traceback" not in done.err
    assert [m["content"] for m in saved(path) if m["role"] == "user"] == ["one"]


@pytest.mark.parametrize(
    "line",
    [
        "/save " + "x" * 300,
        "/save ~nosuchuser/x",
        "/load ~nosuchuser/x",
        "/save a\0b",
        "/load a\0b",
        "/load {deep}",
        "/save {deep}",
        "/load {pipe}",
        "/save {pipe}",
        "/load {folder}",
        "/save {folder}",
        "/load {half}",
    ],
)
def test_no_command_ends_the_conversation(chat, tmp_path, line):
    """A name that cannot be one, a file that is none: the conversation is lost."""
    deep, pipe, half = tmp_path / "deep", tmp_path / "pipe", tmp_path / "half"
    deep.write_text("[" * 100_000)
    half.write_text('[{"role": "user", "content": "\\ud800"}]')
    os.mkfifo(pipe)
    line = line.format(deep=deep, pipe=pipe, folder=tmp_path, half=half)
    path = tmp_path / "a.json"
    done = chat("one", line, "two", f"/save {path}")
    assert done.code == 2 and done.err.count("error: ") == 1 and "internal" not in done.err
    assert [m["content"] for m in saved(path) if m["role"] == "user"] == ["one", "two"]


def test_save_touches_no_other_file(chat, tmp_path):
    """A neighbour that happens to have the name of the half-written file."""
    neighbour, path = tmp_path / "a.json.part", tmp_path / "a.json"
    neighbour.write_text("mine")
    chat("one", f"/save {path}", f"/save {path}")
    assert neighbour.read_text() == "mine" and sorted(tmp_path.iterdir()) == [path, neighbour]
    assert path.stat().st_mode & 0o600 == 0o600


def test_loaded_messages_nested_too_deeply_are_refused_or_answered(chat, tmp_path):
    """A field that nobody reads and that exhausts the stack when the template walks through."""
    path, kept = tmp_path / "deep.json", tmp_path / "a.json"
    message = '{"role": "user", "content": "a", "extra": ' + "[" * 900 + "]" * 900 + "}"
    path.write_text(f"[{message}]")
    done = chat(f"/load {path}", "one", "/clear", "two", f"/save {kept}")
    assert "internal error" not in done.err and "Traceback" not in done.err
    assert [m["content"] for m in saved(kept) if m["role"] == "user"] == ["two"]


def test_full_context_names_clear(chat):
    """A user whose conversation no longer fits and who does not know how to go on."""
    done = chat("long " * 50, "/clear", "hi", args=("-c", "64"))
    assert "/clear forgets" in done.err and done.out


def test_closed_pipe_ends_quietly(chat_model):
    """`cudflash chat < questions | head -1` that complains."""
    process = program("chat", chat_model, *ARGS, "-q", stdin=-1)
    process.stdout.close()
    process.stdout = None
    done = finish(process, stdin=b"one\n" * 50)
    assert done.code == 141 and done.err == ""


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, *args):
        import pty

        self.fd, side = pty.openpty()
        self.process = program(
            *args, stdin=side, stdout=side, stderr=side, start_new_session=True,
            env={"TERM": "xterm", "NO_COLOR": "1"},
        )  # fmt: skip
        os.close(side)
        self.text = ""

    def wait_for(self, words, seconds=120):
        """Read until the words have been shown; what was before them is dropped."""
        self._read_until(lambda: words in self.text, seconds)
        self.text = self.text.split(words, 1)[1]

    def wait_for_more(self, n_chars, seconds=120):
        """Read until this much has been shown."""
        self._read_until(lambda: len(self.text) >= n_chars, seconds)

    def _read_until(self, done, seconds):
        deadline = time.monotonic() + seconds
        while not done():
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"nothing more was shown after {self.text!r}"
            self.text += os.read(self.fd, 4096).decode("utf-8", "replace")

    def type(self, text):
        """Press keys."""
        os.write(self.fd, text.encode())

    def interrupt(self):
        """Press Ctrl-C (the signal; the terminal is not the program's controlling one).

        Nobody presses it in the instant between the prompt and the read, where Python would see it
        only with the next key.
        """
        time.sleep(0.5)
        self.process.send_signal(signal.SIGINT)

    def close(self):
        """End it for good."""
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(chat_model):
    """A conversation whose answers do not end by themselves."""
    shown = Terminal("chat", chat_model, "--temp", "0", "-c", "20000", "-l", "2-inf")
    yield shown
    shown.close()


def test_ctrl_c_stops_the_answer_and_twice_at_the_prompt_leaves(terminal):
    """Ctrl-C during a long answer that ends the whole conversation, or cannot end it at all."""
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("one\r\n")
    terminal.wait_for_more(8)  # the answer is being written
    terminal.interrupt()
    terminal.wait_for("ended by cancelled")
    terminal.wait_for("> ")
    terminal.type("/stats\n")
    terminal.wait_for("ended by cancelled")
    terminal.wait_for("> ")
    terminal.interrupt()
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for("> ")
    assert terminal.process.poll() is None
    terminal.interrupt()
    assert terminal.process.wait(timeout=30) == 0


def test_end_of_input_leaves_a_terminal(terminal):
    """Ctrl-D that is ignored."""
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=30) == 0
