"""`cudflash inspect`: files of every kind, quickly, as text and as JSON."""

import subprocess
import sys
import time

import pytest

from tests.helpers import gguf_writer as w


@pytest.fixture
def big_vocabulary(tmp_path):
    """A sound model whose vocabulary has 250,000 tokens."""
    builder = w.tiny_model("llama")
    n_tokens = 250_000
    builder.set("tokenizer.ggml.tokens", w.STRING, [f"token{i}" for i in range(n_tokens)])
    builder.set("tokenizer.ggml.merges", w.STRING, [f"a{i} b{i}" for i in range(n_tokens)])
    builder.drop_tensor("token_embd.weight").drop_tensor("output.weight")
    builder.add_q8_0("token_embd.weight", n_tokens, w.HIDDEN, 1)
    return builder.write(tmp_path / "big.gguf")


def test_big_vocabulary_takes_under_a_second(big_vocabulary):
    """A vocabulary decoded for nothing (a minute in other engines), or Numba imported for it.

    The whole program is measured on the processor's clock, interpreter start included.
    """
    code = (
        "import sys, time, cudflash.cli as c\n"
        f"code = c.main(['inspect', {big_vocabulary!r}])\n"
        "heavy = {'numba', 'llvmlite', 'tokenizers', 'jinja2', 'rich'} & set(sys.modules)\n"
        "print(time.process_time(), file=sys.stderr)\n"
        "sys.exit(', '.join(heavy) or code)"
    )
    command = [sys.executable, "-c", code]
    best = min(_seconds(command) for _ in range(3))
    assert best < 1.0


def _seconds(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "vocabulary" in done.stdout and "250000" in done.stdout
    return float(done.stderr.split()[-1])


def test_json_has_the_summary_of_the_loader(cli, model):
    """Fields that the command drops or renames."""
    from cudflash.loader.gguf import open_gguf
    from cudflash.loader.summary import file_digest, summarize

    done = cli("inspect", model, "--json", "--digest", "--tensors", "--metadata")
    expected = summarize(open_gguf(model))
    assert {name: done.json[name] for name in expected} == expected
    assert done.json["sha256"] == file_digest(model)
    assert len(done.json["tensors"]) == expected["n_tensors"]
    assert done.json["metadata"]["general.architecture"] == "llama"


def test_text_tells_what_can_be_run(cli, model, chat_model):
    """A human view that lacks what a human looks for."""
    text = cli("inspect", model).out.decode()
    for line in ("architecture", "layers              4", "chat template       no",
                 "can be run          yes", "trained context     512"):  # fmt: skip
        assert line in text
    assert "Q4_K" in text and "\x1b" not in text
    assert "chat template       yes" in cli("inspect", chat_model).out.decode()
    tensors = cli("inspect", model, "--tensors", "--metadata").out.decode()
    assert "blk.3.ffn_down.weight" in tensors and "tokenizer.ggml.tokens" in tensors


def test_file_that_cannot_be_run_is_shown_with_the_reason(cli, tmp_path):
    """A draft or an unknown architecture answered with an error instead of its contents."""
    builder = w.tiny_model("llama").set("general.architecture", w.STRING, "mamba9")
    done = cli("inspect", builder.write(tmp_path / "other.gguf"))
    assert done.code == 0
    assert any(line.split("  ")[0] == "can be run" and " no: " in line for line in lines(done))
    assert "mamba9" in done.out.decode()


def lines(done):
    """Lines of a run's stdout."""
    return done.out.decode().splitlines()


def test_names_with_markup_are_shown_as_they_are(cli, tmp_path, monkeypatch):
    """A file whose name or metadata is taken for terminal markup."""
    builder = w.tiny_model("llama").set("general.name", w.STRING, "[red]bold[/red] [/]")
    path = builder.write(tmp_path / "[x].gguf")
    monkeypatch.setattr("cudflash.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "200")
    done = cli("inspect", path, "--no-color")
    assert done.code == 0 and b"[red]bold[/red] [/]" in done.out


def test_damaged_file_is_exit_3(cli, tmp_path, model):
    """Half a summary of a truncated file."""
    with open(model, "rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(600_000))
    done = cli("inspect", tmp_path / "cut.gguf")
    assert done.code == 3 and done.out == b"" and "cut.gguf" in done.sentence


def test_inspect_is_quick_in_this_process(cli, model):
    """Reading tensor data for a summary."""
    started = time.process_time()
    assert cli("inspect", model).code == 0
    assert time.process_time() - started < 1


def test_model_option_names_the_file_as_in_other_commands(cli, model):
    """`cudflash inspect -m FILE`, which every other command understands."""
    assert cli("inspect", "-m", model, "--json").json == cli("inspect", model, "--json").json
    assert "--model" in cli("inspect").sentence
    assert cli("inspect", model, model, model).code == 2
