"""Compile CUDA C for the processor and call its kernels on NumPy arrays, as CuPy would.

``HostModule(path, defines).get_function(name)(grid, block, args)`` runs the unchanged source. What
CuPy forgives is an error here: an argument must have the type the kernel declares.
"""

import ctypes
import hashlib
import math
import mmap
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cudflash.ops.cuda.source import kernels_in, splice

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "raw_kernels"
CACHE_ENV = "CUDFLASH_CACHE"

_COMMON = ["-std=c++17", "-march=x86-64-v3", "-mtune=generic", "-ffp-contract=off",
           "-fno-strict-aliasing", "-fno-math-errno", "-fPIC", "-Wall", "-Wno-unknown-pragmas",
           "-Wno-unused-function", "-Wno-unused-variable", f"-I{HERE}"]
# check: -fno-tree-sra keeps a 16-byte access one access. undefined: overflow, shifts, indices.
_MODES = {
    "fast": ["-O1"],
    "check": ["-O1", "-gdwarf-4", "-fsanitize=thread", "-fno-tree-sra", "-fno-ipa-sra"],
    "undefined": ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined",
                  "-fsanitize-undefined-trap-on-error"],
}
_SCHEDULES = ("in order", "reverse", "random")
_SCALARS = {"i": (np.int32, np.uint32), "q": (np.int64, np.uint64), "f": (np.float32,),
            "d": (np.float64,)}


@dataclass(frozen=True, order=True)
class Access:
    """A load or store of a kernel's source."""

    kernel: str
    line: str
    space: str  # "global" or "shared"
    direction: str  # "read" or "write"
    n_bytes: int  # of one thread


_counts = None

_STACK_BYTES, _GUARD_BYTES = 64 << 10, 4096  # as in runtime.cpp
_MAX_BLOCK = 1024  # threads, CUDA's own limit
_stacks = None  # of the threads of a block, for every library: a process may have 65,530 mappings
_launching = threading.Lock()


@contextmanager
def counting():
    """Count what the launches of checking builds cost.

    Yields
    ------
    dict of Access -> (requests, cost, least)
        Requests of whole warps. Global memory: 32-byte sectors touched, and the fewest that hold
        the bytes asked for. Shared memory: passes over the banks, and the passes without a
        conflict.
    """
    global _counts
    _counts = counts = {}
    try:
        yield counts
    finally:
        _counts = None


class LaunchError(RuntimeError):
    """A kernel did what it must not do; the message names the thread and the source line."""


