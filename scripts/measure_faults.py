"""Measure what wrong conditioning does to the drafts of the embedded pair; prints the table of
docs/SPECULATION.md.

    python scripts/measure_faults.py [--per-kind 8] [--tokens 64] [--stride 4] [--write]

For every fault: tokens emitted per target pass at the same anchors, the difference with its 95 %
bootstrap interval over prompts (paired), the share of drafted tokens that differ, and the same on a
periodic stream. "Missed by acceptance" is a fault whose interval holds 0. --write puts the table
between the marks in docs/SPECULATION.md.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.demo_faults import (
    FAULTS,
    KINDS,
    accepted,
    cases,
    differing,
    drafts,
    named,
    pair,
    periodic_case,
)

DOC = Path(__file__).parents[1] / "docs" / "SPECULATION.md"
MARKS = "<!-- faults: begin -->", "<!-- faults: end -->"
RESAMPLES = 2000


def interval(right, wrong, n_cases):
    """(mean difference, low, high) of emitted tokens per pass; prompts are drawn with replacement."""
    gain = [[] for _ in range(n_cases)]
    for (number, x, text), (_, y, _) in zip(right, wrong):
        gain[number].append(accepted(y, text) - accepted(x, text))
    means = np.array([np.mean(g) for g in gain])
    rng = np.random.default_rng(0)
    drawn = means[rng.integers(0, n_cases, (RESAMPLES, n_cases))].mean(axis=1)
    return means.mean(), *np.quantile(drawn, [0.025, 0.975])


def emitted(found):
    """Tokens per target pass."""
    return 1 + float(np.mean([accepted(tokens, text) for _, tokens, text in found]))


def table(kind, options):
    """Markdown lines of one draft's table."""
    one = pair(kind)
    found = cases(one, options.per_kind, options.tokens)
    periodic = [periodic_case(one, 400, options.tokens)]
    right = drafts(one, kind, found, stride=options.stride)
    right_periodic = drafts(one, kind, periodic, stride=options.stride)
    lines = [
        f"{kind}, {len(found)} held-out prompts, {len(right)} anchors, verify length "
        f"{len(right[0][1])}: {emitted(right):.2f} tokens per pass; periodic stream "
        f"{emitted(right_periodic):.2f}.",
        "",
        "| fault | tokens per pass | difference, 95 % | drafted tokens that differ | anchors, first "
        "three | seen by acceptance | periodic: tokens per pass | named by |",
        "|---|---:|---|---:|---:|---|---:|---|",
    ]
    for fault in FAULTS:
        wrong = drafts(one, kind, found, fault, options.stride)
        mean, low, high = interval(right, wrong, len(found))
        tokens, first = differing(right, wrong)
        seen = "yes" if high < 0 else "no"
        on_periodic = emitted(
            drafts(one, kind, [*periodic, found[0]], fault, options.stride)[: len(right_periodic)]
        )
        lines.append(
            f"| {fault.name} | {emitted(wrong):.2f} | {mean:+.2f} ({low:+.2f} to {high:+.2f}) | "
            f"{tokens:.1%} | {first:.0%} | {seen} | {on_periodic:.2f} | "
            f"{named(one, found, fault) or '-'} |"
        )
        print(lines[-1], file=sys.stderr)
    return lines


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-kind", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--stride", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = "\n\n".join("\n".join(table(kind, options)) for kind in KINDS)
    print(text)
    if options.write:
        page = DOC.read_text(encoding="utf-8")
        before, _, rest = page.partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        DOC.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
