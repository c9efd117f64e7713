"""A record as Markdown for people and as CSV for programs; both are made from the same rows.

Owns wording and digits. Must not measure. Invariant: a figure never appears without what it is a
figure of (set, depth, stop mode), there is no number over all sets, and synthetic sets stand apart.
"""

import csv
import io

from cudflash.bench.lanes import PLAIN
from cudflash.bench.record import COMPLETE
from cudflash.bench.runner import verify_curve
from cudflash.bench.statistics import cells

COLUMNS = (
    "model", "size", "backend", "threads", "test", "set", "kind", "stop", "depth", "drafter", "lane",
    "prompts", "answers", "tokens", "t/s", "t/s sd", "prompt t/s", "speed-up", "speed-up low",
    "speed-up high", "label", "acceptance length", "tokens per pass", "acceptance rate",
    "draft ms", "verify ms", "decide ms", "draft share", "verify share", "decide share",
    "plain share", "rest share", "looping", "ended by stop", "exact",
)  # fmt: skip
SHOWN = (
    ("set", "set"), ("test", "test"), ("lane", "lane"), ("t/s", "t/s"), ("speed-up", "speed-up"),
    ("acceptance length", "accept. length"), ("acceptance rate", "accepted"),
    ("looping", "looping"), ("exact", "exact"), ("label", "label"),
)  # fmt: skip


def rows(record):
    """Return one dict per cell with the keys of ``COLUMNS``; numbers unrounded, None for none."""
    groups = {group["name"]: group for group in record["groups"]}
    return [_row(record, groups[cell["group"]], cell) for cell in cells(record["runs"])]


def _row(record, group, cell):
    """One row; with several groups a plain lane tells beside which draft it was measured."""
    accept, phases = cell["acceptance"] or {}, cell["phases"]
    low, high = cell["speedup_interval"] or (None, None)
    per_round = phases["per_round_ms"] if phases else {}
    share = phases["share"] if phases else {}
    depth = f" @ d{cell['depth']}" if cell["depth"] else ""
    draft = group["draft"] or {}
    values = {
        "model": group["target"]["path"], "size": group["planned_bytes"],
        "backend": f"{group['device']['kind']} {group['kernel_path']}",
        "threads": group["threads"], "test": f"tg{record['settings']['n_tokens']}{depth}",
        "drafter": draft.get("path") if cell["lane"] != PLAIN else None,
        "t/s": cell["tps"], "t/s sd": cell["tps_sd"], "prompt t/s": cell["prompt_tps"],
        "speed-up": cell["speedup"], "speed-up low": low, "speed-up high": high,
        "label": cell["speedup_label"], "acceptance length": accept.get("length"),
        "tokens per pass": accept.get("tokens_per_pass"), "acceptance rate": accept.get("rate"),
        "ended by stop": cell["ended_by_stop"],
    }  # fmt: skip
    if cell["lane"] == PLAIN and len(record["groups"]) > 1:
        values["lane"] = f"{PLAIN} beside {cell['group']}"
    values |= {f"{name} ms": per_round.get(name) for name in ("draft", "verify", "decide")}
    values |= {f"{n} share": share.get(n) for n in ("draft", "verify", "decide", "plain", "rest")}
    return {name: values[name] if name in values else cell[name] for name in COLUMNS}


def to_csv(record):
    """Return the rows as CSV text, RFC 4180, LF line ends."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows(record):
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
    return out.getvalue()


def to_markdown(record):
    """Return the whole report."""
    parts = [head(record), main_tables(record), position_tables(record), _phase_table(record),
             verify_tables(record), notes(record)]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def table(header, lines):
    """Return a Markdown table; the first column is left-aligned, the others right-aligned."""
    text = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join(text + ["| " + " | ".join(line) + " |" for line in lines])


def number(value, digits=2):
    """A number with digits, "–" for none."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value):
    """A share in percent, "–" for none."""
    return "–" if value is None else f"{100 * value:.1f} %"


