"""What CuPy, the driver and the GPUs of this machine are like, each fault in one sentence.

Owns the probing; importing CuPy happens in here and may fail in any way. Must not choose a device.
Invariant: ``cupy_state`` never raises.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec

INSTALL = "pip install 'cudflash[cuda12]' (driver of the CUDA 12 line) or 'cudflash[cuda13]'"


OLDEST = 75  # compute capability that the kernels need, as 10 * major + minor


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows."""

    name: str
    capability: int  # 10 * major + minor
    total_bytes: int


@dataclass(frozen=True)
class CupyState:
    """Findings."""

    packages: dict  # distribution name -> version; more than one is a fault
    devices: tuple[Gpu, ...]
    state: str  # one sentence
    problems: list = field(default_factory=list)  # sentences; having no CuPy at all is none
    driver: str = ""  # CUDA version of the driver, "" where it is not known
    nvrtc: str = ""  # version of CUDA's compiler, "" where it cannot be loaded

    def unusable(self, index):
        """Why a device cannot run the kernels, "" if it can."""
        gpu = self.devices[index]
        if gpu.capability >= OLDEST:
            return ""
        return (
            f"{gpu.name} has compute capability {gpu.capability / 10:.1f}, expected at least "
            f"{OLDEST / 10:.1f} (Turing or later); use the CPU"
        )

    def to_dict(self):
        """Plain values, for JSON."""
        return {
            "packages": self.packages,
            "devices": [gpu.name for gpu in self.devices],
            "capabilities": [gpu.capability for gpu in self.devices],
            "driver": self.driver,
            "nvrtc": self.nvrtc,
            "state": self.state,
            "problems": list(self.problems),
        }


def cupy_state(scan_packages=True):
    """Probe CuPy.

    Parameters
    ----------
    scan_packages : bool
        Look through all installed packages even where no CuPy can be imported; False saves the time
        where that is all there is to say.

    Returns
    -------
    CupyState
    """
    if not scan_packages and find_spec("cupy") is None:
        return CupyState({}, (), f"CuPy is not installed; for a GPU: {INSTALL}")
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
    driver = _driver_version(cupy)
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
        found = tuple(_gpu(cupy, i) for i in range(n_devices))
    except Exception as err:  # noqa: BLE001  (CUDARuntimeError, and whatever a broken build raises)
        return _no_driver(packages, err, driver)
    if not found:
        sentence = (
            "CuPy works but the driver shows no GPU; check the hardware, and CUDA_VISIBLE_DEVICES "
            "if it is set"
        )
        return _fault(packages, sentence)
    names = ", ".join(gpu.name for gpu in found)
    nvrtc, problems = _nvrtc_version(cupy, found)
    return CupyState(packages, found, f"CuPy works with {names}", problems, driver, nvrtc)


def cupy_packages():
    """Installed CuPy distributions as ``{name: version}``."""
    from importlib.metadata import distributions  # here: with e-mail's parser, 1 % of a start

    found = {}
    for dist in distributions():
        name = (dist.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")):
            found[name] = dist.version
    return dict(sorted(found.items()))


def _gpu(cupy, index):
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    name = properties["name"]
    capability = 10 * properties.get("major", 0) + properties.get("minor", 0)
    return Gpu(
        name.decode() if isinstance(name, bytes) else str(name), capability,
        int(properties.get("totalGlobalMem", 0)),
    )  # fmt: skip


def _driver_version(cupy):
    """CUDA version that the driver supports, as "13.0"; "" where there is none to ask."""
    try:
        number = int(cupy.cuda.runtime.driverGetVersion())
    except Exception:  # noqa: BLE001  (a part of CuPy that is missing or broken is told elsewhere)
        return ""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _nvrtc_version(cupy, devices):
    """(version of the compiler, problems with it): absent, or too new or old for a card."""
    try:
        nvrtc = cupy.cuda.nvrtc
        version = "{}.{}".format(*nvrtc.getVersion())
        known = {int(n) // 10 for n in nvrtc.getSupportedArchs()}
    except Exception as err:  # noqa: BLE001  (the loader of a missing library has its own errors)
        text = " ".join(str(err).split())[:200]
        return "", [f"NVRTC, CUDA's compiler, cannot be loaded ({text}); {INSTALL}"]
    lost = [gpu for gpu in devices if gpu.capability >= OLDEST and gpu.capability // 10 not in known]
    return version, [
        f"the installed NVRTC {version} does not compile for {gpu.name} (compute capability "
        f"{gpu.capability / 10:.1f}); {INSTALL}, whichever knows the card" for gpu in lost
    ]  # fmt: skip


def _no_driver(packages, err, driver):
    text = " ".join(str(err).split())
    if "NoDevice" in text:
        sentence = f"CuPy works but the driver shows no GPU ({text}); check the hardware"
    elif "InsufficientDriver" in text and driver:
        named = " ".join(packages) or "cupy"
        sentence = (
            f"the NVIDIA driver supports CUDA {driver}, which is too old for {named} ({text}); "
            f"update the driver, or {INSTALL}"
        )
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
