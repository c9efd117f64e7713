"""README says what is true: its commands run, its tree and its tables are those of the code."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from cudflash import errors
from tests.cli.conftest import TEMPLATE, with_template
from tests.cli.pairs import put_draft, put_target
from tests.helpers.vectors import vector_path
from tests.test_project_rules import ROOT, tracked

README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET, DRAFT = "models/target.gguf", "models/dflash-target.gguf"
IDENTITY, RECEIPT = "models/pair.json", "models/receipt.json"
BENCH, RUN, PICTURE = "models/bench.json", "models/run.jsonl", "models/run.svg"
PROGRAM = ".venv/bin/cudflash"
WRITES = ("-o", "--receipt", "--record", "--events", "--snapshot")  # they name a file to be written


def blocks(language):
    """Texts of the fenced blocks of a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def commands():
    """Every line of the shell blocks."""
    return [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A tiny model that stands for README's."""
    path = tmp_path_factory.mktemp("readme") / "model.gguf"
    return with_template(vector_path("targets/llama-kq.gguf"), path, TEMPLATE)


@pytest.fixture(scope="module")
def stand_ins(chat_model, tmp_path_factory):
    """README's files -> tiny ones that stand for them, and files that may be written."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = put_target(folder), put_draft(folder)
    pair = folder / "pair.json"
    done = run([_python(), "-m", "cudflash", "identity", target, draft, "-o", pair, "-c", "512"])
    assert done.returncode == 0, done.stderr
    return {
        MODEL: chat_model, TARGET: str(target), DRAFT: str(draft), IDENTITY: str(pair),
        RECEIPT: str(folder / "receipt.json"), BENCH: str(folder / "bench.json"),
        RUN: str(folder / "run.jsonl"), PICTURE: str(folder / "run.svg"),
    }  # fmt: skip


def test_order_of_the_chapters():
    """A reader who looks for the first command and finds a benchmark."""
    chapters = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert chapters == [
        "Two commands", "Use", "Requirements", "What is exact", "Speed", "How it works", "Limits",
        "Thanks", "Licence",
    ]  # fmt: skip


def test_two_commands_are_what_ci_runs():
    """A documented set-up that nobody has tried on a bare machine."""
    assert [block.strip() for block in blocks("sh")[:2]] == ["make run", "make test"]
    script = (ROOT / ".ci/run").read_text()
    assert re.search(r"^make run ", script, re.MULTILINE)
    assert re.search(r"^(timeout [-=\w ]+)?make test ", script, re.MULTILINE)
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=False).returncode == 0


@pytest.mark.parametrize("line", commands())
def test_every_command_runs(line, stand_ins):
    """A command that is wrong, or was right once.

    `make` commands are run by .ci/run; here their recipes are resolved. The others run on tiny
    models that stand for README's.
    """
    words = shlex.split(line)
    if words[0] == "make":
        assert run(["make", "-n", *words[1:]]).returncode == 0
    elif words[0] == "eval":
        bin_folder = Path(_python()).parent
        script = line.replace(PROGRAM, str(bin_folder / "cudflash")) + "\ncomplete -p cudflash"
        if not (bin_folder / "cudflash").exists():
            pytest.skip("the program is not installed as a script")
        done = run(["bash", "-c", script])
        assert done.returncode == 0 and "_cudflash_completion" in done.stdout, done.stderr
    else:
        assert words[0] == PROGRAM
        arguments = [stand_ins.get(word, word) for word in words[1:]]
        limit = ["-c", "512"] if words[1] in ("generate", "chat") else []
        done = run([_python(), "-m", "cudflash", *arguments, *limit], input="hello\n/exit\n")
        assert done.returncode == 0, done.stderr
        written = [w for w, option in zip(arguments[1:], arguments) if option in WRITES]
        assert all(Path(path).stat().st_size for path in written)
        assert done.stdout or written


def run(command, **kwargs):
    """Run a program in the repository's root."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": False, "timeout": 300,
               "env": env}  # a make inside `make test` would otherwise talk about folders
    return subprocess.run(command, **{**options, **kwargs})


def _python():
    import sys

    return sys.executable


@pytest.mark.parametrize("block", blocks("python"))
def test_python_example_runs(block, chat_model, capsys):
    """An example with names that the package does not have."""
    exec(compile(block.replace(MODEL, chat_model), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_makefile_lists_its_targets_first():
    """A target that help forgets, or a first target that does something."""
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    assert targets[0] == "help" and len(text.splitlines()) <= 70
    shown = {line.split()[0] for line in run(["make"]).stdout.splitlines()}
    assert shown == set(targets) == set(re.search(r"\.PHONY: (.*)", text)[1].split())
    for target in set(re.findall(r"`make ([a-z-]+)`", README)):
        assert target in targets
    for target in targets:
        if target != "clean":
            assert run(["make", "-n", target]).returncode == 0


def test_scripts_of_the_makefile_start():
    """A target whose script cannot even show its help."""
    for script in re.findall(r"scripts/\w+\.py", (ROOT / "Makefile").read_text()):
        assert run([_python(), script, "--help"]).returncode == 0, script


def test_exit_codes_are_those_of_the_errors():
    """A documented exit code that means something else."""
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert shown == {0, 130, 141} | {kind.exit_code for kind in kinds}


def test_paths_and_links_exist():
    """A file that was renamed, in the text or in a link."""
    named = re.findall(r"\]\(([^)#:]+)\)", README)
    named += re.findall(r"`((?:tests|cudflash|loader|scripts|docs)/[\w./-]*)`", README)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def tree():
    """(path, phrase) of every line of README's tree."""
    block = next(block for block in blocks("") if "raw_kernels/" in block)
    parents, entries = [], []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, phrase = line.strip().partition(" ")
        parents = [*parents[:depth], name]
        entries.append(("".join(parents), phrase.strip()))
    return entries


def test_tree_is_the_real_one():
    """A tree that shows what is not there, or leaves out what a reader will meet."""
    entries = dict(tree())
    assert all(phrase for phrase in entries.values())
    missing = [path for path in entries if not (ROOT / path).exists()]
    assert not missing
    listed = {path.split("/")[0] for path in entries}
    present = {path.parts[0] for path in tracked()} - {"README.md", ".gitignore"}
    assert present == listed
    shown = {path.rstrip("/") for path in entries if path.endswith("/")}
    packages = {str(p.parent) for p in tracked("cudflash/*/__init__.py", "cudflash/*/*/__init__.py")}
    assert packages - {"cudflash/ops"} <= shown | {"cudflash"}
