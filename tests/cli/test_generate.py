"""`cudflash generate`: the answer, and nothing else, on stdout."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

import cudflash
from cudflash.cli import interrupts
from tests.cli.conftest import finish, program
from tests.helpers.engines import engine

GREEDY = ("--temp", "0")
PROMPT = ("-p", "hello world")


@pytest.fixture(scope="module")
def greedy():
    """The greedy answer of the API to the prompt, 12 tokens."""
    sampling = cudflash.SamplingConfig(temperature=0)
    return engine("llama").generate("hello world", max_tokens=12, sampling=sampling)


def test_stdout_is_exactly_the_answer_of_the_api(cli, model, greedy):
    """A banner, a newline or a colour code between the answer and what reads it."""
    done = cli("generate", "-m", model, *PROMPT, "-n", 12, *GREEDY)
    assert done.code == 0 and done.out == greedy.text.encode()
    assert "\x1b" not in done.err and "\r" not in done.err


def test_first_line_tells_what_runs_where_and_why(cli, model):
    """A user who believes that a draft or a GPU is at work."""
    done = cli("generate", model, *PROMPT, "-n", 1, "-c", 256, "-t", 1)
    first = next(line for line in done.err.splitlines() if "compil" not in line)
    for words in ("llama-kq.gguf", "cpu", "1 thread ", "CuPy", "no draft: ", "context 256",
                  "KV f16", "activations int8x2"):  # fmt: skip
        assert words in first


def test_quiet_leaves_stderr_empty(cli, model, greedy):
    """A cron job that mails the statistics of every run."""
    done = cli("generate", model, *PROMPT, "-n", 12, *GREEDY, "-q")
    assert done.err == "" and done.out == greedy.text.encode()


def test_json_is_the_result_on_the_last_line(cli, model, greedy):
    """Field names that differ from the API's, or text mixed into the object."""
    done = cli("generate", model, *PROMPT, "-n", 12, *GREEDY, "--json", "--logprobs", 2)
    assert done.out.count(b"\n") == 1
    expected = greedy.to_dict()
    found = done.json
    assert found.keys() == expected.keys()
    for name in ("text", "tokens", "usage", "finish_reason", "stopped_by"):
        assert found[name] == expected[name], name
    assert found["receipt"]["target"] == expected["receipt"]["target"]
    assert [e["token"] for e in found["logprobs"]] == found["tokens"]
    assert all(len(entry["top"]) == 2 for entry in found["logprobs"])


def test_no_stream_writes_the_same_bytes(cli, model, greedy):
    """Text that is lost or doubled where streaming is off."""
    done = cli("generate", model, *PROMPT, "-n", 12, *GREEDY, "--no-stream")
    assert done.out == greedy.text.encode()


@pytest.mark.parametrize("n", [0, 1, 2, 7])
@pytest.mark.parametrize("name", ["-n", "--n-predict", "--max-new-tokens"])
def test_max_tokens_is_exact(cli, model, n, name):
    """One token more or less than asked for."""
    found = cli("generate", model, *PROMPT, name, n, "--ignore-eos", "--json").json
    assert len(found["tokens"]) == found["usage"]["completion_tokens"] == n
    assert found["finish_reason"] == "length"


