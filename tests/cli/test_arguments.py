"""How arguments are understood, refused and explained."""

import os
import re
import shutil
import subprocess
import sys

import click
import pytest

from cudflash import errors
from cudflash.cli import COMMANDS, EXIT_CODES, cli as group
from cudflash.cli.common import unescape
from tests.cli.conftest import finish, program


def test_help_is_light_and_names_every_command():
    """A help that imports Numba, NumPy or Rich: every completion and typo would cost seconds."""
    code = (
        "import sys, cudflash.cli as c; code = c.main(['--help'])\n"
        "heavy = {'numba', 'llvmlite', 'numpy', 'rich', 'jinja2', 'tokenizers', 'cupy'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_exits_with_0(cli, name):
    """A command whose options cannot even be built."""
    for flag in ("--help", "-h"):
        done = cli(name, flag)
        assert done.code == 0 and done.out.startswith(b"Usage: cudflash " + name.encode())


def test_no_arguments_show_the_help_as_an_error(cli):
    """A script that calls the bare program would go on as if something had run."""
    done = cli()
    assert done.code == 2 and done.out == b"" and "Commands:" in done.err


def test_exit_codes_of_the_help_are_those_of_the_errors():
    """An exit code that is documented as another one."""
    shown = {int(code) for code in re.findall(r"^ *(\d+)  ", EXIT_CODES, re.MULTILINE)}
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    assert shown == {0, 130, 141} | {kind.exit_code for kind in kinds}


def test_version_names_what_numbers_depend_on(cli):
    """A bug report without versions."""
    done = cli("--version")
    assert done.code == 0
    assert re.fullmatch(rb"cudflash [\d.]+ \(python [\d.]+, numpy [^)]*\)\n", done.out)


@pytest.mark.parametrize(
    "args, hint",
    [
        (["generate", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "--max-token", "1"], "did you mean --max-tokens?"),
        (["chat", "--sytem", "x"], "did you mean --system?"),
        (["generate", "-ngl", "99"], "--device"),
        (["generate", "--n-gpu-layers", "99"], "--device"),
        (["generate", "-ctv", "q8_0"], "--kv-type"),
        (["generate", "--draft-min", "16"], "draft's"),
        (["generate", "-cnv"], "chat"),
        (["generate", "-hf", "a/b"], "--model"),
        (["generate", "-xyz"], "--help"),
        (["inspect", "--jsn", "x"], "did you mean --json?"),
        (["genrate"], "did you mean 'generate'?"),
        (["run", "model.gguf"], "cudflash generate"),
        (["serve"], "no server"),
        (["nonsense"], "expected one of demo"),
    ],
)
def test_unknown_words_get_the_nearest_match_or_what_to_do(cli, args, hint):
    """A pasted llama.cpp command that dies without saying what to type instead."""
    done = cli(*args)
    assert done.code == 2 and done.out == b""
    assert hint in done.sentence


@pytest.mark.parametrize(
    "args, words",
    [
        (["--temp", "-1"], "temperature"),
        (["--temp", "nan"], "temperature"),
        (["--temp", "warm"], "--temp"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-k", "-2"], "top_k"),
        (["--mirostat", "3"], "mirostat"),
        (["--repeat-penalty", "0"], "repeat_penalty"),
        (["-n", "-3"], "--max-tokens"),
        (["-n", "x"], "--max-tokens"),
        (["-n"], "-n"),
        (["-t", "0"], "--threads"),
        (["-c", "-1"], "n_ctx"),
        (["-s", "-2"], "seed"),
        (["--kv-type", "q9"], "f16"),
        (["--activations", "int4"], "int8x2"),
        (["--device", "tpu"], "cpu"),
        (["--logit-bias", "12"], "--logit-bias"),
        (["--logit-bias", "1+1e999"], "logit_bias"),
        (["--logit-bias", "5+1e39"], "float32"),
        (["--temp", "1e39"], "float32"),
        (["--logprobs", "3"], "--json"),
        (["--logprobs", "-1", "--json"], "logprobs"),
        (["--stop", ""], "stop string"),
        (["--stop-token", "320"], "320"),
        (["--draft", "d.gguf", "--no-draft"], "--no-draft"),
        (["--raw", "--system", "x"], "--system"),
        (["--think"], "--chat"),
        (["--chat", "--chat-template-kwargs", "{"], "JSON"),
        (["--chat", "--chat-template-kwargs", "[]"], "object"),
        (["--chat", "--chat-template-kwargs", "[" * 100_000], "JSON"),
        (["--chat", "--chat-template-kwargs", '{"messages": 1}'], "messages"),
        (["stray"], "stray"),
        (["-f", "also"], "twice"),
        (["-"], "twice"),
    ],
)
def test_bad_values_are_one_sentence_and_exit_2(cli, model, args, words):
    """A traceback, or a value that is silently replaced by another."""
    done = cli("generate", "-m", model, "-p", "hello", *args)
    assert done.code == 2 and words in done.sentence
    if "--json" not in args:
        assert done.out == b""


@pytest.mark.parametrize(
    "args, kind, code",
    [
        (["generate", "-p", "x", "--temp", "-1"], "UsageError", 2),
        (["generate", "-p", "x", "--nonsense"], "UsageError", 2),
        (["generate", "-p", "x", "-n", "many"], "UsageError", 2),
        (["generate", "-p", "x " * 99, "-c", "64"], "ContextLengthError", 7),
        (["inspect", "extra", "more"], "UsageError", 2),
        (["plan", "--memory", "much"], "UsageError", 2),
        (["tokenize", "-p", "x", "--decode"], "UsageError", 2),
        (["tokenize", "-p", "999999", "--decode"], "UsageError", 2),
    ],
)
def test_json_of_an_error_is_one_object(cli, model, args, kind, code):
    """A program that reads the object and gets an empty stdout for an error."""
    done = cli(*args, "-m", model, "--json")
    assert done.code == code and done.out.count(b"\n") == 1
    error = done.json["error"]
    assert set(done.json) == {"error"} and error["type"] == kind and error["exit_code"] == code
    assert done.sentence == "error: " + error["message"]


def test_json_of_a_damaged_file_and_of_a_bug_are_objects(cli, model, tmp_path, monkeypatch):
    """An error of another origin that leaves stdout empty."""
    (tmp_path / "a.gguf").write_bytes(b"hello")
    assert cli("inspect", tmp_path / "a.gguf", "--json").json["error"]["type"] == "FormatError"

    def broken(path):
        raise ZeroDivisionError("bug")

    monkeypatch.setattr("cudflash.loader.gguf.open_gguf", broken)
    done = cli("inspect", model, "--json")
    assert done.code == 1 and done.json["error"]["type"] == "InternalError"


def test_json_has_no_second_object_after_a_result(cli, model):
    """An error after the result that takes its place on the last line."""
    done = cli("plan", model, "--memory", "1K", "--json")
    assert done.code == 5 and "total" in done.json and done.out.count(b"\n") == 1


@pytest.mark.parametrize("option", ["-p", "--stop", "--system", "--dry-sequence-breaker"])
def test_options_that_are_not_utf8_are_refused_before_the_model_is_read(option):
    """Half a character that becomes part of a prompt, or a stop string that never matches."""
    prompt = [] if option == "-p" else ["-p", "a"]
    command = [sys.executable, "-m", "cudflash", "generate", "no.gguf", *prompt, option]
    done = subprocess.run(
        [*map(os.fsencode, command), b"a\xff"], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 2 and b"is not UTF-8" in done.stderr, done.stderr
    assert done.stderr.count(b"\n") == 1


def test_empty_prompt_is_refused_before_weights_are_read(cli, model, monkeypatch):
    """Minutes of loading for a prompt that was a forgotten variable of a script."""
    from cudflash.loader.tokenizer import Tokenizer

    assert cli("generate", model, "-p", "", "-n", 1).code == 0  # this model begins with a BOS
    made = Tokenizer.from_gguf

    def without_bos(gguf):
        tokenizer = made(gguf)
        tokenizer.add_bos = False
        return tokenizer

    monkeypatch.setattr(Tokenizer, "from_gguf", without_bos)
    monkeypatch.setattr("cudflash.load", None)  # any attempt to load fails
    done = cli("generate", model, "-p", "")
    assert done.code == 2 and "no tokens" in done.sentence


def test_values_may_begin_with_a_dash(cli, model):
    """A prompt such as "-ngl" taken for an option."""
    done = cli("tokenize", "-m", model, "-p", "-ngl", "--json")
    assert done.code == 0 and "".join(t["text"] for t in done.json["tokens"][1:]) == " -ngl"


def test_flags_may_share_a_dash_and_numbers_may_be_glued(cli, model):
    """The strict reading of -ngl must not break -qe and -n3."""
    done = cli("generate", "-m", model, "-p", r"a\tb", "-qe", "-n3", "--temp=0", "--json")
    assert done.code == 0 and done.json["usage"]["completion_tokens"] == 3
    assert done.err == ""


@pytest.mark.parametrize("before", [True, False])
def test_output_options_may_stand_on_both_sides_of_the_command(cli, model, before):
    """`cudflash -q generate` and `cudflash generate -q` must mean the same."""
    command = ["generate", "-m", model, "-p", "hello", "-n", "1"]
    done = cli(*(["-q", *command] if before else [*command, "-q"]))
    assert done.code == 0 and done.err == ""


def test_prompt_comes_from_text_file_dash_or_pipe_with_the_same_ids(cli, model, tmp_path):
    """A way in that adds or loses a newline: the same text would give another answer."""
    (tmp_path / "prompt.txt").write_bytes(b"two\nlines\n")
    ways = [
        cli("tokenize", model, "-p", "two\nlines", "--ids"),
        cli("tokenize", model, "-e", "-p", r"two\nlines", "--ids"),
        cli("tokenize", model, "-f", tmp_path / "prompt.txt", "--ids"),
        cli("tokenize", model, "-f", "-", "--ids", stdin=b"two\nlines\n"),
        cli("tokenize", model, "-", "--ids", stdin=b"two\nlines\n"),
        cli("tokenize", model, "--ids", stdin=b"two\nlines\n"),
        cli("tokenize", "-m", model, "--ids", "-", stdin=b"two\nlines"),
    ]
    assert len({way.out for way in ways}) == 1 and ways[0].out.startswith(b"[1, ")


def test_only_one_newline_is_dropped(cli, model):
    """An input that ends with an empty line loses it."""
    one, two = (cli("tokenize", model, "--ids", stdin=text).out for text in (b"a\n", b"a\n\n"))
    assert one != two


@pytest.mark.parametrize(
    "args, stdin, words",
    [
        (["-f", "no/such/file"], b"", "no/such/file"),
        (["-f", "."], b"", "cannot be read"),
        ([], b"\xff\xfe", "UTF-8"),
    ],
)
def test_unreadable_prompts_are_one_sentence(cli, model, args, stdin, words):
    """A traceback of open() or decode()."""
    done = cli("generate", model, *args, stdin=stdin)
    assert done.code == 2 and words in done.sentence


def test_file_names_are_shown_on_one_line(cli, model, tmp_path):
    """A name that adds lines of its own to what the program says, or colours them."""
    path = tmp_path / "a\nb\x1b[1m.gguf"
    shutil.copy(model, path)
    done = cli("generate", path, "-p", "a", "-n", 1)
    assert done.code == 0 and "a\\nb\\x1b[1m.gguf (llama)" in done.err and "\x1b" not in done.err
    assert "a\\nb\\x1b[1m.gguf/x: cannot" in cli("inspect", str(path) + "/x").sentence


@pytest.mark.parametrize("command", ["inspect", "plan", "tokenize", "generate"])
def test_fifo_as_model_is_refused_at_once(cli, tmp_path, command):
    """A program that waits for ever, without a word."""
    os.mkfifo(tmp_path / "a.gguf")
    prompt = ["-p", "x"] if command in ("tokenize", "generate") else []
    done = cli(command, tmp_path / "a.gguf", *prompt)
    assert done.code == 3 and "not a regular file" in done.sentence


def test_no_model_and_no_prompt_are_said(cli, model, monkeypatch):
    """A program that waits for input on a terminal without saying so."""
    assert "--model" in cli("generate", "-p", "x").sentence
    monkeypatch.setattr("cudflash.cli.common.is_terminal", lambda stream: True)
    done = cli("generate", model)
    assert done.code == 2 and "--prompt" in done.sentence


def test_unescape_leaves_unknown_escapes():
    """A Windows path that loses its backslashes."""
    assert unescape(r"a\nb\tc\\d\"e\'f\0g\qh" + "\\") == "a\nb\tc\\d\"e'f\0g\\qh\\"


def test_aliases_of_llamacpp_exist():
    """A flag people type without reading (the list of the design) that is missing."""
    with click.Context(group) as ctx:
        params = group.get_command(ctx, "generate").params
    names = {name for param in params for name in param.opts}
    wanted = """-m --model -md --draft --no-draft -c --ctx-size -n --max-tokens --n-predict --predict
        -p --prompt -f --file -s --seed -t --threads --temp --temperature --top-k --top-p --min-p
        --typical --top-n-sigma --top-nsigma --xtc-probability --xtc-threshold --dynatemp-range
        --dynatemp-exp --repeat-penalty --repeat-last-n --frequency-penalty --presence-penalty
        --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --mirostat
        --dry-sequence-breaker --mirostat-lr --mirostat-ent --logit-bias -l --stop -r
        --reverse-prompt --stop-token --logprobs --json --no-stream --chat --raw --system -ctk
        --cache-type-k --kv-type --activations --device -q --quiet -v --verbose --no-color
        --ignore-eos -e --escape --think --chat-template-kwargs --model-draft --draft-max
        --draft-n --spec-draft-n-max --verify-length --speculative --accept --require-draft
        --receipt --draft-window --draft-sink --identity"""
    assert set(wanted.split()) <= names | {"--raw", "--no-think"}


def test_completion_offers_commands_and_options():
    """A completion that is documented and does nothing."""
    env = {"_CUDFLASH_COMPLETE": "bash_complete", "COMP_WORDS": "cudflash gen", "COMP_CWORD": "1"}
    assert finish(program(env=env)).out.decode().split("\n")[0] == "plain,generate"
    env |= {"COMP_WORDS": "cudflash generate --min", "COMP_CWORD": "2"}
    assert "plain,--min-p" in finish(program(env=env)).out.decode()
    env = {"_CUDFLASH_COMPLETE": "zsh_source"}
    assert b"#compdef cudflash" in finish(program(env=env)).out


def test_internal_errors_are_one_sentence_and_a_traceback_with_v(cli, model, monkeypatch):
    """A bug of ours shown as a page of Python, or hidden so that nobody can report it."""

    def broken(path):
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("cudflash.loader.gguf.open_gguf", broken)
    done = cli("inspect", model)
    assert done.code == 1 and "ZeroDivisionError: first line second line" in done.sentence
    loud = cli("inspect", model, "-v")
    assert loud.code == 1 and "Traceback" in loud.err and "broken" in loud.err


def test_full_disk_is_one_sentence(model):
    """A second complaint of Python at exit about the same unwritable stream."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:
        done = finish(program("inspect", model, stdout=full))
    assert done.code == 1 and "No space left" in done.sentence
