"""From recorded launches to a program: who runs which of them, and where threads wait for each other.

Owns when a barrier is needed. Must not know what a kernel computes.
"""

import ctypes
from array import array as numbers

import numpy as np

from cudflash.ops.cpu import jit

# A launch that touches less than this is left to one thread: neighbours of its kind then need no
# barrier between them, and a barrier costs as much as the work.
_SERIAL_BYTES = 48 * 1024
# The same where every thread goes on with the rows it had before, which takes no barrier.
_SERIAL_BYTES_BY_ROWS = 3584

NATIVE = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def _build_barriers():
    from cudflash.ops.cpu.program_kernel import build

    return build()


_BARRIERS = jit.register("program_barriers", _build_barriers)


class Op:
    """One kernel launch: entry point, address of its argument block, what it keeps alive.

    ``spans`` are the address ranges it reads, ``n_reads`` of them, and those it writes, each as three
    numbers: first, past the last, by rows. "By rows" says that thread t of T touches the t-th of T
    equal parts and nothing else, provided T divides ``rows``. ``touched`` is the number of bytes.
    """

    __slots__ = ("kernel", "args", "spans", "n_reads", "keep", "touched", "rows")

    def __init__(self, kernel, args, spans, n_reads, keep, touched, rows):
        self.kernel, self.args, self.keep = kernel, args, keep
        self.spans, self.n_reads, self.rows = spans, n_reads, rows
        self.touched = sum(spans[1::3]) - sum(spans[::3]) if touched is None else touched

    def is_serial(self, n_threads):
        """Whether thread 0 of so many runs it alone."""
        by_rows = self.rows > 0 and self.rows % n_threads == 0
        return self.touched <= (_serial_bytes_by_rows() if by_rows else _SERIAL_BYTES)

    @property
    def reads(self):
        """The ranges that are read, one triple each."""
        return self._triples()[:self.n_reads]

    @property
    def writes(self):
        """The ranges that are written."""
        return self._triples()[self.n_reads:]

    def _triples(self):
        return list(zip(self.spans[::3], self.spans[1::3], map(bool, self.spans[2::3])))


def _serial_bytes_by_rows():
    return min(_SERIAL_BYTES, _SERIAL_BYTES_BY_ROWS)


def build_program(ops, n_threads):
    """Records for ``run_program``: entry point, argument block, barrier before, serial.

    A launch that touches little is left to thread 0. A barrier comes before a launch that touches
    what another one since the last barrier has written, or writes what that one has touched: unless
    thread 0 runs both, or both cut that range by rows in the same way.

    Parameters
    ----------
    ops : sequence of Op
    n_threads : int

    Returns
    -------
    ndarray of shape (len(ops), 4), int64
    """
    if n_threads == 1 or len(ops) == 1:  # nobody to wait for, or nothing
        records = numbers("q")
        for op in ops:
            records.extend((op.kernel.address, op.args, 0, op.is_serial(n_threads)))
        return np.array(records, np.int64).reshape(-1, 4)
    heads, spans = numbers("q"), numbers("q")
    for op in ops:
        heads.extend((op.kernel.address, op.args, op.touched, op.rows, op.n_reads,
                      len(op.spans) // 3))  # fmt: skip
        spans.extend(op.spans)
    program = np.empty((len(ops), 4), np.int64)
    block = np.array([
        heads.buffer_info()[0], spans.buffer_info()[0], program.ctypes.data, len(ops), n_threads,
        _SERIAL_BYTES, _serial_bytes_by_rows(),
    ], np.int64)  # fmt: skip
    scratch = np.zeros(2, np.int64)  # where compiled code returns nothing
    first = scratch.ctypes.data
    NATIVE(_BARRIERS.address)(first, first + 8, block.ctypes.data, 0, 1)
    return program