def speedup_text(row):
    """``1.52 (1.40–1.66)``; without an interval the bare number with a question mark."""
    if row["speed-up"] is None:
        return "–"
    if row["speed-up low"] is None:
        return f"{row['speed-up']:.2f} (?)"
    return f"{row['speed-up']:.2f} ({row['speed-up low']:.2f}–{row['speed-up high']:.2f})"


def shown_cells(row):
    """The cells of ``SHOWN`` of one row, as text."""
    sd = "" if row["t/s sd"] is None else f" ± {row['t/s sd']:.1f}"
    text = {
        "set": row["set"], "test": row["test"], "lane": row["lane"], "label": row["label"] or "",
        "t/s": "–" if row["t/s"] is None else f"{row['t/s']:.1f}{sd}",
        "speed-up": speedup_text(row), "acceptance length": number(row["acceptance length"]),
        "acceptance rate": percent(row["acceptance rate"]), "looping": percent(row["looping"]),
        "exact": {True: "yes", False: "NO", None: "n/a"}[row["exact"]],
    }  # fmt: skip
    return [text[key] for key, _ in SHOWN]


def head(record):
    """What ran on what: build, machine, files, geometry."""
    machine, versions, settings = record["machine"], record["versions"], record["settings"]
    build = versions["cudflash"] + (f" ({versions['commit']})" if versions["commit"] else "")
    lines = []
    if record["status"] != COMPLETE:
        lines.append(f"**This record is {record['status']}: it holds what was measured until then.**")
    lines.append(
        f"cudflash {build} on {machine['cpu']}, {machine['cpus']} CPUs; {record['created']}; answers "
        f"of {settings['n_tokens']} tokens at most, each made {settings['repetitions']} times in turns"
    )
    for group in record["groups"]:
        line = (
            f"- {group['target']['path']} (sha256 {group['target']['sha256'][:12]}), "
            f"threads: {group['threads']}, context {group['n_ctx']}, KV {group['kv_type']}, "
            f"activations {group['activations']}"
        )
        draft = group["draft"]
        if draft is not None:
            line += (
                f"; draft {draft['path']} ({draft['kind']}, sha256 {draft['sha256'][:12]}, block "
                f"{draft['block_size']}, taps {draft['taps']['value']}, window "
                f"{draft['window']['value']} ({draft['window']['source']}), sink "
                f"{draft['sink']['value']})"
            )
        lines.append(line)
    return "\n".join(lines)


def main_tables(record):
    """The tables by kind of text and stop mode, each with its range over sets."""
    header = [shown for _, shown in SHOWN]
    parts = []
    for kind in ("natural", "synthetic"):
        for stop in record["settings"]["stops"]:
            mine = [r for r in rows(record) if r["kind"] == kind and r["stop"] == stop]
            if not mine:
                continue
            title = f"#### {kind.capitalize()} text, {_STOPS[stop]}"
            if kind == "synthetic":
                title += "; not a result, periodic text hides conditioning faults"
            parts.append(f"{title}\n\n" + table(header, [shown_cells(row) for row in mine]))
            if kind == "natural":
                parts.append(_range_text(mine))
    return "\n\n".join(part for part in parts if part)


_STOPS = {
    "natural": "answers end where the model ends them",
    "forced": "forced length: answers run on past the model's end token",
}


def _range_text(mine):
    """The spread over sets, because no single number stands for all text."""
    lines = []
    for lane in dict.fromkeys(row["lane"] for row in mine):
        own = [row for row in mine if row["lane"] == lane and row["speed-up"] is not None]
        if len({row["set"] for row in own}) < 2:
            continue
        low, high = (f(own, key=lambda row: row["speed-up"]) for f in (min, max))
        lines.append(
            f"{lane}: from {low['speed-up']:.2f} ({low['set']}, {low['test']}) to "
            f"{high['speed-up']:.2f} ({high['set']}, {high['test']}) times plain decoding."
        )
    return "\n".join(lines)


def _drafted_cells(record):
    return [cell for cell in cells(record["runs"]) if cell["acceptance"] is not None]


