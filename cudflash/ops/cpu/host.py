"""What LLVM calls this processor, remembered so that a warm start need not load LLVM to ask again.

LLVM reads what it says from the processor itself. It is asked again whenever the system's
description of the processor, the system or LLVM is another one.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from cudflash.ops import store

# Lines of /proc/cpuinfo that tell one kind of processor, as it is set up, from another.
_TELLING = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")


class Host(NamedTuple):
    """The machine that kernels are compiled for, in LLVM's words."""

    triple: str
    cpu: str
    features: str  # "+avx2,-avx512f,..."

    def has(self, *names):
        """Whether the processor has all of these features."""
        own = self.features.split(",")
        return all(f"+{name}" in own for name in names)


def host(folder):
    """This machine, as remembered in ``folder`` or else as LLVM describes it.

    Parameters
    ----------
    folder : Path or None
        None: nothing is remembered.
    """
    processor = None if folder is None else _processor()
    if processor is None:
        return ask_llvm()
    path = folder / f"host-{store.digest(processor).hex()[:24]}"
    words = (store.read(path) or b"").split(b"\n")
    if len(words) == len(Host._fields):
        return Host(*(word.decode("ascii", "replace") for word in words))
    asked = ask_llvm()
    store.write(path, "\n".join(asked).encode())
    return asked


def ask_llvm():
    """Load LLVM and ask."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    return Host(llvm.get_process_triple(), llvm.get_host_cpu_name(), features)


def package_version(name):
    """Text of a package's version file, read without importing the package."""
    found = find_spec(name)
    try:
        return Path(found.origin).with_name("_version.py").read_text(encoding="utf-8")
    except (AttributeError, TypeError, OSError):  # no package, or not one of ours to read
        return "absent"


def _processor():
    """Bytes that change when LLVM's answer may, None where the system does not tell enough."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = _first_processor(file)
    except (OSError, ValueError):
        return None
    if not any(line.startswith("flags") for line in lines):  # x86 alone has this line
        return None
    return "\n".join([*lines, *os.uname()[::2], package_version("llvmlite")]).encode()


def _first_processor(file):
    lines = []
    for line in file:
        if not line.strip():
            break
        if line.split(":", 1)[0].strip() in _TELLING:
            lines.append(line.strip())
    return lines
