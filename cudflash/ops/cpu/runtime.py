"""Launching kernels: buffers, argument blocks, recorded graphs, the worker pool.

Ops call :func:`submit`. Outside a capture the kernel runs at once; inside ``capture()`` it is
appended to a :class:`Graph`, whose ``launch()`` replays the same kernels on the same buffers with
one call. That is the CPU's stand-in for a CUDA graph, and it obeys the same rule: whatever
changes from step to step lives in buffers, never in an argument.
"""

import ctypes
import mmap
import os
import struct
import threading
import weakref
from array import array as numbers

import numpy as np

from cudflash.errors import DeviceError, UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.program import NATIVE, Op, build_program

_BYTE = ctypes.c_char
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 16 << 20
_CHUNKED = (32 << 10, 4 << 20)  # sizes that share a chunk
_chunk = [None, 0]  # the chunk being filled, bytes used; a chunk lives as long as its arrays
_chunk_lock = threading.Lock()
# More would only wait for each other; every supported machine has fewer cores.
MAX_THREADS = 1024
# Pauses of a worker between two programs before it sleeps, about 200 us: what Python does there in a
# round that drafts. Four times as much brought no more.
_REST_SPINS = 4000
_CONTROL_BYTES = 256  # ``executor.CONTROL_BYTES``, which cannot be imported without Numba


def _build_run_program():
    from cudflash.ops.cpu.executor import build_run_program

    return build_run_program()


_RUN_PROGRAM = jit.register("run_program", _build_run_program)


def empty(shape, dtype):
    """Uninitialised, 64-byte aligned, C-contiguous array."""
    return _aligned(_uninitialised, shape, dtype)


def zeros(shape, dtype):
    """Zero-filled, 64-byte aligned, C-contiguous array; its pages are taken when first touched."""
    return _aligned(_untouched, shape, dtype)


def _uninitialised(n_bytes, dtype):
    """Bytes of a huge-page chunk for what is neither small nor, to NumPy, large.

    A model is hundreds of matrices of this size; touching them in pages of 4 KiB for the first
    time takes a fifth of its load. From 4 MiB on NumPy asks for huge pages itself.
    """
    if not _CHUNKED[0] <= n_bytes < _CHUNKED[1] or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(n_bytes, dtype)
    with _chunk_lock:
        chunk, used = _chunk
        if chunk is None or used + n_bytes > len(chunk):
            chunk, used = _new_chunk(), 0
        _chunk[:] = chunk, used + n_bytes
    return chunk[used:used + n_bytes]


def _untouched(n_bytes, dtype):
    """Zero bytes, from the system where the C library would clear memory that was used before."""
    if not _CHUNKED[0] <= n_bytes < _CHUNKED[1] or os.name != "posix":
        return np.zeros(n_bytes, dtype)
    return np.frombuffer(_pages(n_bytes), dtype)


def _pages(n_bytes):
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _new_chunk():
    memory = _pages(_CHUNK_BYTES + _HUGE_PAGE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them; small pages do as well, only slower
        pass
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start:start + _CHUNK_BYTES]


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


def move(buffer, source):
    """Copy between two contiguous arrays of one shape and dtype, outside of recorded passes."""
    buffer[...] = source


class Span(tuple):
    """Address range (first, past the last) of memory that somebody else keeps alive."""

    __slots__ = ()


def span_of(array):
    """Span of a C-contiguous array, to be looked up once and named in many launches."""
    return Span(_span(array, {}))


def _span(array, known):
    """Address range that an array occupies (C-contiguous arrays only)."""
    if type(array) is Span:
        return array
    span = known.get(id(array))
    if span is None:
        try:  # NumPy's own ways to an address take eight times as long
            start = ctypes.addressof(_BYTE.from_buffer(array))
        except (TypeError, ValueError):  # read-only, or empty
            start = array.__array_interface__["data"][0]
        span = known[id(array)] = start, start + array.nbytes
    return span


