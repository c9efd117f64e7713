"""Facts about the machine and the program, and how much of the machine others were using.

Owns no measurement of ours. Invariant: a record names what makes two records comparable (processor,
versions, commit), and nothing that names a person or a place.
"""

import os
import platform
import subprocess
import time
from pathlib import Path

from cudflash.device import cpu_name

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # /proc/stat unit, per second
FEWEST_TICKS = 10  # a window shorter than these says nothing about the share of others


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

    Attributes
    ----------
    share : float or None
        Of all CPUs, 0 to 1; None where /proc is absent or the window was short.
    """

    def __init__(self, pid):
        self.pid = pid
        self.share = None

    def __enter__(self):
        self.start = time.perf_counter(), busy_ticks(), process_ticks(self.pid)
        return self

    def __exit__(self, *exc):
        seconds = time.perf_counter() - self.start[0]
        busy, own = busy_ticks(), process_ticks(self.pid)
        if None in (busy, own, *self.start) or seconds < FEWEST_TICKS / TICKS:
            return
        foreign = (busy - self.start[1]) - (own - self.start[2])
        self.share = min(1.0, max(0.0, foreign / TICKS / seconds / os.cpu_count()))


def commit():
    """Return the commit of the checkout that runs, "" for an installed package."""
    folder = Path(__file__).resolve().parent
    if not any((above / ".git").exists() for above in folder.parents):
        return ""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip()


def machine():
    """Return the processor and its number of CPUs."""
    return {"cpu": cpu_name(), "cpus": os.cpu_count(), "system": platform.system()}


def versions():
    """Return the versions of the program and of what it runs on."""
    import numba
    import numpy

    import cudflash

    return {
        "cudflash": cudflash.__version__, "commit": commit(), "numpy": numpy.__version__,
        "numba": numba.__version__, "python": platform.python_version(),
    }  # fmt: skip


def facts():
    """Machine and versions in one flat object, as the records of the scripts have them."""
    found, about = versions(), machine()
    return {
        "commit": found["commit"] or "unknown", "cpu": about["cpu"], "cpus": about["cpus"],
        "python": found["python"], "numpy": found["numpy"], "numba": found["numba"],
    }  # fmt: skip
