"""Fill the marked tables of documents from recorded measurements; nothing in them is typed.

    python scripts/speed_tables.py            # rewrite the blocks of docs/SPEED.md and README.md
    python scripts/speed_tables.py --check    # exit 1 if a block is not what its record says
    python scripts/speed_tables.py --take docs/records/NAME.json < output    # keep a JSON line

A block begins with ``<!-- table VIEW RECORD -->`` and ends with ``<!-- end -->``. Views: ``cpu``
(``bench_cpu.py``), ``cpu-brief`` (its ratios), ``spec`` (``bench_spec.py``), ``bench`` (the main
tables of a ``cudflash bench`` record), ``bench-brief`` (speed-up and acceptance length by set),
``bench-positions``, ``bench-verify``, ``bench-depth`` (what each number of drafted tokens brings and
costs), ``peer`` (``bench_peer.py``), ``monitor`` (``bench_monitor.py``), ``rollback``
(``bench_rollback.py``), ``drafted-peer`` (``compare_llama_cpp.py``). A record is the JSON line that a
script prints last, or the file of ``bench --record``; ``--take`` cuts the line out of an output.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from cudflash.bench import report
from cudflash.bench.depth import depth_notes
from cudflash.bench.record import validate_record
from cudflash.bench.statistics import Spread
from cudflash.errors import CudflashError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("docs/SPEED.md", "README.md")
BLOCK = re.compile(
    r"(?P<begin><!-- table (?P<view>[\w-]+) (?P<record>\S+) -->\n)(?P<body>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)


class BlockError(Exception):
    """A block that cannot be filled; the message is one sentence."""


# -- views ----------------------------------------------------------------------------------------


def _facts(record):
    facts = record.get("machine", record)
    return (
        f"Commit {facts['commit']}, {facts['cpu']}, {facts['cpus']} CPUs, numpy {facts['numpy']}, "
        f"numba {facts['numba']}, Python {facts['python']}."
    )


def _ratios(measure):
    ours, peer = measure["ours"], measure["peer"]
    if measure["unit"] == "s":
        return Spread.of(p / o for o, p in zip(ours, peer))
    return Spread.of(o / p for o, p in zip(ours, peer))


def cpu(record):
    """Every table of a ``bench_cpu.py`` record."""
    parts = [_facts(record)]
    for model in record["models"]:
        lines = []
        for measure in model["measures"]:
            digits = 3 if measure["unit"] == "s" else 1
            peer, ratio = Spread.of(measure["peer"]), _ratios(measure)
            lines.append([
                measure["name"], measure["unit"], Spread.of(measure["ours"]).text(digits),
                peer.text(digits) if peer else "no peer", ratio.text(2) if ratio else "no peer",
            ])  # fmt: skip
        n = len(model["measures"][0]["ours"])
        parts.append(f"#### {model['model']}, {record['threads']} threads, {n} repeats")
        header = ["measure", "unit", "cudflash", "llama.cpp", "ratio"]
        parts.append(report.table(header, lines))
        others = Spread.of(share for m in model["measures"] for share in m["foreign"])
        if others:
            parts.append(
                "Median (lowest–highest). While one side was measured, everything else used "
                f"{100 * others.median:.1f} % of the machine (median), {100 * others.high:.1f} % at "
                "most."
            )
        costs = model["verify_seconds"]
        if not costs:  # --first-token-only
            continue
        lines = [
            [m, Spread.of(s * 1e3 for s in seconds).text(2),
             Spread.of(s / one for s, one in zip(seconds, costs["1"])).text(2)]
            for m, seconds in costs.items()
        ]  # fmt: skip
        parts.append("Verifying M rows at once (cudflash):")
        parts.append(report.table(["rows M", "ms per step", "t(M) / t(1)"], lines))
    return "\n\n".join(parts)


def cpu_brief(record):
    """Ratios to the peer, one column per model."""
    names = list(dict.fromkeys(m["name"] for model in record["models"] for m in model["measures"]))
    lines = []
    for name in names:
        found = [
            next((m for m in model["measures"] if m["name"] == name), None)
            for model in record["models"]
        ]
        lines.append([name, *(_ratios(m).text(1) if m and m["peer"] else "–" for m in found)])
    return report.table(["measure", *(model["model"] for model in record["models"])], lines)


def spec(record):
    """Every table of a ``bench_spec.py`` record."""
    drafts, verify, loops = record["draft_ms"], record["verify_ms"], record["loops"]
    base = next(iter(drafts.values()))
    return "\n\n".join([
        f"{record['model']}. {_facts(record)}",
        report.table(
            ["draft context, windows", "ms per draft pass", "ratio to one window"],
            [[t, Spread.of(ms).text(2), Spread.of(a / b for a, b in zip(ms, base)).text(2)]
             for t, ms in drafts.items()]),
        report.table(
            ["verify rows", "ms", "t(M) / t(1)"],
            [[m, Spread.of(ms).text(2), Spread.of(a / b for a, b in zip(ms, verify["1"])).text(2)]
             for m, ms in verify.items()]),
        report.table(
            ["decoding", "tokens/s", "outside recorded passes, %"],
            [[name, Spread.of(v["tps"]).text(1), Spread.of(v["overhead"]).text(1)]
             for name, v in loops.items()]),
    ])  # fmt: skip


def bench(record):
    """Head and main tables of a ``cudflash bench`` record."""
    validate_record(record)
    return f"{report.head(record)}\n\n{report.main_tables(record)}\n\n{report.notes(record)}".strip()


def bench_brief(record):
    """Natural text by set: speed-up with interval and acceptance length, one column per lane."""
    validate_record(record)
    rows = [r for r in report.rows(record) if r["kind"] == "natural" and r["speed-up"] is not None]
    lanes = list(dict.fromkeys(row["lane"] for row in rows))
    lines = []
    for where in dict.fromkeys((r["set"], r["depth"], r["stop"]) for r in rows):
        mine = {r["lane"]: r for r in rows if (r["set"], r["depth"], r["stop"]) == where}
        lines.append([f"{where[0]}, depth {where[1]}" if where[1] else where[0], *(
            f"{report.speedup_text(mine[lane])}; {report.number(mine[lane]['acceptance length'])}"
            if lane in mine else "–" for lane in lanes
        )])  # fmt: skip
    return report.table(["set", *lanes], lines)


def bench_positions(record):
    """Acceptance by position of a ``cudflash bench`` record."""
    return report.position_tables(validate_record(record))


def bench_depth(record):
    """Head, one row per set, drafter and number of drafted tokens, and where each begins to lose."""
    validate_record(record)
    lanes = {lane["name"]: lane for group in record["groups"] for lane in group["lanes"]}
    lines, rows = [], [r for r in report.rows(record) if r["lane"] in lanes]
    for row in rows:
        lane = lanes[row["lane"]]
        if lane["verify_length"] is None:
            continue
        lines.append([
            row["set"], lane["drafter"], str(lane["verify_length"]),
            report.number(row["acceptance length"]), report.percent(row["acceptance rate"]),
            report.number(row["draft ms"]), report.number(row["verify ms"]),
            report.number(row["t/s"], 1), report.speedup_text(row),
        ])  # fmt: skip
    header = ["set", "drafter", "k", "tokens per forward", "accepted", "draft, ms a round",
              "verify, ms a round", "tokens/s", "to plain"]  # fmt: skip
    found = "\n".join(f"- {note}" for note in depth_notes(record, rows))
    others = record["others_share"]
    if others is not None:
        found += f"\n\nEverything else used {100 * others:.1f} % of the machine meanwhile."
    return f"{report.head(record)}\n\n{report.table(header, lines)}\n\n{found}"


def bench_verify(record):
    """Verify cost of a ``cudflash bench`` record."""
    return report.verify_tables(validate_record(record))


def peer(record):
    """Ratios to llama.cpp of a ``bench_peer.py`` record, and which peers were absent."""
    lines = []
    for row in record["rows"]:
        ours, theirs = Spread.of(row["ours"]), Spread.of(row["peer"])
        ratio = Spread.of(a / b for a, b in zip(row["ours"], row["peer"]))
        lines.append([
            row["name"], row["model"], ours.text(1) if ours else "–",
            theirs.text(1) if theirs else "absent", ratio.text(2) if ratio else "–",
        ])  # fmt: skip
    header = ["measure", "model", "cudflash, tok/s", "llama.cpp, tok/s", "ratio"]
    absent = "".join(f"\n\nAbsent: {reason}." for reason in record["absent"])
    if others := Spread.of(record["others_shares"]):
        absent += (
            f"\n\nDuring cudflash's turns everything else used {100 * others.median:.1f} % of the "
            f"machine (median), {100 * others.high:.1f} % at most."
        )
    return f"{_facts(record)}\n\n{report.table(header, lines)}{absent}"


def monitor(record):
    """What watching costs, of a ``bench_monitor.py`` record."""
    lines = []
    for lane, views in record["results"].items():
        base = [tps for tps, _ in views["none"]]
        for name, results in views.items():
            ratio = Spread.of(tps / other for (tps, _), other in zip(results, base))
            inside = Spread.of(100 * share for _, share in results)
            lines.append([lane, name, Spread.of(tps for tps, _ in results).text(1), ratio.text(3),
                          inside.text(2)])  # fmt: skip
    header = ["decoding", "view", "tokens/s", "ratio to none", "inside, %"]
    return f"{record['model']}. {_facts(record)}\n\n{report.table(header, lines)}"


def rollback(record):
    """Ops of the gated delta net and ways to keep a part of a block (``bench_rollback.py``)."""
    parts = [f"{_facts(record)} Threads: {record['threads']}."]
    for name, figures in record["shapes"].items():
        times = {tuple(key.split("/")): us for key, us in figures["ops_us"].items()}
        rows = list(dict.fromkeys(m for _, m in times))
        lines = []
        for op in dict.fromkeys(op for op, _ in times):
            line = [op]
            for m in rows:
                share = Spread.of(100 * t / p for t, p in zip(times[op, m], times["products", m]))
                line += [Spread.of(times[op, m]).text(0), share.text(1)]
            lines.append(line)
        header = ["op", *(f"{m} rows, {unit}" for m in rows for unit in ("us", "% of products"))]
        parts += [f"#### Layer of the {name} shape", report.table(header, lines)]
        rounds = {tuple(key.split("/")): us for key, us in figures["rounds_us"].items()}
        block = max(rounds, key=lambda key: int(key[1]))[1]  # rows of a round
        plain = rounds["plain", block]
        whole = [sum(part) for part in zip(*(us for (_, m), us in times.items() if m == block))]
        lines = [
            [way, kept, Spread.of(us).text(0),
             Spread.of(100 * (t - p) / w for t, p, w in zip(us, plain, whole)).text(1)]
            for (way, kept), us in rounds.items()
        ]  # fmt: skip
        header = ["state", f"kept of {block}", "us per layer", "over plain, % of a round"]
        parts.append(report.table(header, lines))
    return "\n\n".join(parts)


def drafted_peer(record):
    """The same pair drafting in both programs, of a ``compare_llama_cpp.py`` record."""
    options, rows = record["options"], record["rows"]
    lines = [
        [row["draft"], row["prompt"], row["program"], str(row["tokens"]),
         f"{row['accepted']} of {row['drafted']}", f"{row['tokens_per_pass']:.2f}",
         f"{row['tps']:.1f}", f"{row['same_characters']} of {row['characters']}"]
        for row in rows
    ]  # fmt: skip
    header = ["draft", "prompt", "program", "tokens", "accepted of drafted", "tokens per pass",
              "tokens/s", "same text"]  # fmt: skip
    own = [row["tps"] for row in rows if row["program"] == "cudflash"]
    other = [row["tps"] for row in rows if row["program"] != "cudflash"]
    ratio = Spread.of(a / b for a, b in zip(own, other)) if other else None
    end = (
        f"Drafted speed, cudflash to llama.cpp: {ratio.text(2)} over {len(other)} prompts."
        if ratio else "Absent: llama.cpp."
    )
    return (
        f"{_facts(record)} Verify length {options['verify_length']}, {options['threads']} threads, "
        f"{options['tokens']} tokens, median of {options['repeats']}.\n\n"
        f"{report.table(header, lines)}\n\n{end}"
    )


def economy(record):
    """What ``auto`` costs where drafting does not pay, of a ``bench_economy.py`` record."""
    lines = []
    for row in record["rows"]:
        ratios = [Spread.of(row["ratios"][unit]).text(3)
                  for unit in ("wall_ms", "cpu_ms", "decode_ms")]  # fmt: skip
        pairs = str(len(row["ratios"]["wall_ms"]))
        lines.append([row["draft"], str(row["threads"]), row["kind"], pairs,
                      f"{row['plain_ms']:.0f}", *ratios])  # fmt: skip
    header = ["draft", "threads", "answer", "pairs", "plain, ms", "auto / plain, wall",
              "processor time", "wall without the prompt"]  # fmt: skip
    loads = ", ".join(f"{load[0]:.1f}" for load in record["load"])
    return (
        f"{_facts(record)} {record['tokens']} tokens. Load before and after: {loads}.\n\n"
        f"{report.table(header, lines)}"
    )


VIEWS = {
    "cpu": cpu, "cpu-brief": cpu_brief, "spec": spec, "bench": bench, "bench-brief": bench_brief,
    "bench-depth": bench_depth, "bench-positions": bench_positions, "bench-verify": bench_verify,
    "peer": peer, "monitor": monitor, "rollback": rollback, "drafted-peer": drafted_peer,
    "economy": economy,
}  # fmt: skip


# -- documents ------------------------------------------------------------------------------------


def fill(text, root=ROOT):
    """Return a document with its blocks made anew.

    Raises
    ------
    BlockError
        For a view or a record that is not there, or a block without an end.
    """
    if text.count("<!-- table ") != len(BLOCK.findall(text)):
        raise BlockError("a block has no end, or its first line is not <!-- table VIEW RECORD -->")

    def made(found):
        view, name = found["view"], found["record"]
        if view not in VIEWS:
            raise BlockError(f"there is no view {view!r}, expected one of {', '.join(VIEWS)}")
        try:
            record = json.loads((root / name).read_text(encoding="utf-8"))
            body = VIEWS[view](record)
        except (OSError, ValueError, KeyError, TypeError, CudflashError) as err:
            raise BlockError(f"{name}: no table {view} can be made of it ({err!r})") from None
        return f"{found['begin']}\n{body}\n\n{found['end']}"

    return BLOCK.sub(made, text)


def take(lines, path):
    """Write the JSON line that a benchmark has printed last into a record."""
    found = [line for line in lines if line.startswith("{")]
    if not found:
        raise BlockError("standard input has no JSON line, expected the output of a benchmark")
    record = json.loads(found[-1])
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(argv=None):
    """Fill or check; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if stale")
    parser.add_argument("--take", metavar="RECORD", help="cut a record out of standard input")
    args = parser.parse_args(argv)
    stale = []
    try:
        if args.take:
            take(sys.stdin, args.take)
            return 0
        for name in DOCUMENTS:
            old = (ROOT / name).read_text(encoding="utf-8")
            new = fill(old)
            if old != new:
                stale.append(name)
                if not args.check:
                    (ROOT / name).write_text(new, encoding="utf-8")
    except BlockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in stale:
        print(f"{name}: {'not what its records say' if args.check else 'rewritten'}")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