def _word(value, known):
    """What a kernel finds of a value in its argument block."""
    if isinstance(value, np.ndarray):
        return _span(value, known)[0]
    return _float_bits(value) if isinstance(value, float) else value


def _float_bits(value):
    return struct.unpack("<q", struct.pack("<d", value))[0]


def submit(kernel, values, *, reads, writes, keep=(), touched=None, rows=0, by_rows=()):
    """Run a kernel, or record it when a capture is open in this thread.

    Parameters
    ----------
    kernel : jit.Kernel
    values : sequence of int, float or ndarray
        The argument block: integers as they are, floats as float64 bits, arrays as addresses.
    reads, writes : sequence of ndarray or Span
        Memory the kernel touches; two recorded kernels get a barrier between them only when one
        writes what the other touches.
    keep : sequence
        Objects that must stay alive as long as the launch may run.
    touched : int, optional
        Bytes the launch really reads and writes, where that is less than all of ``reads`` and
        ``writes`` (a few rows of a cache, say).
    rows : int
        Rows that the threads share out evenly, 0 where the work is cut in another way.
    by_rows : sequence of ndarray or Span
        Those of ``reads`` and ``writes`` of which row r is touched with row r of the work alone.
        Two such launches in turn need no barrier over them.
    """
    spans = {}  # most arrays are named twice
    words = [value if type(value) is int else _word(value, spans) for value in values]
    block = numbers("q", words)
    cut = {id(a) for a in by_rows if type(a) is Span or a.flags.c_contiguous}
    ranges = numbers("q")
    for arrays in (reads, writes):
        for a in arrays:
            ranges.extend((*_span(a, spans), id(a) in cut))
    op = Op(kernel, block.buffer_info()[0], ranges, len(reads), (block, values, keep), touched, rows)
    graph = open_graph()
    if graph is None:
        Graph([op]).launch()
    else:
        graph.append(op)


class Graph:
    """A recorded sequence of kernel launches on fixed buffers."""

    def __init__(self, ops=()):
        self._ops = list(ops)
        self._program = None  # (threads, program, its address, its records)
        self.sections = {}  # of ``repeat``, which records parts of it again

    def __len__(self):
        return len(self._ops)

    def append(self, op):
        """Add one launch; the program is rebuilt at the next ``launch``."""
        self._ops.append(op)
        self._program = None

    def ops(self, first, last):
        """Launches ``first`` to ``last - 1``."""
        return self._ops[first:last]

    @property
    def n_barriers(self):
        """Number of thread barriers the program needs on the threads in use."""
        return int(np.count_nonzero(self._built(pool().n_threads)[1][:, 2]))

    def _built(self, n_threads):
        """The program for so many threads, and where it lies."""
        found = self._program
        if found is None or found[0] != n_threads:
            program = build_program(self._ops, n_threads)
            found = self._program = n_threads, program, program.ctypes.data, len(program)
        return found

    def launch(self):
        """Run all recorded kernels in order; returns when the last one has finished."""
        while len(self._ops):
            threads_ = pool()
            program = self._built(threads_.n_threads)
            if threads_.run(*program[2:]):
                return  # else another thread has replaced the pool in the meantime


class _Capture:
    # The thread only refers to it weakly: an interrupt on the way out of the with statement, which
    # skips or cuts short __exit__, must not leave a capture open that nobody can close.
    def __enter__(self):
        if open_graph() is not None:
            raise UsageError("a capture is already open in this thread; close it first")
        self.graph = Graph()
        _local.capture = weakref.ref(self)
        return self.graph

    def __exit__(self, *exc):
        _local.capture = None
        self.graph.sections.clear()
        return False


def open_graph():
    """The graph that this thread records into, or None."""
    reference = getattr(_local, "capture", None)
    capture_ = None if reference is None else reference()
    return None if capture_ is None else capture_.graph


def capture():
    """Context manager: ops called inside are recorded into the :class:`Graph` it yields."""
    return _Capture()