@pytest.mark.parametrize("n", [(), ("-n", -1), ("-n", -2)])
def test_without_a_limit_the_answer_fills_the_context(cli, model, n):
    """An answer cut at a number nobody chose, or a context error for having given none."""
    found = cli("generate", model, *PROMPT, *n, "-c", 32, "--ignore-eos", "--json").json
    usage = found["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 32


def test_context_0_is_the_models_own(cli, model):
    """llama.cpp's -c 0."""
    found = cli("generate", model, *PROMPT, "-n", 1, "-c", 0, "--json").json
    assert found["receipt"]["n_ctx"] == 512


def test_seed_decides_the_answer(cli, model):
    """A seed without effect, or one that the receipt does not tell."""
    runs = [
        cli("generate", model, *PROMPT, "-n", 12, "--temp", 2, "--top-k", 0, "-s", seed, "--json")
        for seed in (1, 1, 2, -1)
    ]
    one, again, two, drawn = (run.json for run in runs)
    assert one["tokens"] == again["tokens"] != two["tokens"]
    assert (one["receipt"]["seed"], two["receipt"]["seed"]) == (1, 2)
    assert drawn["receipt"]["seed"] >= 0


def test_every_sampling_option_reaches_the_chain(cli, model):
    """An option that is parsed and dropped; aliases must land in the same field."""
    given = {
        "temperature": ("--temperature", 0.7), "top_k": ("--top-k", 17), "top_p": ("--top-p", 0.9),
        "min_p": ("--min-p", 0.02), "typical_p": ("--typical", 0.8),
        "top_n_sigma": ("--top-nsigma", 2.5), "xtc_probability": ("--xtc-probability", 0.25),
        "xtc_threshold": ("--xtc-threshold", 0.2), "dynatemp_range": ("--dynatemp-range", 0.3),
        "dynatemp_exponent": ("--dynatemp-exp", 1.5), "repeat_penalty": ("--repeat-penalty", 1.25),
        "repeat_last_n": ("--repeat-last-n", 32), "frequency_penalty": ("--frequency-penalty", 0.5),
        "presence_penalty": ("--presence-penalty", -0.5), "dry_multiplier": ("--dry-multiplier", 1),
        "dry_base": ("--dry-base", 2), "dry_allowed_length": ("--dry-allowed-length", 3),
        "dry_penalty_last_n": ("--dry-penalty-last-n", 16), "mirostat": ("--mirostat", 2),
        "mirostat_tau": ("--mirostat-ent", 4), "mirostat_eta": ("--mirostat-lr", 0.2),
        "min_keep": ("--min-keep", 2),
    }  # fmt: skip
    args = [arg for pair in given.values() for arg in pair]
    args += ["--dry-sequence-breaker", r"\n", "--dry-sequence-breaker", "x", "-l", "5+1.5",
             "--logit-bias", "6-inf", "-l", "7=-2"]  # fmt: skip
    found = cli("generate", model, *PROMPT, "-n", 2, "--json", *args).json["receipt"]["sampling"]
    assert {name: found[name] for name in given} == {n: value for n, (_, value) in given.items()}
    assert found["dry_sequence_breakers"] == ["\n", "x"]
    assert found["logit_bias"] == {"5": 1.5, "6": "-inf", "7": -2.0}


def test_stops_end_the_answer(cli, model, greedy):
    """A stop string that is printed, or a stop token that is ignored."""
    text = greedy.text
    stop = text[3:5]
    done = cli("generate", model, *PROMPT, "-n", 12, *GREEDY, "-r", "never", "--stop", stop)
    assert done.out == text[: text.index(stop)].encode() and f"stop at {stop!r}" in done.err
    token = greedy.tokens[4]
    found = cli("generate", model, *PROMPT, *GREEDY, "--stop-token", token, "--json").json
    assert found["stopped_by"] == token == found["tokens"][-1]
    assert found["tokens"] == list(greedy.tokens[: greedy.tokens.index(token) + 1])


def test_stop_strings_know_escapes_only_when_asked(cli, model):
    """A backslash in a stop string that silently means something else."""
    args = ("generate", model, "-n", 1, "--json", "--stop", r"\n")
    raw, escaped = (cli(*args, *more, *PROMPT).json["receipt"]["stop"] for more in ([], ["-e"]))
    assert raw["strings"] == [r"\n"] and escaped["strings"] == ["\n"]


def test_chat_goes_through_the_template(cli, chat_model):
    """A question that is merely continued, or a system prompt that is dropped."""
    one = engine("llama")
    args = ("generate", chat_model, "-p", "hi", "-n", 4, *GREEDY, "--json", "-c", 512)
    system = cli(*args, "--system", "be brief").json
    text = "<system>be brief\n<user>hi\n<assistant>"
    assert system["usage"]["prompt_tokens"] == len(one.tokenizer.encode(text))
    plain = cli(*args, "--chat").json
    assert plain["usage"]["prompt_tokens"] == len(one.tokenizer.encode("<user>hi\n<assistant>"))
    extra = cli(*args, "--chat", "--think", "--chat-template-kwargs", '{"x": 1}').json
    assert extra["tokens"] == plain["tokens"]
    hinted, silent = (cli(*args, *more).err for more in ([], ["--raw"]))
    assert "--chat asks" in hinted and "--chat asks" not in silent


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["--chat"], 2, "no chat template"),
        (["--draft", "some-draft.gguf"], 3, "some-draft.gguf"),
        (["--device", "cuda"], 6, "cuda"),
        (["-n", "40", "-c", "32"], 7, "32"),
        (["-c", "4"], 7, "context holds 4"),
    ],
)
def test_errors_of_the_api_keep_their_exit_code(cli, model, args, code, words):
    """A script that cannot tell a full context from a broken file."""
    done = cli("generate", model, *PROMPT, *args)
    assert done.code == code and done.out == b"" and words in done.sentence


