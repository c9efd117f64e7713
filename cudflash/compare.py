"""Comparing two records of ``bench``: which single thing differed, and what it did.

Owns the rule that makes a comparison causal. Must not measure. Invariant: a ratio is only called
measured when exactly one declared variable differs between the two sides; with more, any of them may
have caused it, however large the ratio is.

Two runs of plain decoding, one in each record, are the control: where nothing that differs can touch
plain decoding, its ratio shows how far the machine itself has drifted, and the ratio of speed-ups
decides; else the ratio of speeds does.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass

from cudflash.bench.lanes import PLAIN
from cudflash.bench.record import COMPLETE
from cudflash.bench.statistics import geometric_mean, ratio_of_sums, speed, verdict
from cudflash.errors import UsageError

MEASURED, CONFOUNDED, INSUFFICIENT = "measured", "confounded", "insufficient"
FEWEST_PROMPTS = 2
# variables that cannot touch plain decoding
OF_DRAFTING = (
    "draft", "draft window", "draft sink", "draft block", "draft activations", "verify length",
    "acceptance rule", "mode",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One lane of one record.

    Attributes
    ----------
    path : str
    record : dict
    group, lane : dict
    """

    path: str
    record: dict
    group: dict
    lane: dict

    @property
    def name(self):
        """Lane and file, for people."""
        return f"{self.lane['name']} ({self.path})"

    def runs(self, lane=None):
        """(stop, depth, set, index) -> runs of the lane, or of another lane of its group."""
        name = lane or self.lane["name"]
        found = defaultdict(list)
        for run in self.record["runs"]:
            if (run["group"], run["lane"]) == (self.group["name"], name):
                found[run["stop"], run["depth"], run["set"], run["index"]].append(run)
        return found


def choose_sides(a, b, path_a, path_b, lane_a=None, lane_b=None):
    """Return pairs of sides to compare.

    Without names: the drafted lane of each record where each has one; else every lane that both
    have, by name.

    Parameters
    ----------
    a, b : dict
        Records.
    path_a, path_b : str
    lane_a, lane_b : str, optional

    Raises
    ------
    UsageError
        Where the lanes do not say what is to be compared.
    """
    ours, theirs = _sides(a, path_a), _sides(b, path_b)
    if lane_a or lane_b:
        first = lane_a or lane_b
        second = lane_b or lane_a
        return [(_named(ours, first, path_a), _named(theirs, second, path_b))]
    drafted = [[s for s in sides if s.lane["drafter"] != PLAIN] for sides in (ours, theirs)]
    if len(drafted[0]) == len(drafted[1]) == 1:
        return [(drafted[0][0], drafted[1][0])]
    names = {side.lane["name"]: side for side in reversed(theirs)}
    pairs = [(side, names[side.lane["name"]]) for side in ours if side.lane["name"] in names]
    drafting = [pair for pair in pairs if pair[0].lane["drafter"] != PLAIN]
    if not pairs or (path_a == path_b):
        listed = [", ".join(dict.fromkeys(s.lane["name"] for s in sides)) for sides in (ours, theirs)]
        raise UsageError(
            f"{path_a} has the lanes {listed[0]}, {path_b} has {listed[1]}: say which to compare "
            "with --lane and --lane-b"
        )
    return drafting or pairs[:1]


def _sides(record, path):
    return [Side(path, record, g, lane) for g in record["groups"] for lane in g["lanes"]]


def _named(sides, name, path):
    for side in sides:
        if side.lane["name"] == name:
            return side
    listed = ", ".join(dict.fromkeys(side.lane["name"] for side in sides))
    raise UsageError(f"{path}: there is no lane {name!r}, expected one of {listed}")


# -- what differs ---------------------------------------------------------------------------------


