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
MINUTES = {"base": [84.0], "target": [63.0], "dflash": [21.0, 40.0], "dflash2": [12.0, 22.0]}
RESULTS = Path(__file__).resolve().parent / "results"
PROMPTS = Path(__file__).resolve().parents[2] / "tests/vectors/demo_pair/prompts.json"


def phases(args):
    """Command lines of the phases, each with the file that says it is done (or None)."""
    work = ["--work", str(args.work)]
    data = ["--docs", str(args.docs), "--code", str(args.code)]
    yield "corpus", [*data, *work], args.work / "corpus.json"
    yield "tokenizer", work, args.work / "tokens.json"
    minutes = {name: ["--cpu-minutes", *map(str, ends)] for name, ends in MINUTES.items()}
    for part in ("base", "target"):
        yield "train_target", [part, *work, *minutes[part]], None
    yield "sample", work, None
    for kind in ("dflash", "dflash2"):
        yield "train_draft", [kind, *work, *minutes[kind]], None
    for types in ("f32", "q6_k", "shipped"):
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
    yield "depth", [*work, "--out", str(RESULTS / "depth.json")], None
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
