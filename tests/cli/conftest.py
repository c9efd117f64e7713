"""Run the command line inside the test process (fast), or as a program of its own (signals)."""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from cudflash.cli import main
from tests.helpers.gguf_writer import STRING, scalar, string
from tests.helpers.vectors import vector_path

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Run:
    """What a run left."""

    code: int
    out: bytes
    err: str

    @property
    def json(self):
        """The object on the last line of stdout."""
        return json.loads(self.out.decode("ascii").splitlines()[-1])

    @property
    def sentence(self):
        """The error, which must be one line and the last one."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err, self.err
        assert self.err.splitlines()[-1] == lines[0]
        return lines[0]


@pytest.fixture
def cli(monkeypatch):
    """Call ``cli(*args, stdin=b"")``; neither stream is a terminal."""

    def run(*args, stdin=b""):
        out, err = io.BytesIO(), io.BytesIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8"))
        code = main([str(arg) for arg in args])
        sys.stdout.flush()
        sys.stderr.flush()
        return Run(code, out.getvalue(), err.getvalue().decode())

    return run


@pytest.fixture(scope="session")
def model():
    """Path of a tiny model without a chat template."""
    return str(vector_path("targets/llama-kq.gguf"))


@pytest.fixture(scope="session")
def chat_model(model, tmp_path_factory):
    """Path of the same model with a chat template."""
    return with_template(model, tmp_path_factory.mktemp("chat") / "chat.gguf", TEMPLATE)


def with_template(source, path, template):
    """Copy a GGUF file with a chat template put in front of its metadata.

    The new key takes a multiple of 32 bytes, so that the tensors keep their alignment.
    """
    with open(source, "rb") as file:
        data = file.read()
    key = string("tokenizer.chat_template") + STRING.to_bytes(4, "little")
    spare = -(len(key) + len(scalar(STRING, template)) + 4) % 32  # inside a Jinja comment
    entry = key + scalar(STRING, template + "{#" + "." * spare + "#}")
    assert len(entry) % 32 == 0
    n_keys = int.from_bytes(data[16:24], "little") + 1
    path.write_bytes(data[:16] + n_keys.to_bytes(8, "little") + entry + data[24:])
    return str(path)


def program(*args, env=None, **kwargs):
    """Start ``python -m cudflash`` as a process of its own."""
    command = [sys.executable, "-m", "cudflash", *map(str, args)]
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.Popen(command, env={**os.environ, **(env or {})}, **kwargs)


def finish(process, timeout=120, stdin=None):
    """Wait for a program; returns a Run."""
    out, err = process.communicate(stdin, timeout=timeout)
    return Run(process.returncode, out or b"", (err or b"").decode())
