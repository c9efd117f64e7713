"""The seam to the CUDA runtime: memory, copies, modules, launches, graphs, events.

``Driver`` is everything the op set asks of a device. It is written against the three low-level
modules of CuPy (``cupy.cuda.runtime``, ``driver`` and ``nvrtc``); the tests put an emulator in their
place that runs the same kernels on the processor, so this file is tested too. ``PlanningDriver``
counts memory and does nothing else.

Every call works on one stream of the driver's own, in order; only uploads of weights use a second
one. Addresses, streams, events and graphs are plain integers.
"""

import contextlib
import ctypes
import threading

import numpy as np

from cudflash.errors import DeviceError, OutOfMemoryError
from cudflash.ops.cuda.compiler import Compiler

_LANDING_BYTES = 1 << 16  # pinned memory for the small copies of a round


class Driver:
    """One CUDA device.

    Parameters
    ----------
    cuda : module
        ``cupy.cuda``, or anything with its ``runtime``, ``driver`` and ``nvrtc``.
    index : int
        Device number.

    Attributes
    ----------
    name : str
    arch : str
        As ``sm_90``.
    compiler : Compiler
    n_launches, n_graph_launches, n_copies_in, n_copies_out : int
        Since the driver was made; for tests and measurements.
    """

    def __init__(self, cuda, index=0):
        self._cuda, self.index = cuda, index
        self._runtime, self._driver = cuda.runtime, cuda.driver
        self._seen = threading.local()
        self.n_launches = self.n_graph_launches = self.n_copies_in = self.n_copies_out = 0
        self._modules, self._functions = {}, {}
        self.stream = self.upload_stream = self._landing = None
        self._lock = threading.Lock()
        with self._translated("be opened"):
            self._enter()
            self._runtime.free(0)  # makes the context, so that a broken one shows here
            properties = self._runtime.getDeviceProperties(index)
            name = properties["name"]
            self.name = name.decode() if isinstance(name, bytes) else str(name)
            self.n_multiprocessors = int(properties["multiProcessorCount"])
            capability = 10 * properties["major"] + properties["minor"]
            self.compiler = Compiler(cuda.nvrtc, capability, self.name)
            self.arch = self.compiler.arch
            self.stream = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
            self.upload_stream = self._runtime.streamCreateWithFlags(
                self._runtime.streamNonBlocking)
            self._landing, self._landing_array = self.pinned(_LANDING_BYTES)

    def __del__(self):
        """Give modules, streams and page-locked memory back; memory in use keeps the driver alive."""
        with contextlib.suppress(Exception):
            self._enter()
            for module in self._modules.values():
                self._driver.moduleUnload(module)
            for stream in (self.stream, self.upload_stream):
                if stream is not None:
                    self._runtime.streamDestroy(stream)
            if self._landing is not None:
                self._runtime.freeHost(self._landing)

    # -- memory ---------------------------------------------------------------------------------

    def allocate(self, n_bytes):
        """Address of fresh device memory.

        Raises
        ------
        OutOfMemoryError
            With what was asked for and what is free.
        """
        with self._translated(f"allocate {_size(n_bytes)}", n_bytes):
            self._enter()
            return self._runtime.malloc(n_bytes)

    def free(self, address, n_bytes):
        """Give memory back; what is still running on it is waited for. Never raises."""
        with contextlib.suppress(Exception):  # also called while the interpreter shuts down
            self._enter()
            self._runtime.free(address)

    def memory(self):
        """(free, total) bytes of the device."""
        with self._translated("tell its memory"):
            self._enter()
            return tuple(int(n) for n in self._runtime.memGetInfo())

    def pinned(self, n_bytes):
        """Page-locked host memory: (address, uint8 array over it); ``free_pinned`` ends both."""
        with self._translated("lock host memory"):
            self._enter()
            address = self._runtime.hostAlloc(n_bytes, 0)
            return address, np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))

    def free_pinned(self, address):
        """Give page-locked memory back. Never raises."""
        with contextlib.suppress(Exception):
            self._enter()
            self._runtime.freeHost(address)

    def fill(self, address, value, n_bytes):
        """Set bytes, in order with the launches."""
        with self._translated("set memory"):
            self._enter()
            self._runtime.memsetAsync(address, value, n_bytes, self.stream)

    # -- copies ---------------------------------------------------------------------------------

    def copy_in(self, address, array):
        """Copy a contiguous host array to the device; it may be changed as soon as this returns.

        From pageable memory the runtime takes its own copy before it returns, so a small copy does
        not wait for the device.
        """
        with self._translated("copy to the device"):
            self._enter()
            self.n_copies_in += 1
            self._runtime.memcpyAsync(
                address, array.ctypes.data, array.nbytes, self._runtime.memcpyHostToDevice,
                self.stream)

    def copy_out(self, array, address):
        """Copy device memory to a contiguous host array, after everything launched before."""
        with self._translated("finish its work"):
            self._enter()
            self.n_copies_out += 1
            small = array.nbytes <= _LANDING_BYTES
            to = self._landing if small else array.ctypes.data
            self._runtime.memcpyAsync(
                to, address, array.nbytes, self._runtime.memcpyDeviceToHost, self.stream)
            self._runtime.streamSynchronize(self.stream)
            if small:
                array.reshape(-1).view(np.uint8)[:] = self._landing_array[:array.nbytes]

    def copy_within(self, to, address, n_bytes):
        """Copy device memory to other device memory, in order with the launches."""
        with self._translated("copy its memory"):
            self._enter()
            self._runtime.memcpyAsync(
                to, address, n_bytes, self._runtime.memcpyDeviceToDevice, self.stream)

    def upload_async(self, address, host_address, n_bytes):
        """Start a copy from pinned memory on the upload stream."""
        with self._translated("copy to the device"):
            self._enter()
            self._runtime.memcpyAsync(
                address, host_address, n_bytes, self._runtime.memcpyHostToDevice,
                self.upload_stream)

    def synchronize(self):
        """Wait until everything is done."""
        with self._translated("finish its work"):
            self._enter()
            self._runtime.streamSynchronize(self.upload_stream)
            self._runtime.streamSynchronize(self.stream)

    # -- events ---------------------------------------------------------------------------------

    def event(self, timing=False):
        """Make an event."""
        with self._translated("make an event"):
            self._enter()
            flags = 0 if timing else self._runtime.eventDisableTiming
            return self._runtime.eventCreateWithFlags(flags)

    def record(self, event, stream=None):
        """Record an event behind what was given to a stream, the main one if None."""
        with self._translated("record an event"):
            self._enter()
            self._runtime.eventRecord(event, self.stream if stream is None else stream)

    def stream_waits(self, stream, event):
        """Let a stream wait for an event."""
        with self._translated("order its streams"):
            self._enter()
            self._runtime.streamWaitEvent(stream, event)

    def wait(self, event):
        """Wait on the host for an event."""
        with self._translated("finish its work"):
            self._enter()
            self._runtime.eventSynchronize(event)

    def elapsed_ms(self, start, end):
        """Milliseconds between two recorded events made with ``timing``."""
        with self._translated("tell times"):
            return float(self._runtime.eventElapsedTime(start, end))

    def free_event(self, event):
        """Give an event back. Never raises."""
        with contextlib.suppress(Exception):
            self._runtime.eventDestroy(event)

    # -- kernels --------------------------------------------------------------------------------

    def function(self, file, defines, name):
        """Handle of a kernel, loaded or compiled on first use."""
        key = file, defines, name
        found = self._functions.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._functions:
                self._functions[key] = self._load(file, defines, name)
            return self._functions[key]

    def _load(self, file, defines, name):
        module = self._modules.get((file, defines))
        code = self.compiler.cubin(file, defines) if module is None else None
        with self._translated(f"load kernel {name}"):
            self._enter()
            if module is None:
                module = self._modules[file, defines] = self._driver.moduleLoadData(code)
            return self._driver.moduleGetFunction(module, name)

    def launch(self, launch):
        """Start a kernel."""
        with self._translated(f"run kernel {launch.name}"):
            self._enter()
            self.n_launches += 1
            self._driver.launchKernel(
                launch.function, *launch.grid, *launch.block, launch.shared_bytes, self.stream,
                launch.table, 0)

    # -- graphs ---------------------------------------------------------------------------------

    def capture(self, launches):
        """Executable graph of launches; runs nothing.

        Whatever goes wrong in the middle, the stream is usable afterwards.
        """
        with self._translated("record a graph"):
            self._enter()
            before, graph = self.n_launches, None
            try:
                self._runtime.streamBeginCapture(self.stream)
                for launch in launches:
                    self.launch(launch)
                graph = self._runtime.streamEndCapture(self.stream)
                return self._runtime.graphInstantiate(graph)
            except BaseException:  # an interrupt as well: the stream must not stay in capture
                if graph is None:
                    with contextlib.suppress(Exception):
                        graph = self._runtime.streamEndCapture(self.stream)
                raise
            finally:
                self.n_launches = before
                if graph is not None:
                    self._runtime.graphDestroy(graph)

    def launch_graph(self, executable):
        """Start a graph."""
        with self._translated("run a graph"):
            self._enter()
            self.n_graph_launches += 1
            self._runtime.graphLaunch(executable, self.stream)

    def free_graph(self, executable):
        """Give a graph back. Never raises."""
        with contextlib.suppress(Exception):
            self._enter()
            self._runtime.graphExecDestroy(executable)

    # -- pieces ---------------------------------------------------------------------------------

    def _enter(self):
        """Make the device current in this thread; CUDA keeps it per thread."""
        if getattr(self._seen, "index", None) != self.index:
            self._runtime.setDevice(self.index)
            self._seen.index = self.index

    @contextlib.contextmanager
    def _translated(self, what, n_bytes=0):
        try:
            yield
        except (MemoryError, RuntimeError) as err:  # every error of the CUDA modules is one
            raise self._error(what, n_bytes, err) from None

    def _error(self, what, n_bytes, err):
        text = " ".join(str(err).split())
        name = getattr(self, "name", f"device {self.index}")
        if n_bytes and ("MemoryAllocation" in text or "OUT_OF_MEMORY" in text):
            free, total = self.memory()
            return OutOfMemoryError(
                f"{name} has no room for {_size(n_bytes)}, {_size(free)} of {_size(total)} are "
                "free; lower n_ctx, use a smaller model or close other programs on it "
                "('cudflash plan' shows what takes the memory)")
        if "IllegalAddress" in text or "LaunchFailure" in text or "ILLEGAL" in text:
            return DeviceError(
                f"{name} stopped while it should {what} ({text}); this process cannot use it any "
                "more, start it again, and report this: it is a bug in cudflash or a faulty card")
        return DeviceError(f"{name} could not {what} ({text}); run 'cudflash doctor'")


def _size(n_bytes):
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
