"""Stand-in for ``cupy.cuda``: the calls that ``cudflash.ops.cuda.driver`` makes, on the processor.

Device memory is host memory behind guard addresses, "cubins" are kernel texts that g++ compiles,
streams run at once, and a captured stream records. So the whole CUDA backend runs without a card:
its buffers, launches, graphs and error paths. Faults can be injected by name of the call.
"""

import ctypes
import json
from collections import Counter
from functools import cache

import numpy as np

from cudflash.ops.cuda import CudaOps
from cudflash.ops.cuda.driver import Driver
from tests.emulation.host_module import HostModule, LaunchError

TOTAL_BYTES = 1 << 30


class CUDARuntimeError(RuntimeError):
    """As CuPy's; the name of the error is in the text."""


@cache
def _module(stem, text, defines, mode):
    return HostModule.from_text(stem, text, defines, mode)


class Calls:
    """Counts calls and raises where a fault is planted.

    Attributes
    ----------
    counts : Counter
        Calls by name.
    faults : dict
        Name -> (number of the call that fails, from 1 on; exception).
    """

    def __init__(self):
        self.counts, self.faults = Counter(), {}

    def note(self, name):
        """Count a call; raise if it is the one that fails."""
        self.counts[name] += 1
        at, error = self.faults.get(name, (0, None))
        if self.counts[name] == at:
            raise error

    def fail(self, name, error, after=0):
        """Let the call after ``after`` more calls of this name fail."""
        self.faults[name] = self.counts[name] + after + 1, error


class Runtime:
    """``cupy.cuda.runtime``."""

    streamNonBlocking, eventDisableTiming = 1, 2
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

    def __init__(self, calls, total_bytes):
        self.calls, self._total = calls, total_bytes
        self.allocations, self._pinned = {}, {}
        self._handles = iter(range(1000, 10**9))
        self.streams, self.events = {}, {}
        self.capturing, self.graphs, self.executables = None, {}, {}
        self.run = None  # how a recorded launch is run; set by the driver's stand-in
        self.n_copied = 0  # bytes between host and device

    # -- devices --------------------------------------------------------------------------------

    def getDeviceCount(self):
        self.calls.note("getDeviceCount")
        return 1

    def setDevice(self, index):
        self.calls.note("setDevice")
        if index != 0:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def getDeviceProperties(self, index):
        self.calls.note("getDeviceProperties")
        return {"name": b"emulated device", "major": 9, "minor": 0, "multiProcessorCount": 4}

    def driverGetVersion(self):
        return 13000

    # -- memory ---------------------------------------------------------------------------------

    def malloc(self, n_bytes):
        self.calls.note("malloc")
        used = sum(size for _, size in self.allocations.values())
        if used + n_bytes > self._total:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        raw = np.full(n_bytes + 256, 0xFF, np.uint8)  # what was never written shows
        address = raw.ctypes.data + (-raw.ctypes.data % 256)
        self.allocations[address] = raw, n_bytes
        return address

    def free(self, address):
        self.calls.note("free")
        if address:
            del self.allocations[address]

    def memGetInfo(self):
        used = sum(size for _, size in self.allocations.values())
        return self._total - used, self._total

    def hostAlloc(self, n_bytes, flags):
        self.calls.note("hostAlloc")
        raw = np.full(n_bytes, 0xFF, np.uint8)
        self._pinned[raw.ctypes.data] = raw
        return raw.ctypes.data

    def freeHost(self, address):
        del self._pinned[address]

    @property
    def n_pinned(self):
        """Page-locked allocations alive."""
        return len(self._pinned)

    def memsetAsync(self, address, value, n_bytes, stream):
        self._inside(address, n_bytes)
        ctypes.memset(address, value, n_bytes)

    def memcpyAsync(self, to, source, n_bytes, kind, stream):
        self.calls.note("memcpyAsync")
        self._inside(to if kind == self.memcpyHostToDevice else source, n_bytes)
        ctypes.memmove(to, source, n_bytes)
        if kind != self.memcpyDeviceToDevice:
            self.n_copied += n_bytes

    def _inside(self, address, n_bytes):
        if self.capturing is not None:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: a copy inside a capture")
        for base, (_, size) in self.allocations.items():
            if base <= address and address + n_bytes <= base + size:
                return
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    # -- streams and events ---------------------------------------------------------------------

    def streamCreateWithFlags(self, flags):
        self.calls.note("streamCreateWithFlags")
        return self._new(self.streams)

    def streamDestroy(self, stream):
        del self.streams[stream]

    def streamSynchronize(self, stream):
        self.calls.note("streamSynchronize")

    def streamWaitEvent(self, stream, event):
        self.events[event]

    def eventCreateWithFlags(self, flags):
        return self._new(self.events)

    def eventRecord(self, event, stream):
        self.events[event] = True

    def eventSynchronize(self, event):
        self.calls.note("eventSynchronize")
        self.events[event]

    def eventElapsedTime(self, start, end):
        return 1.0

    def eventDestroy(self, event):
        del self.events[event]

    def _new(self, table):
        handle = next(self._handles)
        table[handle] = True
        return handle

    # -- graphs ---------------------------------------------------------------------------------

    def streamBeginCapture(self, stream):
        self.calls.note("streamBeginCapture")
        if self.capturing is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is capturing")
        self.capturing = []

    def streamEndCapture(self, stream):
        self.calls.note("streamEndCapture")
        handle, self.capturing = next(self._handles), [*self.capturing]
        self.graphs[handle], self.capturing = self.capturing, None
        return handle

    def graphInstantiate(self, graph):
        self.calls.note("graphInstantiate")
        handle = next(self._handles)
        self.executables[handle] = self.graphs[graph]
        return handle

    def graphDestroy(self, graph):
        del self.graphs[graph]

    def graphLaunch(self, executable, stream):
        self.calls.note("graphLaunch")
        for recorded in self.executables[executable]:
            self.run(*recorded)

    def graphExecDestroy(self, executable):
        del self.executables[executable]


