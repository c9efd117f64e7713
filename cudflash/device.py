"""Which device runs the model, and why; how many threads the CPU uses."""

import os
from dataclasses import dataclass
from pathlib import Path

from cudflash.errors import DeviceError, OutOfMemoryError, UsageError


@dataclass(frozen=True)
class Device:
    """The chosen device."""

    kind: str  # "cpu" or "cuda"
    name: str
    reason: str  # one sentence


def choose_device(wanted):
    """Choose a device.

    Parameters
    ----------
    wanted : {"auto", "cpu", "cuda"}

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
    if not isinstance(wanted, str) or wanted not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {wanted!r}, expected auto, cpu or cuda; pass one of them")
    missing = "this version has no CUDA op set"
    if wanted == "cuda":
        raise DeviceError(f"device 'cuda' was asked for, but {missing}; use device 'cpu' or 'auto'")
    reason = "asked for" if wanted == "cpu" else missing
    return Device("cpu", cpu_name(), reason)


def load_ops(device):
    """Import the op set of a device."""
    if device.kind != "cpu":
        raise DeviceError(f"device {device.kind!r} has no op set in this version; use 'cpu'")
    from cudflash.ops import cpu

    return cpu


def kernel_path(device):
    """Name of the variant of the kernels in use; it never changes a bit."""
    if device.kind != "cpu":
        raise DeviceError(f"device {device.kind!r} has no op set in this version; use 'cpu'")
    from cudflash.ops.cpu import jit

    return jit.isa()


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


def check_memory(n_bytes):
    """Refuse a plan that does not fit, before anything is allocated.

    Parameters
    ----------
    n_bytes : int
        What will be allocated; pages of mapped files are none of it.

    Raises
    ------
    OutOfMemoryError
        With both numbers.
    """
    available = available_memory()
    if available is not None and n_bytes > available:
        raise OutOfMemoryError(
            f"model and context need {_size(n_bytes)}, {_size(available)} of memory are available; "
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
