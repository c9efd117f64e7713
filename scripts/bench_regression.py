"""Judge a run of ``make bench`` against the committed baseline, as ratios to the calibration loop.

    python scripts/bench_regression.py RUN.json           # exit 1 if something became slower
    python scripts/bench_regression.py RUN.json --save    # make the run the baseline

RUN.json is what ``pytest --benchmark-json`` has written. Of each benchmark two ratios to the
calibration loop are compared with those of the baseline: the median over rounds, and best time over
best loop. Only when both are above the bound is it called slower: a machine that others use moves
one of them easily, a slower program moves both. Runs on another processor, with other kernels or
another NumPy (the loop is NumPy's) are shown and not judged.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from cudflash.bench.report import table

BASELINE = Path(__file__).resolve().parents[1] / "tests" / "benchmarks" / "baseline.json"
BOUND = 1.3  # times the baseline's ratio
COMPARABLE = ("cpu", "cpus", "kernel_path", "numpy", "threads")
KEPT_STATS = ("min", "median", "max", "mean", "stddev", "rounds")
SLOWER, FASTER, SAME, NEW, MISSING, NOT_JUDGED = (
    "SLOWER", "faster", "same", "new", "missing", "not judged"
)  # fmt: skip


class RunError(Exception):
    """A file that is no run; the message is one sentence."""


@dataclass(frozen=True)
class Verdict:
    """One benchmark against the baseline.

    Attributes
    ----------
    name : str
    change, change_low : float or None
        Of the median ratio and of the ratio of bests; above 1 is slower.
    word : str
    """

    name: str
    change: float | None
    change_low: float | None
    word: str


def load(path):
    """Return (machine, {name: (ratio, ratio_low)}) of a pytest-benchmark file.

    Raises
    ------
    RunError
    """
    try:
        run = json.loads(Path(path).read_text(encoding="utf-8"))
        machine = {key: run["machine_info"][key] for key in COMPARABLE}
        found = {
            one["name"]: (float(one["extra_info"]["ratio"]), float(one["extra_info"]["ratio_low"]))
            for one in run["benchmarks"]
        }
    except OSError as err:
        raise RunError(f"{path}: cannot be read ({err.strerror}); run 'make bench' first") from None
    except (ValueError, TypeError) as err:
        raise RunError(f"{path}: is no run of pytest-benchmark ({err})") from None
    except KeyError as err:
        raise RunError(f"{path}: has no {err.args[0]!r}, expected a run of 'make bench'") from None
    if not found or any(value <= 0 for pair in found.values() for value in pair):
        raise RunError(f"{path}: holds no ratios above 0, expected a run of 'make bench'")
    return machine, found


def judge(baseline, run, bound=BOUND):
    """Compare two loaded runs.

    Returns
    -------
    (list of Verdict, str)
        The text says why nothing was judged, "" when it was.
    """
    (old_machine, old), (machine, new) = baseline, run
    other = [f"{key} is {machine[key]}, the baseline's {old_machine[key]}" for key in COMPARABLE
             if machine[key] != old_machine[key]]  # fmt: skip
    verdicts = []
    for name in [*new, *(name for name in old if name not in new)]:
        if name not in new or name not in old:
            verdicts.append(Verdict(name, None, None, NEW if name in new else MISSING))
            continue
        change, low = (a / b for a, b in zip(new[name], old[name]))
        word = SAME
        if other:
            word = NOT_JUDGED
        elif min(change, low) > bound:
            word = SLOWER
        elif max(change, low) < 1 / bound:
            word = FASTER
        verdicts.append(Verdict(name, change, low, word))
    return verdicts, "; ".join(other)


def reduced(run):
    """What is kept of a run as a baseline: no times of single rounds, no options."""
    return {
        "machine_info": run["machine_info"], "version": run["version"],
        "datetime": run["datetime"],
        "benchmarks": [
            {
                "name": one["name"], "extra_info": one["extra_info"],
                "stats": {key: one["stats"][key] for key in KEPT_STATS},
            }
            for one in run["benchmarks"]
        ],
    }  # fmt: skip


def main(argv=None):
    """Judge or save; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--bound", type=float, default=BOUND, help="default: %(default)s")
    parser.add_argument("--save", action="store_true", help="keep the run as the baseline")
    args = parser.parse_args(argv)
    if args.bound <= 1:
        parser.error("--bound must be above 1")
    try:
        run = load(args.run)
        if args.save:
            text = json.dumps(reduced(json.loads(args.run.read_text(encoding="utf-8"))), indent=1)
            args.baseline.write_text(text + "\n", encoding="utf-8")
            print(f"{args.baseline.name}: {len(run[1])} benchmarks kept")
            return 0
        verdicts, reason = judge(load(args.baseline), run, args.bound)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = [
        [v.name, "–" if v.change is None else f"{v.change:.2f}",
         "–" if v.change_low is None else f"{v.change_low:.2f}", v.word]
        for v in verdicts
    ]  # fmt: skip
    print(table(["benchmark", "median, times the baseline", "best", "verdict"], cells))
    if reason:
        print(f"\nNothing was judged: {reason}. Keep a baseline of this machine with --save.")
    slower = [v.name for v in verdicts if v.word == SLOWER]
    for name in slower:
        print(f"\n{name} is slower than the baseline by more than {args.bound} times.")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
