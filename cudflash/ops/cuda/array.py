"""Arrays in device memory: an address with shape, strides and dtype; nothing is computed here.

Covers what the model does with buffers: slices, reshapes, views of another dtype. Values move only
through ``upload``, ``copy_in`` and ``download``; there is no implicit copy to the host, so code that
works on host arrays by accident fails here as well.
"""

import math

import numpy as np

from cudflash.errors import UsageError


class _Flags:
    """What ``flags`` tells about an array."""

    __slots__ = ("c_contiguous",)

    def __init__(self, c_contiguous):
        self.c_contiguous = c_contiguous


class DeviceArray:
    """A strided view of device memory.

    Parameters
    ----------
    block : object
        Keeps the memory alive.
    address : int
        Of the first element.
    shape : tuple of int
    dtype : dtype-like
    strides : tuple of int, optional
        Bytes; C order if absent.
    """

    __slots__ = ("block", "address", "shape", "strides", "dtype")

    # NumPy must not take an array on a device for a sequence of numbers
    __array__ = None
    __array_ufunc__ = None

    def __init__(self, block, address, shape, dtype, strides=None):
        self.block, self.address = block, address
        self.shape, self.dtype = tuple(int(n) for n in shape), np.dtype(dtype)
        self.strides = _c_strides(self.shape, self.dtype.itemsize) if strides is None else strides

    def __repr__(self):
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, address={self.address:#x})"

    @property
    def ndim(self):
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self):
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self):
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def flags(self):
        """``flags.c_contiguous``, as of a NumPy array."""
        expected, contiguous = self.dtype.itemsize, True
        for n, stride in zip(reversed(self.shape), reversed(self.strides)):
            if n != 1:
                contiguous &= stride == expected
                expected *= n
        return _Flags(contiguous or self.size == 0)

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indices for an array of shape {self.shape}")
        address, shape, strides = self.address, [], []
        for axis, n in enumerate(self.shape):
            stride = self.strides[axis]
            chosen = keys[axis] if axis < len(keys) else slice(None)
            if isinstance(chosen, slice):
                start, stop, step = chosen.indices(n)
                if step != 1:
                    raise UsageError(f"a device array cannot be sliced by steps of {step}")
                address += start * stride
                shape.append(max(0, stop - start))
                strides.append(stride)
                continue
            index = int(chosen)
            if not -n <= index < n:
                raise IndexError(f"index {index} is outside axis {axis} of shape {self.shape}")
            address += index % n * stride
        return DeviceArray(self.block, address, shape, self.dtype, tuple(strides))

    def reshape(self, *shape):
        """The same memory in another shape; one length may be -1. Nothing is ever copied."""
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        known = math.prod(n for n in shape if n != -1)
        if -1 in shape:
            shape = tuple(self.size // known if n == -1 else n for n in shape) if known else shape
        if math.prod(shape) != self.size:
            raise UsageError(f"an array of shape {self.shape} cannot be reshaped to {shape}")
        strides = None if self.flags.c_contiguous else self._strides_as(shape)
        return DeviceArray(self.block, self.address, shape, self.dtype, strides)

    def _strides_as(self, shape):
        """Strides of the same elements in another shape, each of its axes inside one even run."""
        runs = []  # [elements, distance] of axes that follow one another without a gap
        for n, stride in zip(self.shape, self.strides):
            if n == 1:
                continue
            if runs and runs[-1][1] == n * stride:
                runs[-1] = [runs[-1][0] * n, stride]
            else:
                runs.append([n, stride])
        strides = []
        for n in shape:
            if n > 1 and (not runs or runs[0][0] % n):
                raise UsageError(
                    f"a device array of shape {self.shape} and strides {self.strides} cannot be "
                    f"reshaped to {tuple(shape)} without a copy")
            if n == 1:
                strides.append(self.itemsize)
                continue
            runs[0][0] //= n
            strides.append(runs[0][0] * runs[0][1])
            if runs[0][0] == 1:
                runs.pop(0)
        return tuple(strides)

    def view(self, dtype):
        """The same contiguous memory as elements of another dtype of the same size."""
        dtype = np.dtype(dtype)
        if dtype.itemsize != self.dtype.itemsize:
            raise UsageError(f"a view of {self.dtype} as {dtype} would change the shape")
        return DeviceArray(self.block, self.address, self.shape, dtype, self.strides)


def _c_strides(shape, itemsize):
    strides = []
    for n in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(n, 1)
    return tuple(reversed(strides))
