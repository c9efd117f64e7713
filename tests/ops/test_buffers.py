"""Buffers that share huge-page chunks are as separate as any others."""

import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.ops.cpu import runtime

SIZES = [1, 63, 32 << 10, (32 << 10) + 1, 700_001, 3 << 20, (4 << 20) - 65, 4 << 20, 5 << 20]


def span(array):
    """First address and the one behind the last byte."""
    return array.ctypes.data, array.ctypes.data + array.nbytes


def test_buffers_are_aligned_writable_and_apart():
    """Catches two buffers that overlap, at sizes on both sides of each limit."""
    buffers = [ops.empty((n,), np.uint8) for n in SIZES * 4]
    spans = sorted(span(b) for b in buffers)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    for i, buffer in enumerate(buffers):
        assert buffer.ctypes.data % 64 == 0 and buffer.flags.writeable
        buffer.fill(i)
    assert all((b == i).all() for i, b in enumerate(buffers))


def test_buffers_made_by_threads_at_once_are_apart():
    """Catches a chunk whose free part is handed out twice."""
    with ThreadPoolExecutor(8) as pool:
        buffers = list(pool.map(lambda _: ops.empty((40_000,), np.uint8), range(600)))
    spans = sorted(span(b) for b in buffers)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


def test_a_chunk_goes_when_its_last_buffer_goes(monkeypatch):
    """Catches chunks that outlive a closed model."""
    monkeypatch.setattr(runtime, "_chunk", [None, 0])
    buffers = [ops.empty((1 << 20,), np.uint8) for _ in range(4)]
    chunk = weakref.ref(runtime._chunk[0].base)
    runtime._chunk[:] = [None, 0]
    del buffers[1:]
    gc.collect()
    assert chunk() is not None
    buffers.clear()
    gc.collect()
    assert chunk() is None


@pytest.mark.parametrize("refused", [True, False])
def test_a_system_without_huge_pages_gives_ordinary_memory(monkeypatch, refused):
    """Catches a load that fails where the kernel has no huge pages, or Python no constant."""
    monkeypatch.setattr(runtime, "_chunk", [None, 0])
    if refused:
        monkeypatch.setattr(runtime.mmap, "MADV_HUGEPAGE", 10_000)  # no such advice: EINVAL
    else:
        monkeypatch.delattr(runtime.mmap, "MADV_HUGEPAGE")
    buffer = ops.empty((100_000,), np.uint8)
    buffer.fill(7)
    assert (buffer == 7).all()


def resident():
    """Bytes of memory that the process really holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's page counts")
def test_zero_filled_buffers_take_no_memory_before_they_are_used():
    """Catches caches that are cleared, page by page, where an answer touches a few of their rows."""
    used = [np.ones(1 << 20, np.uint8) for _ in range(64)]
    del used  # memory that the C library would have to clear
    before = resident()
    buffers = [ops.zeros((1 << 20,), np.uint8) for _ in range(64)]
    assert resident() - before < 8 << 20
    assert not any(b.any() for b in buffers)
    assert all(b.ctypes.data % 64 == 0 and b.flags.writeable for b in buffers)
