"""Launching kernels: buffers, argument blocks, recorded graphs, the worker pool.

Ops call :func:`submit`. Outside a capture the kernel runs at once; inside ``capture()`` it is
appended to a :class:`Graph`, whose ``launch()`` replays the same kernels on the same buffers with
one call. That is the CPU's stand-in for a CUDA graph, and it obeys the same rule: whatever
changes from step to step lives in buffers, never in an argument.
"""

import ctypes
import os
import threading

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit

_NATIVE = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

_ALIGNMENT = 64
# A launch that touches less than this is left to one thread: neighbours of its kind then need no
# barrier between them, and a barrier costs as much as the work.
_SERIAL_BYTES = 48 * 1024


def _build_run_program():
    from cudflash.ops.cpu.executor import build_run_program

    return build_run_program()


_RUN_PROGRAM = jit.register("run_program", _build_run_program)


def empty(shape, dtype):
    """Uninitialised, 64-byte aligned, C-contiguous array."""
    return _aligned(np.empty, shape, dtype)


def zeros(shape, dtype):
    """Zero-filled, 64-byte aligned, C-contiguous array; its pages are taken when first touched."""
    return _aligned(np.zeros, shape, dtype)


def _aligned(allocate, shape, dtype):
    dtype = np.dtype(dtype)
    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = allocate(n_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start:start + n_bytes].view(dtype).reshape(shape)


def upload(array):
    """Buffer of the backend with a copy of ``array``."""
    array = np.asarray(array)
    out = empty(array.shape, array.dtype)
    out[...] = array
    return out


def download(buffer):
    """Host copy of a buffer."""
    return np.array(buffer)


def copy_in(buffer, array):
    """Overwrite a buffer with host values of the same shape."""
    buffer[...] = array


class _Op:
    """One kernel launch: entry point, argument block, and the arrays it keeps alive."""

    __slots__ = ("kernel", "args", "reads", "writes", "keep", "serial")

    def __init__(self, kernel, args, reads, writes, keep, touched):
        self.kernel, self.args, self.keep = kernel, args, keep
        self.reads, self.writes = reads, writes
        if touched is None:
            touched = sum(b - a for a, b in reads + writes)
        self.serial = touched <= _SERIAL_BYTES


def _span(array):
    """Address range that an array occupies (C-contiguous arrays only)."""
    start = _address(array)
    return start, start + array.nbytes


def _address(array):
    """Address of the first element; ``array.ctypes.data`` is the same, several times slower."""
    return array.__array_interface__["data"][0]


def submit(kernel, values, *, reads, writes, keep=(), touched=None):
    """Run a kernel, or record it when a capture is open in this thread.

    Parameters
    ----------
    kernel : jit.Kernel
    values : sequence of int, float or ndarray
        The argument block: integers as they are, floats as float64 bits, arrays as addresses.
    reads, writes : sequence of ndarray
        Memory the kernel touches; two recorded kernels get a barrier between them only when one
        writes what the other touches.
    keep : sequence
        Objects that must stay alive as long as the launch may run.
    touched : int, optional
        Bytes the launch really reads and writes, where that is less than all of ``reads`` and
        ``writes`` (a few rows of a cache, say).
    """
    block = np.empty(len(values), np.int64)
    for i, value in enumerate(values):
        if isinstance(value, np.ndarray):
            block[i] = _address(value)
        elif isinstance(value, float):
            block[i:i + 1].view(np.float64)[0] = value
        else:
            block[i] = value
    op = _Op(kernel, block, [_span(a) for a in reads], [_span(a) for a in writes],
             (block, values, keep), touched)
    graph = getattr(_local, "graph", None)
    if graph is None:
        Graph([op]).launch()
    else:
        graph.append(op)


