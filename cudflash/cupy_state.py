"""What CuPy, the driver and the GPUs of this machine are like, each fault in one sentence.

Owns the probing; importing CuPy happens in here and may fail in any way. Must not choose a device.
Invariant: ``cupy_state`` never raises.
"""

from dataclasses import dataclass, field
from importlib.metadata import distributions

INSTALL = "pip install 'cudflash[cuda12]' (driver of the CUDA 12 line) or 'cudflash[cuda13]'"


@dataclass(frozen=True)
class CupyState:
    """Findings."""

    packages: dict  # distribution name -> version; more than one is a fault
    devices: tuple[str, ...]  # names of usable GPUs
    state: str  # one sentence
    problems: list = field(default_factory=list)  # sentences; having no CuPy at all is none

    def to_dict(self):
        """Plain values, for JSON."""
        return {
            "packages": self.packages,
            "devices": list(self.devices),
            "state": self.state,
            "problems": list(self.problems),
        }


def cupy_state():
    """Probe CuPy.

    Returns
    -------
    CupyState
    """
    packages = cupy_packages()
    if len(packages) > 1:
        named = " and ".join(f"{name} {version}" for name, version in packages.items())
        fix = f"remove all of them (pip uninstall {' '.join(packages)}) and install one: {INSTALL}"
        return _fault(packages, f"{len(packages)} CuPy packages are installed, {named}; {fix}")
    try:
        import cupy
    except ModuleNotFoundError as err:
        if err.name == "cupy" and not packages:
            return CupyState({}, (), f"CuPy is not installed; for a GPU: {INSTALL}")
        return _broken(packages, err)
    except BaseException as err:  # a broken binary package fails with whatever it likes
        if isinstance(err, KeyboardInterrupt):
            raise
        return _broken(packages, err)
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
        names = tuple(_device_name(cupy, i) for i in range(n_devices))
    except Exception as err:  # noqa: BLE001  (CUDARuntimeError, and whatever a broken build raises)
        return _no_driver(packages, err)
    if not names:
        sentence = (
            "CuPy works but the driver shows no GPU; check the hardware, and CUDA_VISIBLE_DEVICES "
            "if it is set"
        )
        return _fault(packages, sentence)
    return CupyState(packages, names, f"CuPy works with {', '.join(names)}")


def cupy_packages():
    """Installed CuPy distributions as ``{name: version}``."""
    found = {}
    for dist in distributions():
        name = (dist.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")):
            found[name] = dist.version
    return dict(sorted(found.items()))


def _device_name(cupy, index):
    name = cupy.cuda.runtime.getDeviceProperties(index)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def _no_driver(packages, err):
    text = " ".join(str(err).split())
    if "NoDevice" in text:
        sentence = f"CuPy works but the driver shows no GPU ({text}); check the hardware"
    elif "InsufficientDriver" in text:
        sentence = (
            f"CuPy is installed but there is no NVIDIA driver, or one too old for it ({text}); "
            "install or update the driver, or use the CPU"
        )
    else:
        sentence = f"CuPy is installed but the CUDA runtime fails ({text}); check the driver"
    return _fault(packages, sentence)


def _broken(packages, err):
    named = " ".join(packages) or "cupy"
    text = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
    sentence = f"CuPy is installed but cannot be imported ({text}); reinstall {named}"
    return _fault(packages, sentence)


def _fault(packages, sentence):
    return CupyState(packages, (), sentence, [sentence])
