"""The arithmetic of a bench: acceptance, speeds, ratios with bootstrap intervals.

Owns the definitions (docs/MEASURING.md says what each may be used for). Must not know engines.
Invariant: the same runs give the same numbers, intervals included: the bootstrap has a fixed seed.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from cudflash.bench.lanes import PLAIN
from cudflash.spec.stats import identities

BOOTSTRAP = 2000  # resamples of the prompts
BOOTSTRAP_SEED = 20260822
LEVEL = 0.95
FEWEST = 5  # prompts; fewer give no interval worth reading
COUNTS = (
    "rounds", "draft_rounds", "plain_rounds", "drafted", "tested", "accepted", "accepted_emitted",
    "emitted", "bonus", "corrected", "stopped", "cut",
)  # fmt: skip
LISTS = ("proposed_at", "tested_at", "accepted_at")
TIMES = ("draft_ms", "verify_ms", "decide_ms", "plain_ms")


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some repeats."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values):
        """Summarise ``values``; None when there are none."""
        values = [v for v in values if v is not None]
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits=1):
        """Return ``median (low–high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def pool(counts):
    """Add up the counters of several answers.

    Parameters
    ----------
    counts : iterable of dict
        With the keys of ``SpecStats.to_dict``.

    Returns
    -------
    dict
        Sums; lists are added position by position.

    Raises
    ------
    CudflashError
        If the sums break an identity of ``cudflash.spec.stats``.
    """
    sums = dict.fromkeys(COUNTS, 0) | dict.fromkeys(TIMES, 0.0) | {name: [] for name in LISTS}
    for one in counts:
        for name in COUNTS + TIMES:
            sums[name] += one[name]
        for name in LISTS:
            longer = max(len(sums[name]), len(one[name]))
            padded = [list(x) + [0] * (longer - len(x)) for x in (sums[name], one[name])]
            sums[name] = [a + b for a, b in zip(*padded)]
    identities(sums)
    return sums


def acceptance(sums):
    """Return what the counters say about acceptance.

    Returns
    -------
    dict
        ``length``: tokens emitted per round that drafted, the target's own included.
        ``tokens_per_pass``: the same over all rounds, plain ones included.
        ``rate``: accepted / drafted.
        ``at``: share of the proposals at each position that was accepted (unconditional).
        ``at_conditional``: the same among those that were compared, that is, whose predecessors
        were all accepted. None wherever there was nothing to divide by.
    """
    drafting_emitted = sums["emitted"] - sums["plain_rounds"]  # a plain round emits one token
    return {
        "length": _over(drafting_emitted, sums["draft_rounds"]),
        "tokens_per_pass": _over(sums["emitted"], sums["rounds"]),
        "rate": _over(sums["accepted"], sums["drafted"]),
        "at": [_over(a, p) for a, p in zip(sums["accepted_at"], sums["proposed_at"])],
        "at_conditional": [_over(a, t) for a, t in zip(sums["accepted_at"], sums["tested_at"])],
    }


def phases(sums, decode_ms):
    """Return milliseconds per round and shares of the time between first and last token.

    ``rest`` is what the rounds' own clocks do not see: choosing, text, events.
    """
    rounds = sums["draft_rounds"]
    rest = max(0.0, decode_ms - sum(sums[name] for name in TIMES))
    parts = {name.removesuffix("_ms"): sums[name] for name in TIMES} | {"rest": rest}
    return {
        "per_round_ms": {name: _over(parts[name], rounds) for name in ("draft", "verify", "decide")},
        "share": {name: _over(ms, decode_ms) for name, ms in parts.items()},
    }


def _over(a, b):
    return a / b if b else None


# -- resampling -----------------------------------------------------------------------------------


def interval(rows, statistic, *, n=BOOTSTRAP, seed=BOOTSTRAP_SEED, level=LEVEL):
    """Return the percentile bootstrap interval of a statistic of column means.

    Parameters
    ----------
    rows : sequence of sequences of float
        One row per prompt: the prompts are what is resampled.
    statistic : callable
        Means, float64 (n, columns) -> values (n,). Ratios of sums are ratios of means.
    n, seed, level : resamples, generator, coverage

    Returns
    -------
    (low, high) or None
        None for fewer than two rows: one prompt has no spread.
    """
    rows = np.asarray(rows, np.float64)
    if len(rows) < 2:
        return None
    picks = np.random.Generator(np.random.PCG64(seed)).integers(0, len(rows), (n, len(rows)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(rows[picks].mean(axis=1))
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def geometric_mean(ratios):
    """Return (geometric mean, interval) of ratios, one per prompt; (None, None) without any."""
    ratios = [r for r in ratios if r]
    if not ratios:
        return None, None
    logs = np.log(ratios)[:, None]
    return float(np.exp(logs.mean())), interval(logs, lambda means: np.exp(means[:, 0]))


def ratio_of_sums(pairs):
    """Return (sum a / sum b, interval) of pairs (a, b), one per prompt."""
    pairs = list(pairs)
    below = sum(b for _, b in pairs)
    if not pairs or not below:
        return None, None
    return sum(a for a, _ in pairs) / below, interval(pairs, lambda m: m[:, 0] / m[:, 1])


def verdict(n_prompts, bounds):
    """Return "measured", or "insufficient" where prompts or interval do not decide a direction."""
    if n_prompts < FEWEST or bounds is None or bounds[0] <= 1 <= bounds[1]:
        return "insufficient"
    return "measured"


# -- cells ----------------------------------------------------------------------------------------


def speed(run):
    """Tokens per second between first and last token; None for answers without a second one."""
    return 1e3 * run["decode_tokens"] / run["decode_ms"] if run["decode_ms"] else None


def cells(runs):
    """Summarise the runs of a record: one cell per stop mode, depth, set and lane.

    Parameters
    ----------
    runs : list of dict
        See ``cudflash.bench.runner``.

    Returns
    -------
    list of dict
        By stop mode, depth, set and group in the order in which they were measured; the plain lane
        first, then by name and verify length.
    """
    groups = defaultdict(list)
    for run in runs:
        groups[run["stop"], run["depth"], run["set"], run["group"], run["lane"]].append(run)
    seen = [list(dict.fromkeys(key[part] for key in groups)) for part in range(4)]

    def order(key):
        return [*(seen[part].index(key[part]) for part in range(4)), _lane_order(key[4])]

    found = []
    for stop, depth, name, group, lane in sorted(groups, key=order):
        own = groups[stop, depth, name, group, lane]
        plain = groups.get((stop, depth, name, group, PLAIN), [])
        where = {"stop": stop, "depth": depth, "set": name, "group": group, "lane": lane}
        found.append(where | _cell(own, plain if lane != PLAIN else []))
    return found


def _lane_order(name):
    """Plain first, then by drafter, verify length as a number, and rule."""
    drafter, _, rest = name.partition(" ")
    length, _, rule = rest.removeprefix("k").partition(" ")
    return name != PLAIN, drafter, int(length) if length.isdecimal() else 0, rule


def _cell(own, plain):
    by_prompt = _by_prompt(own)
    kinds = {run["kind"] for run in own}
    counts = [run["counts"] for run in own if run["counts"] is not None]
    sums = pool(counts) if counts else None
    decode_ms = sum(run["decode_ms"] for run in own)
    speeds = _repetition_speeds(own)
    cell = {
        "kind": "natural" if kinds == {"natural"} else "synthetic",
        "prompts": len(by_prompt),
        "answers": len(own),
        "timed_prompts": sum(_median_speed(runs) is not None for runs in by_prompt.values()),
        "prompt_tokens": statistics.mean(runs[0]["prompt_tokens"] for runs in by_prompt.values()),
        "tokens": statistics.mean(runs[0]["n_tokens"] for runs in by_prompt.values()),
        "ended_by_stop": _over(sum(r["finish_reason"] == "stop" for r in own), len(own)),
        "looping": _over(sum(run["loops"] for run in own), len(own)),
        "tps": statistics.mean(speeds) if speeds else None,
        "tps_sd": statistics.stdev(speeds) if len(speeds) > 1 else None,
        "prompt_tps": _prompt_speed(own),
        "speedup": None, "speedup_interval": None, "speedup_label": None,
        "acceptance": None, "phases": None,
        "exact": _all_exact(own),
        "never_accepted": False,
    }  # fmt: skip
    if sums is not None:
        cell["acceptance"] = acceptance(sums)
        cell["phases"] = phases(sums, decode_ms)
        cell["counts"] = {name: sums[name] for name in (*COUNTS, *LISTS)}
        cell["never_accepted"] = bool(sums["drafted"]) and not sums["accepted"]
    if plain:
        ratios = prompt_ratios(own, plain)
        value, bounds = geometric_mean(ratios.values())
        cell |= {
            "speedup": value, "speedup_interval": bounds,
            "speedup_label": verdict(len(ratios), bounds) if value else "insufficient",
        }  # fmt: skip
    return cell


def _by_prompt(runs):
    grouped = defaultdict(list)
    for run in runs:
        grouped[run["prompt"]].append(run)
    return grouped


def _median_speed(runs):
    speeds = [speed(run) for run in runs]
    speeds = [s for s in speeds if s]
    return statistics.median(speeds) if speeds else None


def prompt_ratios(own, plain):
    """Return prompt -> median speed of one lane over median speed of another."""
    mine, theirs = _by_prompt(own), _by_prompt(plain)
    found = {}
    for prompt in mine:
        a = _median_speed(mine[prompt])
        b = _median_speed(theirs.get(prompt, ()))
        if a and b:
            found[prompt] = a / b
    return found


def _repetition_speeds(runs):
    """Tokens per second over all prompts, once per repetition that every prompt has."""
    prompts = {run["prompt"] for run in runs}
    grouped = defaultdict(list)
    for run in runs:
        grouped[run["repetition"]].append(run)
    found = []
    for one in grouped.values():
        ms = sum(run["decode_ms"] for run in one)
        if {run["prompt"] for run in one} == prompts and ms:
            found.append(1e3 * sum(run["decode_tokens"] for run in one) / ms)
    return found


def _prompt_speed(runs):
    """Prompt tokens per second, from prompts that were evaluated whole."""
    whole = [run for run in runs if not run["cached_tokens"] and run["prompt_ms"]]
    ms = sum(run["prompt_ms"] for run in whole)
    return 1e3 * sum(run["prompt_tokens"] for run in whole) / ms if ms else None


def _all_exact(runs):
    """True, False, or None where outputs need not be equal (sampled, rule ratio)."""
    known = [run["exact"] for run in runs if run["exact"] is not None]
    return all(known) if known else None