class Graph:
    """A recorded sequence of kernel launches on fixed buffers."""

    def __init__(self, ops=()):
        self._ops = list(ops)
        self._program = None

    def __len__(self):
        return len(self._ops)

    def append(self, op):
        """Add one launch; the program is rebuilt at the next ``launch``."""
        self._ops.append(op)
        self._program = None

    @property
    def n_barriers(self):
        """Number of thread barriers the program needs."""
        self._build()
        return int(np.count_nonzero(self._program[:, 2]))

    def _build(self):
        if self._program is not None:
            return
        program = np.zeros((len(self._ops), 4), np.int64)
        # Work since the last barrier: shared by all threads, or done by thread 0 alone.
        shared, alone = _Pending(), _Pending()
        for i, op in enumerate(self._ops):
            barrier = shared.conflicts(op) or (not op.serial and alone.conflicts(op))
            if barrier:
                shared, alone = _Pending(), _Pending()
            (alone if op.serial else shared).add(op)
            program[i] = op.kernel.address, op.args.ctypes.data, barrier, op.serial
        self._program = program

    def launch(self):
        """Run all recorded kernels in order; returns when the last one has finished."""
        self._build()
        if len(self._ops):
            pool().run(self._program)


class _Pending:
    """Memory that launches since the last barrier read and write."""

    def __init__(self):
        self._reads, self._writes = [], []

    def add(self, op):
        self._reads += op.reads
        self._writes += op.writes

    def conflicts(self, op):
        """Whether ``op`` may not run beside these launches."""
        return (_overlap(op.writes, self._reads) or _overlap(op.writes, self._writes)
                or _overlap(op.reads, self._writes))


def _overlap(spans, others):
    return any(a < d and c < b for a, b in spans for c, d in others)


class _Capture:
    def __enter__(self):
        if getattr(_local, "graph", None) is not None:
            raise UsageError("a capture is already open in this thread; close it first")
        _local.graph = Graph()
        return _local.graph

    def __exit__(self, *exc):
        _local.graph = None
        return False


def capture():
    """Context manager: ops called inside are recorded into the :class:`Graph` it yields."""
    return _Capture()


class ThreadPool:
    """The calling thread plus ``n_threads - 1`` workers; one program at a time."""

    def __init__(self, n_threads):
        self.n_threads = n_threads
        self._lock = threading.Lock()
        self._barrier = zeros(128, np.uint8)
        self._args = np.zeros(3, np.int64)
        self._scratch = [np.zeros(2, np.int64) for _ in range(n_threads)]
        self._run = _NATIVE(_RUN_PROGRAM.address)
        self._starts = [threading.Semaphore(0) for _ in range(n_threads - 1)]
        self._stop = False
        self._pid = os.getpid()
        for i, start in enumerate(self._starts):
            threading.Thread(
                target=self._work, args=(i + 1, start), daemon=True,
                name=f"cudflash-{i + 1}").start()

    def _work(self, tid, start):
        scratch = self._scratch[tid].ctypes.data
        while True:
            start.acquire()
            if self._stop:
                return
            self._run(scratch, scratch + 8, self._args.ctypes.data, tid, self.n_threads)

    def run(self, program):
        """Execute a program array on all threads; returns when every thread is done."""
        with self._lock:
            self._args[0] = program.ctypes.data
            self._args[1] = len(program)
            self._args[2] = self._barrier.ctypes.data
            for start in self._starts:
                start.release()
            scratch = self._scratch[0].ctypes.data
            self._run(scratch, scratch + 8, self._args.ctypes.data, 0, self.n_threads)

    def close(self):
        """End the workers after the program in flight, if any."""
        with self._lock:
            self._stop = True
            for start in self._starts:
                start.release()


_local = threading.local()
_pool_lock = threading.Lock()
_pool = None


def usable_cores():
    """Cores this process may run on."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return max(1, os.cpu_count() or 1)


def pool():
    """The process's worker pool (made on first use; made again after a fork)."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool._pid != os.getpid():
            _pool = ThreadPool(usable_cores())
        return _pool


def set_threads(n):
    """Use ``n`` threads from now on; results do not depend on it."""
    global _pool
    if not isinstance(n, int) or n < 1:
        raise UsageError(f"number of threads is {n!r}, expected a whole number of at least 1")
    with _pool_lock:
        if _pool is not None and _pool._pid == os.getpid():
            if _pool.n_threads == n:
                return
            _pool.close()
        _pool = ThreadPool(n)


def threads():
    """Number of threads in use."""
    return pool().n_threads