def unavailable():
    """Why kernels cannot be emulated here, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the emulator switches fibers on x86-64 only, this is {platform.machine()}"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    missing = [f for f in ("avx2", "fma", "f16c") if not re.search(rf"\b{f}\b", flags)]
    return f"the processor lacks {', '.join(missing)}" if missing else None


def aligned(shape, dtype, fill=None):
    """Array at a multiple of 256 bytes, as CuPy allocates; poisoned with 0xFF unless filled."""
    dtype = np.dtype(dtype)
    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.full(n_bytes + 256, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    out = raw[start:start + n_bytes].view(dtype).reshape(shape)
    if fill is not None:
        out[...] = fill
    return out


def to_device(array):
    """Aligned copy of an array."""
    array = np.asarray(array)
    return aligned(array.shape, array.dtype, array)


class HostModule:
    """One kernel file, compiled by g++ with the emulator's header.

    Parameters
    ----------
    path : str or Path
        The .cu file.
    defines : sequence of str
        ``"NAME=value"``, as for ``-D``.
    mode : {"fast", "check", "undefined"}
        ``check`` reports bad memory accesses and races, ``undefined`` stops at C++ undefined
        behaviour (the process gets SIGILL).
    """

    def __init__(self, path, defines=(), mode="fast"):
        path = Path(path)
        self._load(path.stem, splice(path.name, path.read_text(encoding="utf-8")), defines, mode)

    @classmethod
    def from_text(cls, stem, text, defines=(), mode="fast"):
        """Module of a spliced text, as the launcher gives it to NVRTC."""
        made = object.__new__(cls)
        made._load(stem, text, defines, mode)
        return made

    def _load(self, stem, text, defines, mode):
        self.mode, self.names = mode, kernels_in(text)
        self._file = _built(stem, text, tuple(defines), mode, self.names)
        self._library = ctypes.CDLL(str(self._file))
        self._library.emulation_message.restype = ctypes.c_char_p
        self._library.emulation_schedule.argtypes = [ctypes.c_int, ctypes.c_uint64]
        stacks = ctypes.addressof(ctypes.c_char.from_buffer(_thread_stacks()))
        self._library.emulation_stacks(ctypes.c_void_p(stacks), ctypes.c_size_t(_MAX_BLOCK))

    def _launch(self, name, grid, block, shared_mem, table):
        """Run the exported launcher; kernels of different libraries share their threads' stacks."""
        if math.prod(block) > _MAX_BLOCK:
            raise LaunchError(f"{name}: a block of {math.prod(block)} threads, {_MAX_BLOCK} allowed")
        run = getattr(self._library, f"launch_{name}")
        with _launching:
            count = _counts is not None and self.mode == "check"
            if count:
                self._library.emulation_count(1)
            if run(_triple(grid), _triple(block), ctypes.c_size_t(shared_mem), table):
                raise LaunchError(f"{name}: {self._message()}")
            if count:
                self._collect(name)

    def signature(self, name):
        """Kinds of a kernel's arguments: p pointer, i 32-bit and q 64-bit integer, f float."""
        read = getattr(self._library, f"signature_{name}")
        read.restype = ctypes.c_char_p
        return read().decode()

    def run(self, name, grid, block, shared_mem, table, buffers=(), schedule="in order", seed=0):
        """Run a kernel on the address of an array of argument addresses, as cuLaunchKernel does.

        ``buffers`` are (address, bytes) of all memory, for the checking mode.
        """
        self._library.emulation_schedule(_SCHEDULES.index(schedule), seed)
        if self.mode == "check":
            self._library.emulation_clear_buffers()
            for address, n_bytes in buffers:
                self._library.emulation_add_buffer(ctypes.c_void_p(address),
                                                   ctypes.c_size_t(n_bytes))
        self._launch(name, grid, block, shared_mem, ctypes.c_void_p(table))

    def get_function(self, name):
        """Callable ``(grid, block, args, shared_mem=0, schedule="in order", seed=0)``."""
        signature = self.signature(name)

        def call(grid, block, args, shared_mem=0, *, schedule="in order", seed=0):
            values = _check_arguments(name, signature, args)
            self._library.emulation_schedule(_SCHEDULES.index(schedule), seed)
            if self.mode == "check":
                self._declare_buffers(args)
            pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
            self._launch(name, grid, block, shared_mem, pointers)

        return call

    def _declare_buffers(self, args):
        self._library.emulation_clear_buffers()
        for array in args:
            if isinstance(array, np.ndarray):
                self._library.emulation_add_buffer(ctypes.c_void_p(array.ctypes.data),
                                                   ctypes.c_size_t(array.nbytes))

    def _message(self):
        text = self._library.emulation_message().decode()
        found = self._lines(re.findall(r"@([0-9a-f]+)", text))
        return re.sub(r"@([0-9a-f]+)", lambda match: found[match[1]], text)

    def _lines(self, places):
        """{offset in the library: "file:line" of the kernel's source}."""
        if not places:
            return {}
        text = subprocess.run(["addr2line", "-i", "-a", "-e", self._file, *places],
                              capture_output=True, text=True, check=False).stdout
        lines = {}
        for place, part in zip(places, re.split(r"^0x[0-9a-f]+\n", text, flags=re.M)[1:]):
            frames = [f.rsplit("/", 1)[-1].split(" ")[0] for f in part.split("\n") if f]
            own = [f for f in frames if not f.startswith("device.h")]  # not __ldg itself
            lines[place] = (own or frames or ["?"])[0]
        return {place: lines.get(place, "?") for place in places}

    def _collect(self, name):
        self._library.emulation_count(0)
        self._library.emulation_counted.restype = ctypes.c_char_p
        rows = [row.split() for row in self._library.emulation_counted().decode().splitlines()]
        lines = self._lines([row[0][1:] for row in rows])
        for place, space, direction, n_bytes, *numbers in rows:
            key = Access(name, lines[place[1:]], space, direction, int(n_bytes))
            _counts[key] = tuple(a + int(b) for a, b in zip(_counts.get(key, (0, 0, 0)), numbers))


