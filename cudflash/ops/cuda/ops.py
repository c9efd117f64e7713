"""The op set of one CUDA device: every op of ``ops.cpu``, its launches, its memory.

Owns how a launch is made, recorded and replayed, and where arrays lie. The ops themselves are in
the modules beside this one; here they are gathered under the names of ``ops.cpu``.
"""

import threading

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cuda import (
    attend,
    convolve,
    elementwise,
    embed,
    formats,
    fused,
    norm,
    packed,
    recurrent,
    rotary,
    select,
    selector,
)
from cudflash.ops.cuda.array import DeviceArray
from cudflash.ops.cuda.launch import Graph, Launch
from cudflash.ops.cuda.loading import Loader
from cudflash.ops.cuda.memory import ALIGNMENT, Heap, round_up


class CudaOps:
    """Op set of a device; what the model calls ``ops``.

    Parameters
    ----------
    driver : Driver
    graphs : bool
        Replay recorded passes as CUDA graphs; else start their kernels one by one. Same bits.
    exact_memory : bool
        One allocation for each array, for a memory checker.
    """

    CHUNK = attend.CHUNK

    add, add_bias, copy, scale = (
        elementwise.add, elementwise.add_bias, elementwise.copy, elementwise.scale)
    softcap, swiglu, geglu, sigmoid_gate = (
        elementwise.softcap, elementwise.swiglu, elementwise.geglu, elementwise.sigmoid_gate)
    kv_cache, kv_write, attention, attention_span = (
        attend.kv_cache, attend.kv_write, attend.attention, attend.attention_span)
    dynamic_conv = convolve.dynamic_conv
    embedding_table, embed_rows = embed.embedding_table, embed.embed_rows
    embedding_nbytes = staticmethod(formats.embedding_nbytes)
    packed_nbytes = staticmethod(formats.packed_nbytes)
    pack, pack_all, quantized_rows = packed.pack, packed.pack_all, packed.quantized_rows
    quantize_rows, matmul = packed.quantize_rows, packed.matmul
    norm_quantize, swiglu_quantize = fused.norm_quantize, fused.swiglu_quantize
    geglu_quantize, sigmoid_gate_quantize = fused.geglu_quantize, fused.sigmoid_gate_quantize
    rms_norm, l2_norm, gated_rms_norm = norm.rms_norm, norm.l2_norm, norm.gated_rms_norm
    rope = rotary.rope
    recurrent_open, recurrent_copy = recurrent.recurrent_open, recurrent.recurrent_copy
    short_conv, delta_gates, delta_rule = (
        recurrent.short_conv, recurrent.delta_gates, recurrent.delta_rule)
    argmax, top_k, check_finite, accept_greedy = (
        select.argmax, select.top_k, select.check_finite, select.accept_greedy)
    selector_lattice, selector_walk = selector.selector_lattice, selector.selector_walk

    def __init__(self, driver, graphs=True, exact_memory=False):
        self.driver, self.graphs = driver, graphs
        self.heap = Heap(driver, exact_memory)
        self.loader = Loader(driver)
        self._local = threading.local()
        self._workspace = None

    # -- memory ---------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        """Uninitialised array, aligned to 256 bytes."""
        dtype = np.dtype(dtype)
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return DeviceArray(*self.heap.allocate(n_bytes), shape, dtype)

    def zeros(self, shape, dtype):
        """Array of zeros, aligned to 256 bytes."""
        out = self.empty(shape, dtype)
        if out.nbytes:
            self.driver.fill(out.address, 0, out.nbytes)
        return out

    def upload(self, array):
        """Array on the device with a copy of a host array."""
        array = np.asarray(array)
        out = self.empty(array.shape, array.dtype)
        self.copy_in(out, array)
        return out

    def download(self, buffer):
        """Host copy of an array, after everything that was started before."""
        if not buffer.flags.c_contiguous:
            raise UsageError(f"an array with strides {buffer.strides} cannot be downloaded")
        out = np.empty(buffer.shape, buffer.dtype)
        if out.nbytes:
            self.driver.copy_out(out, buffer.address)
        return out

    def copy_in(self, buffer, array):
        """Overwrite an array with host values of the same shape."""
        array = np.ascontiguousarray(np.broadcast_to(array, buffer.shape), buffer.dtype)
        if not buffer.flags.c_contiguous:
            raise UsageError(f"an array with strides {buffer.strides} cannot be overwritten at once")
        if array.nbytes:
            self.driver.copy_in(buffer.address, array)

    def move(self, buffer, source):
        """Copy between two contiguous arrays of one shape and dtype, outside of recorded passes."""
        if (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            raise UsageError(f"move: found {source.dtype} of shape {source.shape}, expected "
                             f"{buffer.dtype} of shape {buffer.shape}")
        if not (buffer.flags.c_contiguous and source.flags.c_contiguous):
            raise UsageError("move: an array with gaps cannot be moved at once")
        if buffer.nbytes:
            self.driver.copy_within(buffer.address, source.address, buffer.nbytes)

    def reserve(self, n_bytes):
        """Take memory for the arrays of ``n_bytes`` in all that come next, in one piece."""
        self.heap.reserve(n_bytes)

    def memory(self):
        """(free, total) bytes of the device."""
        return self.driver.memory()

    def prepare(self, n_bytes):
        """End loading: allocate the scratch of :meth:`workspace` for all that is to come."""
        self.loader.close()
        self.workspace(((n_bytes,), np.uint8))

    def workspace(self, *needs):
        """Scratch that lives until the next op; all ops share it, because they run in order.

        Parameters
        ----------
        needs : tuples of (shape, dtype)

        Returns
        -------
        list of DeviceArray
        """
        sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
                 for shape, dtype in needs]
        starts = np.cumsum([0, *(round_up(size, ALIGNMENT) for size in sizes)])
        if self._workspace is None or self._workspace.nbytes < starts[-1]:
            # launches recorded with the former one keep it
            self._workspace = self.empty((int(starts[-1]),), np.uint8)
        base = self._workspace
        return [DeviceArray(base.block, base.address + int(start), shape, dtype)
                for start, (shape, dtype) in zip(starts, needs)]

    # -- launches -------------------------------------------------------------------------------

    def start(self, file, defines, name, grid, block, args):
        """Launch a kernel, or record it when a capture is open in this thread."""
        function = self.driver.function(file, defines, name)
        launch = Launch(name, function, grid, block, args)
        graph = getattr(self._local, "graph", None)
        if graph is None:
            self.driver.launch(launch)
        else:
            graph.append(launch)

    def capture(self):
        """Context manager: ops called inside are recorded into the :class:`Graph` it yields."""
        return _Capture(self._local, Graph(self.driver, self.graphs))

    # -- recording a part of a pass again as a copy: on the CPU alone, a launch here takes no longer ---

    def recorded(self):
        """None: nothing can be recorded again as a copy."""

    def moves(self, buffers, others):  # noqa: ARG002  (the CPU's names)
        """None, as above."""

    def repeat(self, first, last, moves):  # noqa: ARG002
        """False, as above."""
        return False

    def synchronize(self):
        """Wait until everything is done."""
        self.driver.synchronize()

    def close(self):
        """Let go of scratch and loading buffers."""
        self.loader.close()
        self._workspace = None

    # -- what the CPU has threads for -------------------------------------------------------------

    def set_threads(self, n):
        """Do nothing: the host's threads have no part in the arithmetic."""
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise UsageError(f"number of threads is {n!r}, expected a whole number of at least 1")

    def threads(self):
        """Number of host threads that compute: none."""
        return 0


class _Capture:
    def __init__(self, local, graph):
        self._local, self._graph = local, graph

    def __enter__(self):
        if getattr(self._local, "graph", None) is not None:
            raise UsageError("a capture is already open in this thread; close it first")
        self._local.graph = self._graph
        return self._graph

    def __exit__(self, *exc):
        self._local.graph = None
        return False
