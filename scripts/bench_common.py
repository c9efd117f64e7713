"""What the CPU benchmarks share: spreads, idle checks, facts about the machine, Markdown rows.

Owns no measurement. Invariant: a number never appears without its spread, and a spread is the
lowest and highest of the repeats, not an estimate of either.
"""

import hashlib
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # /proc/stat unit, per second


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


def busy_ticks():
    """Return CPU ticks spent by all processes since boot, or None where /proc is absent."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    idle = fields[3] + fields[4]  # idle, iowait
    return sum(fields[:8]) - idle  # fields 8 and 9 (guests) are part of user and nice


def process_ticks(pid):
    """Return CPU ticks spent by one process since its start, or None where /proc is absent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    user, system = stat.rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


class ForeignLoad:
    """Measure which share of the machine others used while one process was being timed.

    It catches both a peer whose threads keep spinning after their answer and unrelated work.
    """

    def __init__(self, pid):
        self.pid = pid
        self.share = None  # of all CPUs, 0 to 1; None when /proc is absent or the window is short

    def __enter__(self):
        self.start = time.perf_counter(), busy_ticks(), process_ticks(self.pid)
        return self

    def __exit__(self, *exc):
        seconds = time.perf_counter() - self.start[0]
        busy, own = busy_ticks(), process_ticks(self.pid)
        if None in (busy, own, *self.start) or seconds < 10 / TICKS:
            return
        foreign = (busy - self.start[1]) - (own - self.start[2])
        self.share = min(1.0, max(0.0, foreign / TICKS / seconds / os.cpu_count()))


def sha256(path):
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def machine():
    """Return the facts that make a measurement comparable with another."""
    import numba
    import numpy

    model = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )
    return {
        "commit": git.stdout.strip() or "unknown",
        "cpu": model,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "numba": numba.__version__,
    }


def table(header, rows):
    """Return a Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
