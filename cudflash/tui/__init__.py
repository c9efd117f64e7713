"""The monitor: what happens during an answer, on a terminal.

A pure view of events (``cudflash.events``): it owns no engine, and a recording shows the same screen
as the answer it was made of. Importing this costs nothing; Rich comes with the first use.
"""

import importlib

_PUBLIC = {
    "watch": "cudflash.tui.monitor",
    "Monitor": "cudflash.tui.monitor",
    "MonitorState": "cudflash.tui.state",
    "save_snapshot": "cudflash.tui.snapshot",
}

__all__ = list(_PUBLIC)


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cudflash.tui' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
