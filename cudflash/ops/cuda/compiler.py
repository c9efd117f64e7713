"""Cubins of the kernels: shipped with the package, kept from an earlier start, or made by NVRTC.

Owns options, keys and the cache. The key covers the spliced text, the defines, the options and the
architecture; cubins that NVRTC made here are kept apart by its version. A second start compiles
nothing.
"""

import hashlib
import threading
from importlib.resources import files

from cudflash.errors import DeviceError
from cudflash.ops import store
from cudflash.ops.cuda.source import spliced

OPTIONS = (
    "-std=c++17",
    "-ftz=true",  # CuPy compiles so and cannot be told otherwise; the contract flushes too
    "-fmad=false",  # no contraction; fused operations are written as such
    "-prec-div=true",  # IEEE division
    "-prec-sqrt=true",  # IEEE square root
)
OLDEST = 75  # compute capability: the first with int8 tensor cores
INSTALL = "install the CUDA parts with pip install 'cudflash[cuda13]' or 'cudflash[cuda12]'"

_state = {"unsaved": False}


def stored():
    """Whether every cubin made by this process was kept for the next one."""
    return not _state["unsaved"]


def build_name(file, defines):
    """Short name of a build, for people and file names."""
    return "-".join([file, *(d.split("=")[-1] for d in defines)]).lower()


def build_key(file, defines, arch):
    """Hex digest of everything but the compiler's version that decides a cubin's bytes."""
    digest = hashlib.sha256()
    for part in (spliced(file), *sorted(defines), "|", *OPTIONS, arch):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


class Compiler:
    """Finds or makes cubins for one architecture.

    Parameters
    ----------
    nvrtc : module
        ``cupy.cuda.nvrtc`` or a stand-in; touched only when something must be compiled.
    capability : int
        10 * major + minor of the device.
    device_name : str
        For messages.

    Attributes
    ----------
    arch : str
        As ``sm_90``.
    """

    def __init__(self, nvrtc, capability, device_name):
        if capability < OLDEST:
            raise DeviceError(
                f"{device_name} has compute capability {capability / 10:.1f}, expected at least "
                f"{OLDEST / 10:.1f} (Turing or later); use device 'cpu'")
        self._nvrtc, self._name = nvrtc, device_name
        self._capability = capability
        self.arch = f"sm_{capability}"
        self._folder = None
        self._looked = False
        self._lock = threading.Lock()

    def cubin(self, file, defines):
        """Machine code of one build.

        Parameters
        ----------
        file : str
            Kernel file without its ending.
        defines : tuple of str
            ``"NAME=value"``.

        Returns
        -------
        bytes
        """
        with self._lock:
            key = build_key(file, defines, self.arch)
            found = self._shipped(key)
            if found is not None:
                return found
            path = self._path(build_name(file, defines), key)
            found = None if path is None else store.read(path)
            if found is not None:
                return found
            store.announce(build_name(file, defines))
            code = self.compile(file, defines)
            if path is None or not store.write(path, code):
                _state["unsaved"] = True
            return code

    def _shipped(self, key):
        """Cubin from the package's own folder, if this wheel carries one."""
        path = files("cudflash.raw_kernels") / "cubin" / self.arch / f"{key}.cubin"
        try:
            return store.unsealed(path.name, path.read_bytes())
        except OSError:
            return None

    def _path(self, name, key):
        if not self._looked:
            self._looked, self._folder = True, store.find_folder()
        if self._folder is None:
            return None
        major, minor = self._version()
        folder = self._folder / "cuda" / f"{self.arch}-nvrtc-{major}.{minor}"
        return folder / f"{name[:80]}-{key}.cubin"

    def _version(self):
        try:
            return self._nvrtc.getVersion()
        except Exception as err:  # noqa: BLE001  (the loader of a missing library has its own errors)
            raise DeviceError(
                f"NVRTC, CUDA's compiler, cannot be loaded ({_one_line(err)}); {INSTALL}") from None

    def compile(self, file, defines):
        """Machine code from NVRTC, whatever is kept."""
        name = build_name(file, defines)
        target = self._target()
        options = (*OPTIONS, f"-arch={target}", *(f"-D{d}" for d in defines))
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(spliced(file), f"{file}.cu", (), ())
        try:
            try:
                nvrtc.compileProgram(program, options)
            except Exception as err:  # noqa: BLE001  (NVRTCError of whatever build is installed)
                log = nvrtc.getProgramLog(program)
                raise DeviceError(
                    f"kernel {name} does not compile for {target} ({_one_line(err)}): "
                    f"{_one_line(log)[:800]}; this is a bug in cudflash, or NVRTC is older than "
                    f"12.0: {INSTALL}") from None
            return bytes(nvrtc.getCUBIN(program))
        finally:
            nvrtc.destroyProgram(program)

    def _target(self):
        """Architecture to compile for: the device's, or the nearest older one of its generation."""
        known = sorted(int(n) for n in self._nvrtc.getSupportedArchs())
        if self._capability in known:
            return self.arch
        same = [n for n in known if n // 10 == self._capability // 10 and n < self._capability]
        if same:
            return f"sm_{same[-1]}"
        major, minor = self._version()
        raise DeviceError(
            f"{self._name} is {self.arch}, but the installed NVRTC {major}.{minor} compiles for "
            f"sm_{known[0]} to sm_{known[-1]}; install the other CUDA line with pip install "
            "'cudflash[cuda12]' (older cards) or 'cudflash[cuda13]' (newer cards)")


def _one_line(text):
    return " ".join(str(text).split())
