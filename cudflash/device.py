"""Which device runs the model, and why; how many threads the CPU uses."""

import os
from dataclasses import dataclass
from pathlib import Path

from cudflash.errors import DeviceError, UsageError


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
    if wanted not in ("auto", "cpu", "cuda"):
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