def variables(side):
    """Return every declared variable of a side: name -> value; None where it does not apply.

    What a draft's file fixes (kind, taps, block, its own window) is one variable, the draft; an
    override is one of its own.
    """
    record, group, lane = side.record, side.group, side.lane
    settings, sampling = record["settings"], record["settings"]["sampling"]
    drafted = lane["drafter"] != PLAIN
    draft = group["draft"]
    if draft is not None and draft["kind"] != lane["drafter"]:
        draft = None
    greedy = sampling["temperature"] <= 0
    versions = record["versions"]
    found = {
        "machine": f"{record['machine']['cpu']}, {record['machine']['cpus']} CPUs",
        "device": f"{group['device']['kind']} {group['device']['name']}",
        "kernel path": group["kernel_path"],
        "threads": group["threads"],
        "cudflash": f"{versions['cudflash']} {versions['commit']}".strip(),
        "numerics": group["numerics"],
        **{name: versions[name] for name in ("python", "numpy", "numba")},
        "target": group["target"]["sha256"],
        "activations": group["activations"],
        "KV type": group["kv_type"],
        "context": group["n_ctx"],
        "sampling": "greedy" if greedy else dict(sorted(sampling.items())),
        "seed": None if greedy else settings["seed"],
        "tokens per answer": settings["n_tokens"],
        "draft": "none",
        "draft window": None, "draft sink": None, "draft block": None, "draft activations": None,
        "verify length": lane["verify_length"],
        "acceptance rule": lane["accept"] if drafted and not greedy else None,
        "mode": lane["mode"],
    }  # fmt: skip
    if drafted:
        found["draft"] = lane["drafter"]
    if draft is not None:
        found["draft"] += f" {draft['sha256']}"
        window, sink = draft["window"], draft["sink"]
        found["draft window"] = window["value"] if window["source"] == "override" else "its own"
        found["draft sink"] = sink["value"] if sink["source"] == "override" else "its own"
        found["draft block"] = "full" if draft["full_block"] else "short"
        # older records have one precision for both
        found["draft activations"] = draft.get("activations", group["activations"])
    return found


def differing(a, b):
    """Return {name: (value of a, value of b)} of the declared variables that differ.

    A variable that applies to one side only (the verify length of plain decoding) follows from
    another one and is not listed.
    """
    ours, theirs = variables(a), variables(b)
    return {
        name: (ours[name], theirs[name])
        for name in ours
        if ours[name] != theirs[name] and None not in (ours[name], theirs[name])
    }


def changed_runs(a, b):
    """Names of the variables that differ and could touch plain decoding."""
    return [name for name in differing(a, b) if name not in OF_DRAFTING]


# -- the comparison -------------------------------------------------------------------------------


def compare(a, b, allow_confounded=False):
    """Compare two sides prompt by prompt.

    Parameters
    ----------
    a, b : Side
    allow_confounded : bool
        Return the ratios, labelled, where more than one variable differs.

    Returns
    -------
    dict
        ``a``, ``b``, ``differs``, ``label``, ``notes``, ``drift`` and ``cells``: per stop mode,
        depth and set ``prompts``, ``speed`` and ``speed_interval`` (b over a),
        ``speedup`` and ``speedup_interval`` (of the ratios to plain decoding), ``length`` and
        ``length_interval`` (acceptance length), ``outputs_differ`` and ``label``.

    Raises
    ------
    UsageError
        For different prompts, a single prompt, or more than one variable.
    """
    _check_prompts(a, b)
    differs = differing(a, b)
    if len(differs) > 1 and not allow_confounded:
        listed = "; ".join(f"{name}: {_short(x)} and {_short(y)}" for name, (x, y) in differs.items())
        raise UsageError(
            f"{a.name} and {b.name} differ in {len(differs)} variables, so a difference has no cause "
            f"that could be named ({listed}); measure again with one of them changed, or pass "
            "--allow-confounded for the bare ratios"
        )
    ours, theirs = a.runs(), b.runs()
    common = [key for key in ours if key in theirs]
    if len(common) < FEWEST_PROMPTS:
        raise UsageError(
            f"{a.name} and {b.name} have {len(common)} prompt in common, expected at least "
            f"{FEWEST_PROMPTS}: one observation is no evidence; measure more prompts"
        )
    notes = [
        f"{side.path} is {side.record['status']}: only prompts that both have are compared"
        for side in (a, b) if side.record["status"] != COMPLETE
    ]  # fmt: skip
    confounded = len(differs) > 1
    controls = a.runs(PLAIN), b.runs(PLAIN)
    cells = []
    for where in dict.fromkeys(key[:3] for key in common):
        keys = [key for key in common if key[:3] == where]
        cell = _cell(keys, ours, theirs, controls, bool(changed_runs(a, b)))
        if cell["prompts"] < FEWEST_PROMPTS:
            cell["label"] = INSUFFICIENT
        elif confounded:
            cell["label"] = CONFOUNDED
        cells.append(dict(zip(("stop", "depth", "set"), where)) | cell)
    drift = _drift(a, b, common, controls)
    if drift is not None and drift["interval"] and not _holds(drift["interval"]):
        low, high = drift["interval"]
        notes.append(
            f"plain decoding, which nothing that differs can touch, ran at {drift['ratio']:.2f} "
            f"({low:.2f}–{high:.2f}) times the speed: the machine was not held still, so read the "
            "ratio of speed-ups"
        )
    if any(cell["outputs_differ"] for cell in cells):
        notes.append("where outputs differ, the two sides wrote different texts: speeds are per "
                     "token, and acceptance lengths are those of different texts")  # fmt: skip
    labels = {cell["label"] for cell in cells}
    label = CONFOUNDED if confounded else MEASURED if MEASURED in labels else INSUFFICIENT
    return {
        "a": a.name, "b": b.name,
        "differs": {name: list(values) for name, values in differs.items()},
        "label": label, "notes": notes, "drift": drift, "cells": cells,
    }  # fmt: skip


