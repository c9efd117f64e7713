"""What the CPU benchmarks share: spreads, idle checks, facts about the machine, Markdown rows.

Owns no measurement. Invariant: a number never appears without its spread, and a spread is the
lowest and highest of the repeats, not an estimate of either.
"""

import hashlib

from cudflash.bench.machine import ForeignLoad, busy_ticks, process_ticks
from cudflash.bench.machine import facts as machine
from cudflash.bench.report import table
from cudflash.bench.statistics import Spread

__all__ = ["ForeignLoad", "Spread", "busy_ticks", "machine", "process_ticks", "sha256", "table"]


def sha256(path):
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
