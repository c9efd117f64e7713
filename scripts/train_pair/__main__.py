"""Everything from the corpus to the measured files, one phase after the other.

    python -m scripts.train_pair --docs DIR --code DIR --work DIR --out cudflash/demo_pair

Phases that are done are skipped or resumed, so the command can be repeated after an interruption.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# CPU minutes of the recorded run, see results/
MINUTES = {"target": 84.0, "dflash": 19.0, "dflash2": 14.0}
RESULTS = Path(__file__).resolve().parent / "results"
PROMPTS = Path(__file__).resolve().parents[2] / "tests/vectors/demo_pair/prompts.json"


def phases(args):
    """Command lines of the phases, each with the file that says it is done (or None)."""
    work = ["--work", str(args.work)]
    data = ["--docs", str(args.docs), "--code", str(args.code)]
    yield "corpus", [*data, *work], args.work / "corpus.json"
    yield "tokenizer", work, args.work / "tokens.json"
    yield "train_target", [*work, "--cpu-minutes", str(MINUTES["target"])], None
    yield "sample", work, None
    for kind in ("dflash", "dflash2"):
        yield "train_draft", [kind, *work, "--cpu-minutes", str(MINUTES[kind])], None
    for types in ("f32", "q6_k", "q4_k_s"):
        yield "export", [*work, "--out", str(args.work), "--types", types], None
    yield "export", [*work, "--out", str(args.out)], None
    yield "prompts", [*work, "--out", str(PROMPTS)], PROMPTS
    pair, prompts = ["--pair", str(args.out)], ["--prompts", str(PROMPTS)]
    for name, options in {
        "acceptance": ["acceptance", *pair, *prompts],
        "acceptance_untruncated": ["acceptance", *pair, *prompts, "--untruncated"],
        "acceptance_sink64": ["acceptance", *pair, *prompts, "--sink", "64"],
        "speed": ["speed", *pair, *prompts],
        "cost": ["cost", *pair],
        "bits": ["bits", "--pair", str(args.work), *work],
    }.items():
        yield "measure", [*options, "--out", str(RESULTS / f"{name}.json")], None
    yield "card", [*pair, *work], None


def main():
    """Run what is not done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("docs", "code", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for module, options, done in phases(parser.parse_args()):
        if done is None or not done.exists():
            print(f"== {module} {' '.join(options)}", flush=True)
            subprocess.run([sys.executable, "-m", f"scripts.train_pair.{module}", *options],
                           check=True)  # fmt: skip


if __name__ == "__main__":
    main()
