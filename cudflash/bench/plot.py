"""Pictures of a record: speed-up and acceptance against depth, position curves, verify stairs.

Owns the drawing. Must not measure. Invariant: every picture says on itself which models and which
commit it shows; synthetic text and, beside a draft, scripted drafters are never drawn. Needs
matplotlib, the extra ``plot``.
"""

import importlib.util

from cudflash.bench.report import rows
from cudflash.bench.runner import verify_curve
from cudflash.bench.statistics import cells
from cudflash.errors import UsageError

INCHES = (11, 8.5)
DPI = 120
MARKERS = "os^Dv<>ph*"


def require_matplotlib():
    """Raise UsageError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed; pip install 'cudflash[plot]'"
        )


def plot(record, path):
    """Draw four panels into a file, SVG or PNG by its name.

    Equal records give equal SVG files.

    Parameters
    ----------
    record : dict
    path : str or path-like
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": "cudflash", "svg.fonttype": "none", "font.size": 9, "axes.grid": True,
        "grid.alpha": 0.3,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 2)
        lanes = _shown_lanes(record)
        shown = [r for r in rows(record) if r["kind"] == "natural" and r["lane"] in lanes]
        drafted = [row for row in shown if row["speed-up"] is not None]
        _against_depth(panels[0, 0], drafted, "speed-up", "times plain decoding")
        panels[0, 0].axhline(1, color="black", linewidth=1)
        _against_depth(panels[0, 1], drafted, "acceptance length", "tokens per drafting round")
        _positions(panels[1, 0], record, lanes)
        _stairs(panels[1, 1], record)
        figure.suptitle(_title(record), fontsize=8)
        metadata = {"Date": None} if str(path).lower().endswith(".svg") else {}
        figure.savefig(path, dpi=DPI, metadata=metadata)


def _shown_lanes(record):
    """Lanes of drafts; the scripted ones only where there is no draft."""
    lanes = [lane for group in record["groups"] for lane in group["lanes"]]
    drafts = {lane["name"] for lane in lanes if lane["verify_length"] and not lane["scripted"]}
    return drafts or {lane["name"] for lane in lanes}


def _title(record):
    group = record["groups"][0]
    drafts = [g["draft"]["path"] for g in record["groups"] if g["draft"] is not None]
    build = record["versions"]["commit"] or record["versions"]["cudflash"]
    status = "" if record["status"] == "complete" else f"; {record['status']}"
    return (
        f"{group['target']['path']}, {' and '.join(drafts) or 'no draft'}; {group['device']['kind']} "
        f"{record['machine']['cpu']}, {group['threads']} threads; cudflash {build}{status}"
    )


def _against_depth(panel, drafted, key, label):
    """One line per set and lane over the depths; sets side by side where there is one depth."""
    panel.set_title(f"{key}, natural text")
    panel.set_ylabel(label)
    depths = sorted({row["depth"] for row in drafted})
    lanes = list(dict.fromkeys(row["lane"] for row in drafted))
    stops = {row["stop"] for row in drafted}
    drafted = [r for r in drafted if r["stop"] == ("natural" if "natural" in stops else "forced")]
    sets = list(dict.fromkeys(row["set"] for row in drafted))
    for number, lane in enumerate(lanes):
        mine = [row for row in drafted if row["lane"] == lane and row[key] is not None]
        if len(depths) > 1:
            for name in sets:
                line = sorted((r for r in mine if r["set"] == name), key=lambda r: r["depth"])
                panel.plot(
                    [r["depth"] for r in line], [r[key] for r in line],
                    marker=MARKERS[number % len(MARKERS)], color=f"C{sets.index(name) % 10}",
                    linestyle=("-", "--", ":", "-.")[number % 4], label=f"{name}, {lane}",
                )  # fmt: skip
            continue
        step = 0.8 / max(1, len(lanes))
        at = [sets.index(r["set"]) + (number - (len(lanes) - 1) / 2) * step for r in mine]
        panel.bar(at, [r[key] for r in mine], step * 0.9, color=f"C{number}", label=lane,
                  yerr=_errors(mine) if key == "speed-up" else None, capsize=2)  # fmt: skip
    if len(depths) > 1:
        panel.set_xlabel("tokens before the prompt")
    else:
        panel.set_xticks(range(len(sets)), sets, rotation=30)
    if drafted:
        panel.legend(fontsize=6, ncols=2)


def _errors(mine):
    """Distances to the ends of the intervals; zero where there is none."""
    low = [0 if r["speed-up low"] is None else max(0, r["speed-up"] - r["speed-up low"]) for r in mine]
    high = [0 if r["speed-up high"] is None else max(0, r["speed-up high"] - r["speed-up"])
            for r in mine]  # fmt: skip
    return [low, high]


def _positions(panel, record, shown):
    """Share accepted at each position: full lines unconditional, dotted ones conditional."""
    panel.set_title("accepted by position (dotted: given all before it)")
    panel.set_xlabel("position in the block")
    panel.set_ylim(0, 1.02)
    found = [
        cell for cell in cells(record["runs"])
        if cell["acceptance"] and cell["kind"] == "natural" and cell["lane"] in shown
    ]  # fmt: skip
    deepest = {}
    for cell in found:  # the longest verify length of each drafter shows the most
        drafter = (cell["group"], cell["lane"].split(" k")[0])
        kept = deepest.get(drafter)
        if kept is None or len(cell["acceptance"]["at"]) > kept[1]:
            deepest[drafter] = (cell["lane"], len(cell["acceptance"]["at"]))
    lanes = {lane for lane, _ in deepest.values()}
    first = min((c["depth"] for c in found), default=0)
    mine = [c for c in found if c["lane"] in lanes and c["depth"] == first]
    sets = list(dict.fromkeys(cell["set"] for cell in mine))
    order = list(dict.fromkeys(cell["lane"] for cell in mine))
    for cell in mine:
        color, marker = f"C{sets.index(cell['set']) % 10}", MARKERS[order.index(cell["lane"]) % 10]
        for key, style in (("at", "-"), ("at_conditional", ":")):
            shares = cell["acceptance"][key]
            panel.plot(
                range(1, len(shares) + 1), [float("nan") if s is None else s for s in shares],
                style, color=color, marker=marker, markersize=3,
                label=f"{cell['set']}, {cell['lane']}" if key == "at" else None,
            )  # fmt: skip
    if mine:
        panel.legend(fontsize=6, ncols=2)


def _stairs(panel, record):
    """t(M) / t(1) of the verify pass."""
    panel.set_title("cost of verifying M rows, in decode steps")
    panel.set_xlabel("rows M")
    for group, depth in dict.fromkeys((c["group"], c["depth"]) for c in record["verify_cost"]):
        costs = [c for c in record["verify_cost"] if (c["group"], c["depth"]) == (group, depth)]
        curve = verify_curve(costs)
        panel.step([m for m, _, _ in curve], [ratio for _, _, ratio in curve], where="mid",
                   marker=".", label=f"after {depth} tokens")  # fmt: skip
    if record["verify_cost"]:
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
