"""Versions of what a run depends on, read from package metadata: nothing is imported for them."""

import platform
from importlib.metadata import PackageNotFoundError, version

from cudflash import __version__
from cudflash.cupy_state import cupy_packages

SHOWN = ("numpy", "numba", "llvmlite")


def package_version(name):
    """Version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions():
    """Versions by name: Python, the packages of ``SHOWN`` and every CuPy package."""
    found = {"cudflash": __version__, "python": platform.python_version()}
    found.update({name: package_version(name) for name in SHOWN})
    found.update(cupy_packages())
    return found


def version_line():
    """One line for ``--version``."""
    others = versions()
    others.pop("cudflash")
    cupy = "" if any(name.startswith("cupy") for name in others) else ", no CuPy"
    listed = ", ".join(f"{name} {found or 'missing'}" for name, found in others.items())
    return f"cudflash {__version__} ({listed}{cupy})"