def test_files_that_cannot_be_run_exit_with_3(cli, tmp_path):
    """A missing, foreign or truncated file that ends in a traceback."""
    for content in (None, b"", b"GGUF", b"#!/bin/sh\n" * 9):
        path = tmp_path / "file.gguf"
        if content is not None:
            path.write_bytes(content)
        done = cli("generate", path, *PROMPT)
        assert done.code == 3 and str(path) in done.sentence


def test_running_out_of_memory_is_exit_5(cli, model, monkeypatch):
    """A MemoryError shown as an internal error."""

    def load(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(cudflash, "load", load)
    done = cli("generate", model, *PROMPT)
    assert done.code == 5 and "plan" in done.sentence


def test_text_is_streamed_token_by_token(model):
    """An answer that stays in a buffer until it is complete."""
    process = program("generate", model, *PROMPT, "-c", 20000, "--ignore-eos", *GREEDY, "-q")
    try:
        assert process.stdout.read(8)  # blocks for ever if nothing is flushed before the end
        assert process.poll() is None
    finally:
        process.kill()
        finish(process)


def test_ctrl_c_keeps_what_was_produced(model):
    """Ctrl-C that loses the text or shows a traceback."""
    process = program("generate", model, *PROMPT, "-c", 20000, "--ignore-eos", *GREEDY)
    first = process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130 and "ended by cancelled" in done.err
    assert "Traceback" not in done.err and len(first + done.out) >= 8


def test_ctrl_c_with_json_still_gives_the_object(model, tmp_path):
    """A cancelled answer whose result is not written."""
    events = tmp_path / "events"
    process = program("generate", model, *PROMPT, "-c", 20000, "--ignore-eos", *GREEDY, "--json",
                      "--events", events)  # fmt: skip
    while not events.exists() or b'"token"' not in events.read_bytes():  # the answer has begun
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130 and done.json["finish_reason"] == "cancelled"
    assert len(done.json["tokens"]) == done.json["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_ctrl_c_while_the_object_is_being_written_leaves_it_whole(model, unbuffered):
    """An object cut where a pipe is full, or an error object after it: two results for one run."""
    process = program("generate", model, *PROMPT, "-n", 400, "--ignore-eos", *GREEDY, "--json",
                      "--logprobs", 20, env={"PYTHONUNBUFFERED": unbuffered})  # fmt: skip
    select.select([process.stdout], [], [], 120)
    time.sleep(0.5)  # the pipe is full, nobody reads
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.poll() is None
    done = finish(process)
    assert done.code == 130 and done.sentence == "error: interrupted"
    assert len(done.out) > 1 << 17 and done.out.count(b"\n") == 1
    assert len(done.json["tokens"]) == 400


def test_ctrl_c_before_the_answer_is_quiet(tmp_path):
    """A traceback when a wrong file is given and the user changes his mind while typing."""
    process = program("generate", "model.gguf", stdin=-1)
    process.stdin.write(b"x" * 300_000)  # more than a pipe holds: it is being read when this ends
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130 and done.sentence == "error: interrupted"


@pytest.mark.parametrize("entry, last", [("script", True), ("main", False)])
def test_ctrl_c_after_the_end_does_not_change_it(entry, last):
    """One press more than needed, while the process is leaving: killed instead of its exit code."""
    code = (
        f"import os, signal, sys, cudflash.cli as c; code = c.{entry}(['--no-such'])\n"
        "print(signal.getsignal(signal.SIGINT) == signal.default_int_handler)\n"
        "sys.stderr.flush(); os.kill(os.getpid(), signal.SIGINT); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if last:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    else:  # a program that calls main() keeps its Ctrl-C
        assert done.stdout.endswith("True\n") and "KeyboardInterrupt" in done.stderr


def test_ctrl_c_while_the_program_is_imported_is_quiet(tmp_path):
    """A traceback of an import when a command is taken back at once: the press comes while the first
    module after the entry is looked for."""
    code = (
        "import os, signal, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cudflash.cli':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
        "from cudflash.__main__ import script\n"
        "sys.exit(script())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("delay", [0.0, 0.7])
def test_ctrl_c_during_the_first_compilation_ends_before_the_next_kernel(model, tmp_path, delay):
    """An interrupt lost in a callback of the compiler, or one that waits for every kernel."""
    env = {"CUDFLASH_CACHE": str(tmp_path)}
    process = program("generate", model, *PROMPT, "-n", 4, *GREEDY, env=env)
    while b"compiling kernels" not in process.stderr.readline():
        pass
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130, done.err
    assert "ignored" not in done.err and "Traceback" not in done.err
    kept = list(tmp_path.rglob("*.o"))
    assert len(kept) <= 2  # the kernel that was being compiled, and one before it


def test_interrupts_are_kept_inside_the_compiler_only():
    """A Ctrl-C that is kept where nothing raises it, or raised where it is lost."""
    frame = sys._getframe()
    assert not interrupts.keep(frame)
    scope = {"__name__": "cudflash.ops.cpu.jit", "keep": interrupts.keep, "sys": sys}
    exec("def compiled(call):\n    return call()", scope)
    assert scope["compiled"](lambda: interrupts.keep(sys._getframe()))
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_kept()
    interrupts.raise_kept()


def test_ctrl_c_before_a_kernel_of_the_answer_keeps_its_text(cli, model, greedy, monkeypatch):
    """A kernel first needed in the middle of an answer: what came before it is lost."""
    import cudflash.generation as generation

    decode = generation.Generation._decode

    def interrupted(self):
        for n, event in enumerate(decode(self)):
            yield event
            if n == 4:
                os.kill(os.getpid(), signal.SIGINT)
                interrupts.raise_kept("a kernel")

    monkeypatch.setattr(generation.Generation, "_decode", interrupted)
    done = cli("generate", model, *PROMPT, "-n", 12, *GREEDY)
    assert done.code == 130 and "ended by cancelled" in done.err
    assert done.out and greedy.text.encode().startswith(done.out)
    assert len(done.out) < len(greedy.text.encode())


@pytest.mark.parametrize("args", [(), ("--no-stream", "-n", 400), ("--json", "-n", 400)])
def test_closed_pipe_ends_quietly(model, args):
    """`cudflash generate | head -1` that complains, or works on for nobody."""
    command = ("generate", model, *PROMPT, "-c", 20000, "--ignore-eos", *GREEDY, "-q", *args)
    process = program(*command)
    if not args:
        process.stdout.read(4)
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_closed_streams_do_not_matter(model):
    """A daemon without streams that dies in the first write."""
    command = f"exec {sys.executable} -m cudflash tokenize {model} -p hi <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=120).returncode == 0
