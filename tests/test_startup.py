"""A plain answer starts without the modules it does not use."""

import ast
import os
import subprocess
import sys

import pytest

from tests.helpers.vectors import target_case

# each takes 1 to 10 % of the time to the first token of a small model
HEAVY = [
    "cudflash.loader.draft_bind", "cudflash.loader.safetensors_dir", "cudflash.receipt",
    "cudflash.spec.drafters", "cudflash.spec.economy", "cudflash.spec.gate", "cudflash.spec.round",
    "cudflash.spec_rounds", "cudflash.tui", "cudflash.bench", "cudflash.ops.cuda.ops", "decimal",
    "hashlib", "importlib.metadata", "importlib.resources", "jinja2", "json", "llvmlite",
    "matplotlib", "numba", "rich", "safetensors", "statistics", "tempfile",
]  # fmt: skip

_CHILD = """
import sys
from cudflash.cli import main
code = main()
print("\\n", [code or 0, sorted(sys.modules)])
"""

_ALONE = """
import gc, os
from cudflash.cli import main, process
collections = lambda: sum(generation["collections"] for generation in gc.get_stats())
process.begin()
before = collections()
code = main()
threads = len(os.listdir("/proc/self/task"))
print("\\n", [code or 0, threads, collections() - before])
"""


def plain_answer(child):
    """Run a child program as a plain `generate` twice, the second time with everything compiled.

    Returns what its last line says.
    """
    path = str(target_case("llama", "kq").path)
    arguments = ["generate", path, "-p", "a", "-n", "1", "--seed", "1", "-t", "1"]
    command = [sys.executable, "-c", child, *arguments]
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return ast.literal_eval(out.splitlines()[-1].strip())


def test_a_plain_answer_imports_only_what_it_uses():
    """Catches an import at the top of a module that every start then pays for."""
    code, modules = plain_answer(_CHILD)
    assert code == 0 and "cudflash.session" in modules
    assert [name for name in HEAVY if name in modules] == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's list of threads")
def test_a_start_has_no_idle_threads_and_looks_for_no_garbage():
    """Catches threads of a library that spin beside the model, and collections that find nothing.

    Both took a tenth of the time to the first token of a small model.
    """
    code, threads, collections = plain_answer(_ALONE)
    assert code == 0 and threads == 1
    assert collections < 20
