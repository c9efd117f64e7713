"""Cost of the activation precisions: seconds of a pass of 1, 8 and 256 rows, interleaved.

    python scripts/bench_activations.py models/SmolLM2-135M-Instruct.Q4_1.gguf [--repeats 15]

Both engines are loaded at once and take turns, so that a busy machine slows both. Prints a Markdown
table for docs/NUMERICS.md (median, minimum, maximum), then one line of JSON.
"""

import argparse
import json
import statistics
import time

import cudflash
from cudflash.defaults import ACTIVATION_TYPES

_ROWS = (1, 8, 256)


def passes(engine):
    """One function per row count, each evaluating that many rows after a 256-token prompt."""
    runner = engine.session()._runner  # below the public API: a pass of M rows has no name there
    runner.prefill_chunk(list(range(10, 266)), False)

    def run(n):
        started = time.perf_counter()
        runner.step(list(range(10, 10 + n)), "all" if n <= 16 else "none")
        seconds = time.perf_counter() - started
        runner.rollback()
        return seconds

    return run


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    runs = {name: passes(cudflash.load(args.model, activations=name, threads=args.threads))
            for name in ACTIVATION_TYPES}
    times = {(name, n): [] for name in runs for n in _ROWS}
    for repeat in range(args.repeats + 1):
        for n in _ROWS:
            order = list(runs) if repeat % 2 else list(runs)[::-1]
            for name in order:
                seconds = runs[name](n)
                if repeat:  # the first round records the passes
                    times[name, n].append(1e3 * seconds)
    print("| activations | " + " | ".join(f"{n} rows, ms" for n in _ROWS) + " | t(8) / t(1) |")
    print("|---" * (len(_ROWS) + 2) + "|")
    for name in runs:
        cells = [f"{statistics.median(times[name, n]):.2f} ({min(times[name, n]):.2f}–"
                 f"{max(times[name, n]):.2f})" for n in _ROWS]
        ratio = statistics.median(times[name, 8]) / statistics.median(times[name, 1])
        print(f"| {name} | " + " | ".join(cells) + f" | {ratio:.2f} |")
    print(json.dumps({"benchmark": "activations", "model": args.model, "threads": args.threads,
                      "ms": {f"{name}/{n}": times[name, n] for name, n in times}}))


if __name__ == "__main__":
    main()