def _check_prompts(a, b):
    ours, theirs = (side.record["prompts"]["sha256"] for side in (a, b))
    if ours == theirs:
        return
    items = [
        {(i["set"], i["index"], i["depth"]): i["sha256"] for i in side.record["prompts"]["items"]}
        for side in (a, b)
    ]
    same = sum(items[0][key] == items[1].get(key) for key in items[0])
    raise UsageError(
        f"{a.path} and {b.path} were measured with different prompts ({len(items[0])} and "
        f"{len(items[1])}, {same} of them equal): the text decides acceptance, so nothing else could "
        "be concluded; measure both with the same sets, depths and tokenizer"
    )


def _holds(bounds):
    return bounds[0] <= 1 <= bounds[1]


def _median(runs):
    speeds = [s for s in map(speed, runs) if s]
    return statistics.median(speeds) if speeds else None


def _ratio(above, below):
    return above / below if above and below else None


def _cell(keys, ours, theirs, controls, plain_changes):
    """One cell; what decides is the speed-up, or the speed where plain decoding changes too."""
    speeds, speedups, lengths, differ = [], [], [], 0
    for key in keys:
        pair = _ratio(_median(theirs[key]), _median(ours[key]))
        speeds.append(pair)
        plain = _ratio(_median(controls[1].get(key, ())), _median(controls[0].get(key, ())))
        speedups.append(_ratio(pair, plain))
        counts = [[run["counts"] for run in runs[key] if run["counts"]] for runs in (ours, theirs)]
        if all(counts):
            lengths.append([_sums(side) for side in counts])
        digests = [{run["tokens_sha256"] for run in runs[key]} for runs in (ours, theirs)]
        differ += digests[0] != digests[1]
    timed = [s for s in speeds if s]
    value, bounds = geometric_mean(timed)
    speedup, speedup_bounds = geometric_mean([s for s in speedups if s])
    length, length_bounds = _length_ratio(lengths)
    return {
        "prompts": len(timed), "speed": value, "speed_interval": bounds,
        "speedup": speedup, "speedup_interval": speedup_bounds,
        "length": length, "length_interval": length_bounds, "outputs_differ": differ,
        "label": verdict(len(timed), bounds if plain_changes else speedup_bounds or bounds),
    }  # fmt: skip


def _sums(counts):
    """(tokens emitted by drafting rounds, those rounds) of one prompt."""
    return (
        sum(c["emitted"] - c["plain_rounds"] for c in counts), sum(c["draft_rounds"] for c in counts)
    )  # fmt: skip


def _length_ratio(lengths):
    """Acceptance length of b over that of a, pooled over prompts, with its interval."""
    from cudflash.bench.statistics import interval

    rows = [[*a, *b] for a, b in lengths]
    if not rows:
        return None, None
    a_length, _ = ratio_of_sums(a for a, _ in lengths)
    b_length, _ = ratio_of_sums(b for _, b in lengths)
    bounds = interval(rows, lambda m: (m[:, 2] / m[:, 3]) / (m[:, 0] / m[:, 1]))
    return _ratio(b_length, a_length), bounds


def _drift(a, b, common, controls):
    """Ratio of the two plain runs, where nothing that differs can touch them."""
    if a.record is b.record or changed_runs(a, b):
        return None
    ratios = [
        _ratio(_median(controls[1].get(key, ())), _median(controls[0].get(key, ())))
        for key in common
    ]
    value, bounds = geometric_mean([r for r in ratios if r])
    return None if value is None else {"ratio": value, "interval": bounds}


def _short(value):
    text = str(value)
    words = [w[:12] if len(w) == 64 and w.isalnum() else w for w in text.split()]
    return " ".join(words)
