"""`scripts/bench_peer.py`: what it reads of llama.cpp's output, the turns, absent peers."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.test_project_rules import ROOT

SCRIPT = ROOT / "scripts" / "bench_peer.py"
PRINTED = """
I encoded    8 tokens in    0.174 seconds, speed:   46.084 t/s
I decoded   49 tokens in    2.450 seconds, speed:   20.000 t/s
I n_draft   = 7
I n_drafted = 322
I n_accept  = 40
"""


@pytest.fixture(scope="module")
def script():
    """The script's functions; its neighbours are imported as when it runs."""
    code = (
        "import runpy, sys, json; m = runpy.run_path(sys.argv[1]); "
        "calls = []; side = lambda n: (lambda: calls.append(n) or float(n)); "
        "m['in_turns'].__globals__['SETTLE_SECONDS'] = 0; "
        "found = m['in_turns']([side(1), side(2)], 2); "
        "texts = json.load(sys.stdin); out = []\n"
        "for text in texts:\n"
        "    try: out.append(m['parse_drafted'](text))\n"
        "    except Exception as err: out.append([type(err).__name__, str(err)])\n"
        "print(json.dumps([found, calls, out]))"
    )

    def run(texts):
        import json

        done = subprocess.run(
            [sys.executable, "-c", code, SCRIPT], input=json.dumps(texts), text=True,
            capture_output=True, check=True, cwd=ROOT / "scripts",
        )  # fmt: skip
        return SimpleNamespace(**dict(zip(("found", "calls", "parsed"), json.loads(done.stdout))))

    return run


def test_turns_and_parsing(script):
    """Sides that do not take turns; a speed of the prompt taken for that of decoding."""
    got = script([PRINTED, "nothing\nlast line", PRINTED.replace("n_accept", "other")])
    assert got.found == [[1.0, 1.0], [2.0, 2.0]] and got.calls == [1, 2, 1, 2, 2, 1]
    assert got.parsed[0] == [pytest.approx(20.0, abs=1e-9), 322, 40]
    assert got.parsed[1][0] == "NothingPrinted" and "last line" in got.parsed[1][1]
    assert got.parsed[2][1:] == [322, None]


@pytest.mark.parametrize(
    "args, words",
    [(("--target", "none.gguf"), "none.gguf does not exist"), (("--draft", "x"), "needs --target"),
     (("--tokens", "1"), "at least 2"), (("--repeats", "0"), "at least 1")],
)  # fmt: skip
def test_wrong_arguments_are_refused(args, words):
    """A traceback, or a comparison of nothing."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and words in done.stderr


def test_programs_are_the_peers_own_names():
    """A peer that is looked for under a name that it does not have."""
    found = set(re.findall(r'_on_path\("([\w-]+)"\)', SCRIPT.read_text()))
    assert found == {"llama-bench", "llama-speculative-simple"}
