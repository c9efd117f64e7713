"""Checks and address spans shared by the ops: float rows with any distance between them."""

import numpy as np

from cudflash.errors import UsageError


def check_rows(op, name, array, dtype=np.float32):
    """Raise unless ``array`` has the dtype and every row ``array[r]`` is contiguous."""
    if array.dtype != dtype:
        raise UsageError(f"{op}: {name} is {array.dtype}, expected {np.dtype(dtype)}")
    if not array.flags.c_contiguous and len(array) and not array[0].flags.c_contiguous:
        raise UsageError(f"{op}: the rows of {name} of shape {array.shape} are not contiguous")


def check_shape(op, name, array, shape):
    """Raise unless ``array`` has exactly this shape."""
    if array.shape != tuple(shape):
        raise UsageError(f"{op}: {name} has shape {array.shape}, expected {tuple(shape)}")


def stride(array):
    """Bytes from one row to the next."""
    return array.strides[0]


def extent(array):
    """Contiguous stand-in over everything between an array's first and last byte.

    Only its address range counts: ``submit`` orders kernels by overlap of such ranges.
    """
    if array.flags.c_contiguous or array.size == 0:
        return array
    last = sum((n - 1) * s for n, s in zip(array.shape, array.strides))
    return np.lib.stride_tricks.as_strided(
        array, (last // array.itemsize + 1,), (array.itemsize,), writeable=False)
