"""Checks shared by the ops: float rows with any distance between them."""

import numpy as np

from cudflash.errors import UsageError


def check_rows(op, name, array, dtype=np.float32):
    """Raise unless ``array`` has the dtype and every row ``array[r]`` is contiguous."""
    if array.dtype != dtype:
        raise UsageError(f"{op}: {name} is {array.dtype}, expected {np.dtype(dtype)}")
    if len(array) and not array[0].flags.c_contiguous:
        raise UsageError(f"{op}: the rows of {name} of shape {array.shape} are not contiguous")


def check_shape(op, name, array, shape):
    """Raise unless ``array`` has exactly this shape."""
    if array.shape != tuple(shape):
        raise UsageError(f"{op}: {name} has shape {array.shape}, expected {tuple(shape)}")


def check_contiguous(op, name, array, dtype=np.float32):
    """Raise unless ``array`` has the dtype and no gaps."""
    check_rows(op, name, array, dtype)
    if not array.flags.c_contiguous:
        raise UsageError(f"{op}: {name} of shape {array.shape} is not contiguous")


def check_lengths(op, limit, **lengths):
    """Raise unless every grid dimension fits what a launch can have."""
    for name, n in lengths.items():
        if n > limit:
            raise UsageError(f"{op}: {name} is {n}, a launch takes at most {limit}")
