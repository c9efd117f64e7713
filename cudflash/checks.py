"""Checks of arguments that many functions share: one sentence each, NumPy's numbers welcome."""

import operator
import os

from cudflash.errors import UsageError


def whole(name, value, least, most=None):
    """Return ``value`` as an int.

    Raises
    ------
    UsageError
        Unless it is a whole number, Python's or NumPy's, from ``least`` to ``most``; a bool is none.
    """
    wanted = f"a whole number of at least {least}" if most is None else f"{least} to {most}"
    number = index_of(value)
    if number is None or number < least or (most is not None and number > most):
        raise UsageError(f"{name} is {shown(value)}, expected {wanted}")
    return number


def index_of(value):
    """Return a Python or NumPy integer as an int, None for anything else, bools included."""
    if isinstance(value, bool) or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def file_path(name, value):
    """Return a path as text.

    Raises
    ------
    UsageError
        Unless it is a text or path-like that is not empty.
    """
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        if isinstance(path, str) and path:
            return path
    raise UsageError(f"{name} is {shown(value)}, expected the path of a file")


def one_of(name, value, choices):
    """Return ``value``, if it is one of some texts.

    Raises
    ------
    UsageError
        Otherwise.
    """
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name} is {shown(value)}, expected one of {', '.join(choices)}")
    return value


def shown(value):
    """A value in a sentence: its repr on one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
