"""A random hybrid of `scripts/make_hybrid.py`, written once per process, and engines on it."""

import sys
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import cudflash
from cudflash import defaults

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="cudflash-hybrid-")


@cache
def hybrid_path(mtp=True):
    """Path of the tiny random hybrid."""
    with mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
        import make_hybrid
    path = Path(_folder().name) / f"hybrid-{mtp}.gguf"
    make_hybrid.HybridFile(path, make_hybrid.SHAPES["tiny"], 7, mtp).write()
    return path


@cache
def hybrid_engine(rows=defaults.PREFILL_ROWS, **settings):
    """An engine on it; one thread, whose barriers cost nothing."""
    settings = {"device": "cpu", "threads": 1, "n_ctx": 512, **settings}
    with mock.patch.object(defaults, "PREFILL_ROWS", rows):
        return cudflash.load(hybrid_path(), **settings)
