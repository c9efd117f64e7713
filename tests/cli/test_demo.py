"""The word demo wherever a model file is expected, and the command that shows the proof."""

import json
import os
import signal
import subprocess
import sys

import pytest

import cudflash
from cudflash.cli import main
from cudflash.demo import demo_files, demo_prompt, resolve_draft, resolve_model
from cudflash.errors import UsageError
from cudflash.loader.gguf import open_gguf
from cudflash.receipt import read_receipt

SHORT = ["demo", "-n", "24", "--repeats", "1", "--threads", "1"]


def test_files_are_in_the_package_and_small():
    """Catches a pair that is not shipped, and one that makes the package heavy."""
    target, drafts = demo_files()
    sizes = [os.path.getsize(path) for path in (target, *drafts.values())]
    assert set(drafts) == {"dflash", "dflash2"} and sum(sizes) <= 16 * 2**20
    assert open_gguf(target).metadata["general.architecture"] == "muse-glimmer"
    assert len(demo_prompt()) > 500


def test_only_the_word_is_the_pair(tmp_path, monkeypatch):
    """Catches a file of the user that is hidden by the word, or kinds that are guessed."""
    target, drafts = demo_files()
    assert resolve_model("demo") == target and resolve_model("./demo") == "./demo"
    assert resolve_draft("demo:dflash") == drafts["dflash"] and resolve_draft("demo") in drafts.values()
    assert resolve_draft("a:demo") == "a:demo" and resolve_draft(None) is None
    with pytest.raises(UsageError, match="demo:dflash or demo:dflash2"):
        resolve_draft("demo:mtp")


def test_python_takes_the_word():
    """Catches a word that only the command line knows; the drafts run as trained, without a sink."""
    with cudflash.load("demo", "demo:dflash", device="cpu", n_ctx=64, threads=1) as one:
        assert one.draft_config.kind == "dflash" and one.draft_config.sink == 0
        plain = one.generate("def ", max_tokens=8, seed=1, speculative="off")
        assert one.generate("def ", max_tokens=8, seed=1, speculative="on").tokens == plain.tokens
    with cudflash.load("demo", device="cpu", n_ctx=64, threads=1) as one:
        assert one.draft_config is None


@pytest.mark.parametrize(
    "args",
    [
        ["inspect", "demo"], ["inspect", "demo", "demo:dflash2"], ["plan", "demo"],
        ["plan", "--model", "demo", "-md", "demo:dflash"], ["tokenize", "demo", "-p", "def"],
        ["identity", "demo", "--json"],
        ["generate", "demo", "-p", "def ", "-n", "4", "-t", "1"],
        ["generate", "-m", "demo", "-md", "demo:dflash", "-p", "def ", "-n", "4", "-t", "1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_commands_take_the_word(args, capsys):
    """Catches a command to which the word is a file that is not there."""
    assert main(args) == 0
    assert capsys.readouterr().out


def test_demo_shows_the_answer_and_proves_it(capsys, tmp_path):
    """Catches a proof that compares nothing, an answer mixed with notes, a speed that is not told."""
    assert main([*SHORT, "--receipt", str(tmp_path / "r.json")]) == 0
    out, err = capsys.readouterr()
    assert "drafted output equals plain output: 24 tokens, 0 differ" in err
    assert "proposals accepted" in err and "receipt: target" in err and "tokens/s drafted" in err
    receipt = read_receipt(tmp_path / "r.json")
    with cudflash.load("demo", device="cpu", threads=1) as one:
        plain = one.generate(
            demo_prompt(), max_tokens=24, ignore_eos=True,
            sampling=cudflash.SamplingConfig(temperature=0),
        )  # fmt: skip
    assert out == plain.text and receipt["speculative"]["used"]


def test_demo_json_is_one_object(capsys):
    """Catches text on stdout beside the object, or fields that cannot be read."""
    assert main([*SHORT, "--json", "-q", "-md", "demo:dflash", "--temp", "0.7"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["proof"] == {"tokens": 24, "answers": 3, "differ": 0} and not err
    assert found["speed"]["ratio"] > 0 and len(found["speed"]["plain_tps"]) == 1
    assert found["answer"]["receipt"]["draft"]["kind"] == "dflash"


def test_a_difference_is_an_error(monkeypatch, capsys):
    """Catches an exit code of 0 whatever the comparison says."""
    from cudflash.generation import Generation

    honest = Generation.result

    def lying(self):
        result = honest(self)
        if result.speculation["mode"] == "off":
            object.__setattr__(result, "tokens", (*result.tokens[:-1], result.tokens[-1] ^ 1))
        return result

    monkeypatch.setattr(Generation, "result", lying)
    assert main(SHORT) == 1
    assert "DIFFERS FROM plain output: 24 tokens, 2 differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, words",
    [
        (["demo", "-n", "2"], "at least 3"),
        (["demo", "--repeats", "0"], "at least 1"),
        (["demo", "--no-draft"], "leave --no-draft out"),
        (["demo", "-md", "demo:mtp"], "no draft 'mtp'"),
    ],
)
def test_what_makes_no_demo_is_refused(args, words, capsys):
    """Catches a proof of nothing."""
    assert main(args) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and pipes")
def test_ctrl_c_and_closed_pipes_end_it_quietly():
    """Catches a traceback, a proof after an interrupted answer, or an endless run."""
    command = [sys.executable, "-m", "cudflash", *SHORT[:1], "-n", "900", "--threads", "1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.read(1)  # the answer has begun
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130 and b"nothing was compared" in err
    assert b"Traceback" not in err and b"equals plain" not in err
    piped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    piped.stdout.read(1)
    piped.stdout.close()
    err = piped.stderr.read()
    assert piped.wait(timeout=120) == 141 and b"Traceback" not in err


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path):
    """Catches a demo that needs a cache."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    run = subprocess.run(
        [sys.executable, "-m", "cudflash", *SHORT], capture_output=True, timeout=300,
        env={**os.environ, "CUDFLASH_CACHE": str(blocked / "cache")},
    )  # fmt: skip
    assert run.returncode == 0 and b"0 differ" in run.stderr
