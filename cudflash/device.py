"""Which device runs the model, and why; how many threads the CPU uses."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cudflash.errors import DeviceError, OutOfMemoryError, UsageError

_CUDA = re.compile(r"cuda(?::(\d+))?")


@dataclass(frozen=True)
class Device:
    """The chosen device."""

    kind: str  # "cpu" or "cuda"
    name: str
    reason: str  # one sentence
    index: int = 0  # number among the CUDA devices


def check_device_name(wanted):
    """Raise UsageError unless ``wanted`` is auto, cpu, cuda or cuda:N."""
    if not isinstance(wanted, str) or not (
        wanted in ("auto", "cpu") or _CUDA.fullmatch(wanted)
    ):
        raise UsageError(
            f"device is {wanted!r}, expected auto, cpu, cuda or cuda:N; pass one of them")


def choose_device(wanted):
    """Choose a device.

    Parameters
    ----------
    wanted : {"auto", "cpu", "cuda", "cuda:N"}

    Returns
    -------
    Device

    Raises
    ------
    DeviceError
        If a device was asked for by name and cannot be used.
    UsageError
        For any other value.
    """
    check_device_name(wanted)
    if wanted == "cpu":
        return Device("cpu", cpu_name(), "asked for")
    from cudflash.cupy_state import cupy_state

    state = cupy_state(scan_packages=wanted != "auto")
    if wanted == "auto":
        fault = state.state if not state.devices else state.unusable(0)
        if fault:
            return Device("cpu", cpu_name(), fault)
        others = len(state.devices) - 1
        more = f", the first of {others + 1}" if others else ""
        return Device("cuda", state.devices[0].name, f"a usable GPU was found{more}")
    index = int(_CUDA.fullmatch(wanted)[1] or 0)
    if not state.devices:
        raise DeviceError(f"device '{wanted}' was asked for, but {state.state}")
    if index >= len(state.devices):
        names = ", ".join(f"cuda:{i} {d.name}" for i, d in enumerate(state.devices))
        raise DeviceError(f"device '{wanted}' was asked for, but there are only {names}")
    fault = state.unusable(index)
    if fault:
        raise DeviceError(f"device '{wanted}' was asked for, but {fault}")
    return Device("cuda", state.devices[index].name, "asked for", index)


def planned_kind(wanted):
    """Kind of device to plan for: a GPU that is asked for by name need not be there."""
    check_device_name(wanted)
    return "cuda" if wanted.startswith("cuda") else choose_device(wanted).kind


def load_ops(device, graphs=True):
    """Op set of a device.

    Parameters
    ----------
    device : Device
    graphs : bool
        On a GPU, replay recorded passes as CUDA graphs; it never changes a bit.
    """
    if device.kind == "cuda":
        from cudflash.ops.cuda import open_ops

        return open_ops(device.index, graphs)
    from cudflash.ops import cpu

    return cpu


def cpu_name():
    """Name of the processor, "CPU" where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or "CPU"


def physical_cores():
    """Physical cores this process may use: affinity, hyper-threads and container quota counted."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            cores.add(("unknown", cpu))
    return max(1, min(len(cores), _quota(len(cores))))


def _quota(default):
    """Whole cores the control group grants."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return default if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return default


def check_memory(n_bytes, available, where=""):
    """Refuse a plan that does not fit, before anything is allocated.

    Parameters
    ----------
    n_bytes : int
        What will be allocated; pages of mapped files are none of it.
    available : int or None
        Bytes; None where they are not known.
    where : str
        " on DEVICE", for the message.

    Raises
    ------
    OutOfMemoryError
        With both numbers.
    """
    if available is not None and n_bytes > available:
        raise OutOfMemoryError(
            f"model and context need {_size(n_bytes)}, {_size(available)} of memory are "
            f"available{where}; "
            "lower n_ctx, use a smaller model or free memory ('cudflash plan' shows what takes it)"
        )


def available_memory():
    """Bytes this process can still allocate: the least of what system, control group and process
    limits grant; None where none of them tells.
    """
    found = (_system_memory(), _group_memory(), _address_space())
    return min((n for n in found if n is not None), default=None)


def _system_memory():
    """Memory that is free, or would be after dropping caches, and free swap."""
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {line[0]: int(line[1]) for line in lines if len(line) > 1}
        return 1024 * (kib["MemAvailable:"] + kib.get("SwapFree:", 0))
    except (OSError, ValueError, KeyError):
        pass
    try:  # not on Linux: all there is, in use or not
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _group_memory():
    """What the control group leaves; file caches that count as used make room."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" is no number
        used = int((group / "memory.current").read_text())
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return None
    cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return max(0, limit - max(0, used - cached))


def _address_space():
    """What the limit of the process's address space leaves."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError, ValueError):
        return None


def _size(n_bytes):
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