class LowDriver:
    """``cupy.cuda.driver``."""

    def __init__(self, calls, runtime, mode, how):
        self.calls, self._runtime, self._mode, self._how = calls, runtime, mode, how
        self._modules, self.functions = {}, {}
        runtime.run = self._run

    def moduleLoadData(self, code):
        self.calls.note("moduleLoadData")
        stem, text, defines = json.loads(code)
        handle = next(self._runtime._handles)
        self._modules[handle] = _module(stem, text, tuple(defines), self._mode)
        return handle

    def moduleUnload(self, module):
        del self._modules[module]

    @property
    def n_modules(self):
        """Modules loaded."""
        return len(self._modules)

    def moduleGetFunction(self, module, name):
        handle = next(self._runtime._handles)
        self.functions[handle] = self._modules[module], name
        return handle

    def launchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, table, extra):
        self.calls.note("launchKernel")
        signature = self.functions[function][0].signature(self.functions[function][1])
        # a graph keeps the values that the arguments have when it is recorded
        sizes = {"p": 8, "q": 8, "i": 4, "f": 4, "d": 8}
        pointers = (ctypes.c_void_p * max(1, len(signature))).from_address(table)
        values = [ctypes.string_at(at, sizes[kind]) for at, kind in zip(pointers, signature)]
        recorded = function, (gx, gy, gz), (bx, by, bz), shared, values
        if self._runtime.capturing is not None:
            self._runtime.capturing.append(recorded)
        else:
            self._run(*recorded)

    def _run(self, function, grid, block, shared, values):
        held = [ctypes.create_string_buffer(value, len(value)) for value in values]
        table = (ctypes.c_void_p * max(1, len(held)))(*(ctypes.addressof(v) for v in held))
        module, name = self.functions[function]
        buffers = [(address, size) for address, (_, size) in self._runtime.allocations.items()]
        try:
            module.run(name, grid, block, shared, ctypes.addressof(table), buffers, **self._how)
        except LaunchError as err:
            raise CUDARuntimeError(f"cudaErrorLaunchFailure: {err}") from None


class Nvrtc:
    """``cupy.cuda.nvrtc``: a cubin is the text with its defines."""

    def __init__(self, calls):
        self.calls, self._programs = calls, {}

    def getVersion(self):
        self.calls.note("getVersion")
        return 0, 0  # keeps these "cubins" out of every real compiler's part of the cache

    def getSupportedArchs(self):
        return [75, 80, 86, 89, 90, 100, 120]

    def createProgram(self, text, name, headers, include_names):
        self._programs[len(self._programs) + 1] = [name.removesuffix(".cu"), text, None]
        return len(self._programs)

    def compileProgram(self, program, options):
        self.calls.note("compileProgram")
        self._programs[program][2] = [o[2:] for o in options if o.startswith("-D")]

    def getCUBIN(self, program):
        return json.dumps(self._programs[program]).encode()

    def getProgramLog(self, program):
        return "emulated log"

    def destroyProgram(self, program):
        self._programs[program] = None


class EmulatedCuda:
    """``cupy.cuda`` on the processor.

    Parameters
    ----------
    mode : {"fast", "check"}
    total_bytes : int
        Device memory.
    how : dict
        ``schedule`` and ``seed`` of every launch.
    """

    def __init__(self, mode="fast", total_bytes=TOTAL_BYTES, **how):
        self.calls = Calls()
        self.runtime = Runtime(self.calls, total_bytes)
        self.driver = LowDriver(self.calls, self.runtime, mode, how)
        self.nvrtc = Nvrtc(self.calls)

    @property
    def used(self):
        """Bytes of device memory in use."""
        return sum(size for _, size in self.runtime.allocations.values())


class EmulatedDriver(Driver):
    """The real driver over the stand-in; the types of arguments are checked against the kernel's."""

    def launch(self, launch):
        module, name = self._driver.functions[launch.function]
        if launch.kinds != module.signature(name):
            raise TypeError(f"{name} takes {module.signature(name)}, got {launch.kinds}")
        super().launch(launch)


def emulated_ops(mode="fast", graphs=True, total_bytes=TOTAL_BYTES, **how):
    """(op set, stand-in): the CUDA op set on an emulated device."""
    cuda = EmulatedCuda(mode, total_bytes, **how)
    return CudaOps(EmulatedDriver(cuda), graphs, exact_memory=mode == "check"), cuda