class ThreadPool:
    """The calling thread plus ``n_threads - 1`` workers; one program at a time.

    Workers wait inside ``run_program``; a program is started and joined by one native call, so an
    interrupt is seen before it or after it, never between.
    """

    def __init__(self, n_threads):
        self.n_threads = n_threads
        self._lock = threading.Lock()
        self._control = zeros(_CONTROL_BYTES, np.uint8)
        self._words = (ctypes.c_int64 * 2).from_buffer(self._control)  # program, number of records
        self._control[16:24].view(np.int64)[:] = _REST_SPINS
        self._scratch = zeros((n_threads, 8), np.int64)
        first, line = self._scratch.ctypes.data, self._scratch.strides[0]
        # looked up once: a small model has a thousand passes in a second
        self._arguments = [
            (first + tid * line, first + tid * line + 8, self._control.ctypes.data, tid, n_threads)
            for tid in range(n_threads)
        ]
        self._run = NATIVE(_RUN_PROGRAM.address)
        self._stopped = False
        self._pid = os.getpid()
        self._workers, self._cpu = [], None
        try:
            for tid in range(1, n_threads):
                worker = threading.Thread(target=self._call, args=(tid,), daemon=True,
                                          name=f"cudflash-{tid}")
                worker.start()
                self._workers.append(worker)
        except RuntimeError as err:
            self.close()
            raise DeviceError(
                f"thread {len(self._workers) + 1} of {n_threads} could not be started ({err}); "
                "ask for fewer threads") from None

    def _call(self, tid):
        self._run(*self._arguments[tid])

    def run(self, program, n_records):
        """Execute a program on all threads.

        Parameters
        ----------
        program : int
            Address of its records, which the caller keeps alive.
        n_records : int

        Returns
        -------
        bool
            True when every thread is done; False if the pool has been closed in the meantime.
        """
        with self._lock:
            if self._stopped:
                return False
            if self._workers:
                self._make_room()
            self._words[0], self._words[1] = program, n_records
            self._call(0)
            return True

    def _make_room(self):
        """Keep the workers off the core that the caller runs on.

        A worker that is woken on that core shares it with the caller until the system's next
        balancing, tens of milliseconds later, and every barrier of a program costs a time slice.
        """
        cpu = _current_core()
        if cpu == self._cpu:
            return
        self._cpu = cpu
        try:
            allowed = os.sched_getaffinity(0)
            if len(allowed) >= self.n_threads and cpu in allowed:
                for worker in self._workers:
                    os.sched_setaffinity(worker.native_id, allowed - {cpu})
        except OSError:  # not allowed here, or a worker that is gone: it only costs time
            pass

    def close(self):
        """Send the workers home, after the program in flight if there is one."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._words[0], self._words[1] = 0, -1
                self._call(0)


def _find_current_core():
    """The system's function for the core that the calling thread runs on."""
    if not hasattr(os, "sched_setaffinity"):
        return lambda: None
    try:
        return ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError):  # another C library: workers stay where they are put
        return lambda: None


_current_core = _find_current_core()
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
    """Use ``n`` threads from now on, in the whole process; results do not depend on it.

    Raises
    ------
    UsageError
        If ``n`` is no whole number from 1 to MAX_THREADS.
    DeviceError
        If the system gives no more threads; the former number stays in use.
    """
    global _pool
    whole = isinstance(n, (int, np.integer)) and not isinstance(n, bool)
    if not whole or not 1 <= n <= MAX_THREADS:
        raise UsageError(
            f"number of threads is {n!r}, expected a whole number from 1 to {MAX_THREADS}")
    with _pool_lock:
        former = _pool if _pool is not None and _pool._pid == os.getpid() else None
        if former is not None and former.n_threads == n:
            return
        _pool = ThreadPool(int(n))
        if former is not None:
            former.close()


def threads():
    """Number of threads in use."""
    return pool().n_threads
