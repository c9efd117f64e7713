"""Launches with their argument blocks, and recorded graphs of them.

A launch's arguments are fixed when it is made; whatever changes from step to step lies in device
memory. A graph is a list of launches: its first run is plain and loads what is missing, from the
second on a CUDA graph is replayed, unless graphs are switched off. The kernels and their arguments
are the same, so the bits are.
"""

import ctypes

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cuda.array import DeviceArray

MAX_GRID_YZ = 65535
MAX_GRID_X = 2**31 - 1


class Long(int):
    """A whole number that a kernel takes as 64 bits."""

    __slots__ = ()


class Launch:
    """One kernel launch.

    Parameters
    ----------
    name : str
    function : int
        From ``Driver.function``.
    grid, block : tuple of int
        Up to three lengths.
    args : sequence
        DeviceArray or None for pointers, ``Long`` for 64-bit and int for 32-bit integers, float for
        float32.
    shared_bytes : int
        Of dynamic shared memory.

    Attributes
    ----------
    table : int
        Address of the array of argument addresses.
    kinds : str
        "p", "q", "i" or "f" for every argument.
    """

    __slots__ = ("name", "function", "grid", "block", "shared_bytes", "args", "table", "kinds",
                 "_values", "_pointers")

    def __init__(self, name, function, grid, block, args, shared_bytes=0):
        self.name, self.function, self.args = name, function, args
        self.grid, self.block = _triple(grid), _triple(block)
        if self.grid[0] > MAX_GRID_X or max(self.grid[1:]) > MAX_GRID_YZ or min(self.grid) < 1:
            raise UsageError(f"{name}: a grid of {self.grid} blocks cannot be launched")
        self.shared_bytes = shared_bytes
        self._values = [_value(name, arg) for arg in args]
        self.kinds = "".join(kind for kind, _ in self._values)
        pointers = [ctypes.addressof(value) for _, value in self._values]
        self._pointers = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        self.table = ctypes.addressof(self._pointers)


def _triple(shape):
    return tuple(int(n) for n in [*shape, 1, 1, 1][:3])


def _value(name, arg):
    """(kind, ctypes value) of an argument."""
    if arg is None:
        return "p", ctypes.c_uint64(0)
    if isinstance(arg, DeviceArray):
        return "p", ctypes.c_uint64(arg.address)
    if isinstance(arg, Long):
        return "q", ctypes.c_int64(arg)
    if isinstance(arg, (int, np.integer)):
        if not -(2**31) <= arg < 2**31:
            raise UsageError(f"{name}: argument {arg} does not fit 32 bits")
        return "i", ctypes.c_int32(int(arg))
    if isinstance(arg, (float, np.floating)):
        return "f", ctypes.c_float(arg)
    raise UsageError(f"{name}: an argument is a {type(arg).__name__}")


class Graph:
    """A recorded sequence of launches on fixed buffers.

    Parameters
    ----------
    driver : Driver
    replay : bool
        Whether to make a CUDA graph of it; else every run starts the kernels one by one.
    """

    def __init__(self, driver, replay=True):
        self._driver, self._replay = driver, replay
        self._launches = []
        self._warm = False
        self._executable = None

    def __len__(self):
        return len(self._launches)

    def __del__(self):
        self._drop()

    @property
    def launches(self):
        """The launches in order."""
        return tuple(self._launches)

    @property
    def replayed(self):
        """Whether a CUDA graph exists."""
        return self._executable is not None

    def append(self, launch):
        """Add one launch."""
        self._launches.append(launch)
        self._drop()

    def launch(self):
        """Start everything in order; does not wait."""
        if not self._launches:
            return
        if not self._replay or not self._warm:
            for launch in self._launches:
                self._driver.launch(launch)
            self._warm = True
            return
        if self._executable is None:
            self._executable = self._driver.capture(self._launches)
        self._driver.launch_graph(self._executable)

    def _drop(self):
        executable, self._executable = getattr(self, "_executable", None), None
        if executable is not None:
            self._driver.free_graph(executable)