def position_tables(record):
    """Acceptance by position, unconditional and conditional."""
    found = _drafted_cells(record)
    if not found:
        return ""
    longest = max(len(cell["acceptance"]["at"]) for cell in found)
    header = ["set", "depth", "stop", "lane", *map(str, range(1, longest + 1))]
    parts = []
    for key, title in (
        ("at", "#### Share of proposals accepted, by position"),
        ("at_conditional", "#### The same, given that all before it were accepted"),
    ):
        lines = []
        for cell in found:
            shares = cell["acceptance"][key] + [None] * (longest - len(cell["acceptance"][key]))
            lines.append([cell["set"], str(cell["depth"]), cell["stop"], cell["lane"],
                          *(number(share) for share in shares)])  # fmt: skip
        parts.append(title + "\n\n" + table(header, lines))
    return "\n\n".join(parts)


def _phase_table(record):
    lines = []
    for row in rows(record):
        if row["draft share"] is not None:
            names = ("draft", "verify", "decide")
            lines.append([
                row["set"], row["test"], row["lane"],
                *(number(row[f"{name} ms"]) for name in names),
                *(percent(row[f"{name} share"]) for name in (*names, "plain", "rest")),
            ])  # fmt: skip
    if not lines:
        return ""
    header = ["set", "test", "lane", "draft ms", "verify ms", "decide ms", "draft", "verify",
              "decide", "plain", "rest"]  # fmt: skip
    return "#### Time per round, and shares of the decoding time\n\n" + table(header, lines)


def verify_tables(record):
    """t(M) of the verify pass, one table per depth."""
    parts = []
    for group, depth in dict.fromkeys((c["group"], c["depth"]) for c in record["verify_cost"]):
        costs = [c for c in record["verify_cost"] if (c["group"], c["depth"]) == (group, depth)]
        lines = [
            [str(m), f"{ms:.2f}", f"{ratio:.2f}"] for m, ms, ratio in verify_curve(costs)
        ]
        title = f"#### Verifying M rows at once, after {depth} tokens"
        parts.append(title + "\n\n" + table(["rows M", "ms", "t(M) / t(1)"], lines))
    return "\n\n".join(parts)


def notes(record):
    """What a reader must know of single cells, as a list."""
    lines, found = [], cells(record["runs"])
    dead = [cell for cell in found if cell["never_accepted"]]
    lines += _by_lane(dead, "not one proposal was accepted; 'cudflash inspect' and 'cudflash verify' "
                            "tell what may be wrong")  # fmt: skip
    loop = [cell for cell in found if cell["looping"] and cell["looping"] > 0.5]
    lines += _by_lane(loop, "more than half of the answers end in a loop, which inflates acceptance")
    for cell in found:
        if cell["timed_prompts"] < cell["prompts"]:
            short = cell["prompts"] - cell["timed_prompts"]
            lines.append(f"{cell['set']} at depth {cell['depth']}, {cell['stop']} stop, "
                         f"{cell['lane']}: {short} of {cell['prompts']} answers have fewer than two "
                         "tokens, so they have no decoding speed")  # fmt: skip
    for run in record["runs"]:
        if run["fault"]:
            lines.append(f"{run['set']} {run['index']}, {run['lane']}: {run['fault']}")
    for one in record["differences"]:
        lines.append(
            f"DIFFERENT: {one['set']} {one['index']} at depth {one['depth']}, {one['lane']}, "
            f"repetition {one['repetition']}: token {one['first_difference']} is {one['found']}, "
            f"{one['against']} has {one['expected']}"
        )
    for item in record["prompts"]["items"]:
        if item["note"]:
            lines.append(f"{item['set']} {item['index']} at depth {item['depth']}: {item['note']}")
    if record["others_share"] is not None:
        lines.append(f"everything else used {percent(record['others_share'])} of the machine")
    return "\n".join(f"- {note}" for note in dict.fromkeys(lines))


def _by_lane(found, text):
    """One line per lane and stop mode for what is to be said of several of its cells."""
    grouped = {}
    for cell in found:
        where = f"{cell['set']} at {cell['depth']}" if cell["depth"] else cell["set"]
        grouped.setdefault((cell["lane"], cell["stop"]), []).append(where)
    return [f"{lane}, {stop} stop ({', '.join(dict.fromkeys(where))}): {text}"
            for (lane, stop), where in grouped.items()]  # fmt: skip
