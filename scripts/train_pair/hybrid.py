"""The hybrid of the tests, from the corpus to the measured files, one phase after the other.

    python -m scripts.train_pair.hybrid --docs DIR --code DIR --work DIR

Phases that are done are skipped or resumed, so the command can be repeated after an interruption.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.train_pair import export

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/vectors/hybrid_pair"
LIKE = ROOT / "cudflash/demo_pair" / export.TARGET_FILE
MINUTES = {"target": 11.0, "mtp": 4.2, "dflash2": 6.0}  # CPU minutes of the recorded run


def phases(args):
    """Command lines of the phases, each with the file that says it is done (or None)."""
    work, family = ["--work", str(args.work)], ["--family", "hybrid"]
    data = ["--docs", str(args.docs), "--code", str(args.code)]
    minutes = {name: ["--cpu-minutes", str(value)] for name, value in MINUTES.items()}
    yield "corpus", [*data, *work], args.work / "corpus.json"
    yield "tokenizer", [*work, "--like", str(LIKE)], args.work / "tokens.json"
    yield "train_target", ["target", *work, *minutes["target"], *family], None
    yield "sample", [*work, *family], None
    yield "hybrid_train_mtp", [*work, *minutes["mtp"]], None
    yield "train_draft", ["dflash2", *work, *minutes["dflash2"], *family], None
    yield "hybrid_export", [*work, "--out", str(OUT)], None
    yield "hybrid_card", work, None


def main():
    """Run what is not done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("docs", "code", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for module, options, done in phases(parser.parse_args()):
        if done is None or not done.exists():
            print(f"== {module} {' '.join(options)}", flush=True)
            subprocess.run([sys.executable, "-m", f"scripts.train_pair.{module}", *options],
                           check=True)  # fmt: skip


if __name__ == "__main__":
    main()