def _thread_stacks():
    """Stacks of a block's threads, each behind a page that may not be touched."""
    global _stacks
    if _stacks is None:
        stride = _GUARD_BYTES + _STACK_BYTES
        made = mmap.mmap(-1, _MAX_BLOCK * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(made))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for i in range(_MAX_BLOCK):
            if protect(ctypes.c_void_p(start + i * stride), ctypes.c_size_t(_GUARD_BYTES), 0):
                raise OSError(ctypes.get_errno(), "guard page")
        _stacks = made
    return _stacks


def _triple(shape):
    return (ctypes.c_uint * 3)(*[*shape, 1, 1, 1][:3])


def _check_arguments(name, signature, args):
    """One-element arrays that hold the arguments' values."""
    if len(args) != len(signature):
        raise TypeError(f"{name} takes {len(signature)} arguments, got {len(args)}")
    values = []
    for i, (kind, value) in enumerate(zip(signature, args)):
        if kind == "p":
            if value is None:
                value = np.uint64(0)
            elif isinstance(value, np.ndarray) and value.flags.c_contiguous:
                value = np.uint64(value.ctypes.data)
            else:
                raise TypeError(f"{name}: argument {i} is {type(value).__name__}, expected a "
                                "contiguous array or None")
        elif not isinstance(value, _SCALARS[kind]):
            raise TypeError(f"{name}: argument {i} is {type(value).__name__}, expected "
                            f"{_SCALARS[kind][0].__name__}")
        values.append(np.array([value]))
    return values


def _cache_dir():
    base = os.environ.get(CACHE_ENV)
    if base is None:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cudflash"
    folder = Path(base) / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-4000:]}")


def _built(stem, text, defines, mode, names):
    """Shared library of a spliced text; kept in the cache under the hash of all that went in."""
    digest = hashlib.sha256(repr((_COMMON, _MODES[mode], defines, text)).encode())
    for source in [*sorted(HERE.glob("*.h")), *sorted(HERE.glob("*.cpp"))]:
        digest.update(source.read_bytes())
    out = _cache_dir() / f"{stem}-{mode}-{digest.hexdigest()[:24]}.so"
    if out.exists():
        return out
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        scratch = Path(scratch)
        unit = scratch / "unit.cpp"
        exports = "".join(f"EMULATED_KERNEL({name})\n" for name in names)
        unit.write_text(f'#include "device.h"\n{text}#line 1 "exports"\n{exports}')
        kernel = scratch / "kernel.o"
        _run(["g++", *_COMMON, *_MODES[mode], *(f"-D{d}" for d in defines), "-c", unit, "-o",
              kernel])
        objects = [kernel, _object("runtime.cpp")]
        if mode == "check":
            objects.append(_object("checker.cpp"))
        _run(["g++", "-shared", "-o", scratch / "out.so", *objects, "-ldl"])
        os.replace(scratch / "out.so", out)  # two processes may build at once; both are the same
    return out


def _object(name):
    """Compiled part of the emulator itself."""
    digest = hashlib.sha256(repr(_COMMON).encode())
    for source in [HERE / name, *sorted(HERE.glob("*.h"))]:
        digest.update(source.read_bytes())
    out = _cache_dir() / f"{name}-{digest.hexdigest()[:24]}.o"
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            made = Path(scratch) / "made.o"
            _run(["g++", *_COMMON, "-O2", "-c", HERE / name, "-o", made])
            os.replace(made, out)
    return out
