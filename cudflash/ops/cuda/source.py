"""Kernel sources as one text: ``common/*.cuh`` spliced in, line numbers kept.

Owns how ``#include`` of our own files is resolved. The compiler never sees an include, so the text
is all that a build depends on and a cache keyed by it cannot miss an edited header. A header comes
once, where it is first named; includes inside ``#if`` would break that and are refused.
"""

import re
from functools import cache
from importlib.resources import files

from cudflash.errors import UsageError

_INCLUDE = re.compile(r'#include "(?:common/)?(\w+\.cuh)"\s*(?://.*)?')
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')


@cache
def spliced(name):
    """Text of ``raw_kernels/<name>.cu`` with every header in place.

    Parameters
    ----------
    name : str
        File name without its ending.

    Returns
    -------
    str
    """
    try:
        return splice(f"{name}.cu", _text(f"{name}.cu"))
    except FileNotFoundError:
        raise UsageError(f"there is no kernel file {name}.cu in this installation") from None


def splice(label, text):
    """A text with the headers it includes in place.

    Parameters
    ----------
    label : str
        What compilers call it in messages.
    text : str

    Returns
    -------
    str
    """
    return "\n".join(_lines(label, text, set())) + "\n"


def kernels_in(text):
    """Names of the kernels that a text declares, in order (written out, no macros)."""
    return _KERNEL.findall(text)


def _text(path):
    folder = files("cudflash.raw_kernels")
    for part in path.split("/"):
        folder = folder / part
    return folder.read_text(encoding="utf-8")


def _lines(label, text, seen):
    yield f'#line 1 "{label}"'
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        directive = line.strip()
        if directive == "#pragma once":
            yield ""
            continue
        depth += directive.startswith("#if") - directive.startswith("#endif")
        found = _INCLUDE.fullmatch(directive)
        if found is None:
            if directive.startswith("#include"):
                raise UsageError(f"{label}, line {number}: {directive} is no header of ours")
            yield line
            continue
        if depth:
            raise UsageError(f"{label}, line {number}: an include inside #if cannot be spliced")
        if found[1] not in seen:
            seen.add(found[1])
            path = f"common/{found[1]}"
            yield from _lines(path, _text(path), seen)
        yield f'#line {number + 1} "{label}"'
