"""A plain answer starts without the modules it does not use."""

import json
import subprocess
import sys

from tests.helpers.vectors import target_case

# each takes 1 to 10 % of the time to the first token of a small model
HEAVY = [
    "cudflash.loader.draft_bind", "cudflash.loader.safetensors_dir", "cudflash.receipt",
    "cudflash.spec.drafters", "cudflash.spec.economy", "cudflash.spec.gate", "cudflash.spec.round",
    "cudflash.spec_rounds", "cudflash.tui", "cudflash.bench", "cudflash.ops.cuda.ops", "decimal",
    "importlib.metadata", "jinja2", "matplotlib", "numba", "rich", "safetensors", "statistics",
]  # fmt: skip

_CHILD = """
import json, sys
from cudflash.cli import main
code = main()
print("\\n" + json.dumps([code or 0, sorted(sys.modules)]))
"""


def test_a_plain_answer_imports_only_what_it_uses():
    """Catches an import at the top of a module that every start then pays for."""
    path = str(target_case("llama", "kq").path)
    arguments = ["generate", path, "-p", "a", "-n", "1", "--seed", "1"]
    command = [sys.executable, "-c", _CHILD, *arguments]
    subprocess.run(command, check=True, capture_output=True)  # compiles what is not compiled yet
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    code, modules = json.loads(out.splitlines()[-1])
    assert code == 0 and "cudflash.session" in modules
    assert [name for name in HEAVY if name in modules] == []
