"""Kernels of the CPU op set: compiled by Numba once, loaded from disk afterwards.

A kernel is a Python function ``f(args, tid, n_threads)``: ``args`` is the address of an int64
block, the other two select its share of the work. It allocates nothing and raises nothing, so its
machine code needs neither the interpreter nor Numba. That code is kept as an object file; a warm
start loads it through llvmlite alone, which saves importing and starting Numba.

The cache key covers the source text of this package, the versions of Numba and llvmlite, the
processor and the kernel's name. A changed kernel, library or machine never meets an old object.
"""

import contextlib
import hashlib
import os
import stat
import sys
import threading
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from cudflash.errors import DeviceError

CACHE_ENV = "CUDFLASH_CACHE"
ISA_ENV = "CUDFLASH_CPU_ISA"

# What compiled kernels may call; anything else would need a runtime that is not loaded.
_ALLOWED_SYMBOLS = {"memset", "memcpy", "memmove", "usleep", "syscall", "fmaf", "rintf", "sqrtf"}

_lock = threading.RLock()
_registry = {}
_loaded = {}
_listeners = []
_state = {"initialised": False}


class Kernel:
    """One compiled function; ``address`` is its entry point, compiled or loaded on first use."""

    def __init__(self, name, build):
        self.name = name
        self._build = build

    @property
    def address(self):
        found = _loaded.get(self.name)
        return found if found is not None else _load(self)


def kernel(function):
    """Register ``function(args, tid, n_threads)`` as a kernel under its own name."""
    return register(function.__name__, lambda: function)


def register(name, build):
    """Register a kernel whose Python function is made by ``build()`` only if it must compile."""
    found = _registry.get(name)
    if found is None:
        found = _registry[name] = Kernel(name, build)
    return found


def on_compile(listener):
    """Call ``listener(kernel_name)`` before each real compilation (cache hits are silent)."""
    _listeners.append(listener)


def isa():
    """Name of the integer-dot path in use: ``avx512vnni``, ``avx2`` or ``generic``."""
    wanted = os.environ.get(ISA_ENV)
    best = _best_isa()
    if wanted is None or wanted == "":
        return best
    order = ["generic", "avx2", "avx512vnni"]
    if wanted not in order:
        raise DeviceError(
            f"environment variable {ISA_ENV} is {wanted!r}, expected one of {', '.join(order)}")
    if order.index(wanted) > order.index(best):
        raise DeviceError(
            f"environment variable {ISA_ENV} asks for {wanted!r}, but this processor "
            f"offers {best!r} at most; unset it")
    return wanted


def cache_dir():
    """Folder of compiled kernels, or None when nothing is writable (then nothing is kept)."""
    if "cache" not in _state:
        _state["cache"] = _find_cache_dir()
    return _state["cache"]


def _best_isa():
    if "isa" not in _state:
        features = llvm.get_host_cpu_features()
        if all(features.get(f) for f in ("avx512f", "avx512bw", "avx512vl", "avx512vnni")):
            _state["isa"] = "avx512vnni"
        elif features.get("avx2"):
            _state["isa"] = "avx2"
        else:
            _state["isa"] = "generic"
    return _state["isa"]


def _find_cache_dir():
    tried = []
    if os.environ.get(CACHE_ENV):
        tried.append(Path(os.environ[CACHE_ENV]))
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        if base:
            tried.append(Path(base) / "cudflash")
        try:
            tried.append(Path.home() / ".cache" / "cudflash")
        except RuntimeError:
            pass
        tried.append(None)
    for folder in tried:
        try:
            folder = folder or _temporary_cache()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    return None


def _temporary_cache():
    """Folder for a user without a home, or with one that cannot be written."""
    import tempfile  # here: it takes 2 % of a warm start

    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"cudflash-cache-{user}"


def _is_ours(path):
    """Whether only this user can put something there: what lies in the cache is executed."""
    found = os.lstat(path)
    if not hasattr(os, "getuid"):
        return True
    closed = found.st_mode & 0o022 == 0
    return found.st_uid == os.getuid() and closed and not stat.S_ISLNK(found.st_mode)


def _fingerprint():
    if "fingerprint" not in _state:
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        features = llvm.get_host_cpu_features().flatten()
        for part in (_numba_version(), llvmlite.__version__, llvm.get_process_triple(),
                     llvm.get_host_cpu_name(), features, isa(), sys.version):
            digest.update(part.encode() + b"\0")
        _state["fingerprint"] = digest.hexdigest()[:24]
    return _state["fingerprint"]


def _numba_version():
    """Text of Numba's version file, read without importing Numba."""
    from importlib.util import find_spec

    found = find_spec("numba")
    if found is None or found.origin is None:
        return "absent"
    return Path(found.origin).with_name("_version.py").read_text(encoding="utf-8")


def _load(kern):
    with _lock:
        if kern.name in _loaded:
            return _loaded[kern.name]
        _initialise()
        code = _read_cached(kern.name)
        if code is None:
            for listener in _listeners:
                listener(kern.name)
            code = _compile(kern)
            _write_cached(kern.name, code)
        _loaded[kern.name] = _link(kern.name, code)
        return _loaded[kern.name]


def _initialise():
    if not _state["initialised"]:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        _state["initialised"] = True


def _cache_file(name):
    folder = cache_dir()
    return None if folder is None else folder / _fingerprint() / f"{name}.o"


def _read_cached(name):
    path = _cache_file(name)
    try:
        if path is None or not _is_ours(path.parent) or not _is_ours(path):
            return None
        blob = path.read_bytes()
    except OSError:
        return None
    digest, code = blob[:32], blob[32:]
    # A torn or damaged object is compiled again instead of being executed.
    return code if hashlib.sha256(code).digest() == digest else None


def _write_cached(name, code):
    path = _cache_file(name)
    if path is None:
        return
    import tempfile

    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(path.parent):
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{name}")
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)  # two processes may compile at once; both write the same
        temporary = None
    except OSError:
        _state["unsaved"] = True
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def stored():
    """Whether every kernel compiled by this process was kept for the next one."""
    return cache_dir() is not None and not _state.get("unsaved", False)


def _compile(kern):
    """Object code with one external symbol, the kernel's name."""
    from numba import njit, void
    from numba.core import types

    signature = void(types.int64, types.int64, types.int64)
    dispatcher = njit(signature, error_model="numpy", boundscheck=False,
                      no_cpython_wrapper=True, no_cfunc_wrapper=True)(kern._build())
    result = next(iter(dispatcher.overloads.values()))
    native = result.fndesc.llvm_func_name
    module = llvm.parse_assembly(str(result.library.get_llvm_str()))
    for function in module.functions:
        if not function.is_declaration:
            function.linkage = "external" if function.name == native else "internal"
    module.get_function(native).name = symbol(kern.name)
    machine = _target_machine()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    manager = llvm.create_new_module_pass_manager()
    manager.add_global_dead_code_eliminate_pass()
    manager.run(module, builder)
    foreign = {
        f.name for f in module.functions
        if f.is_declaration and not f.name.startswith("llvm.")} - _ALLOWED_SYMBOLS
    if foreign:
        raise DeviceError(
            f"kernel {kern.name} calls {', '.join(sorted(foreign))}, which compiled kernels "
            "cannot use; this is a bug in cudflash")
    return machine.emit_object(module)


def symbol(name):
    """Linker symbol of a kernel."""
    return f"cudflash_{name}"


def _target_machine():
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(),
        opt=3, reloc="default", codemodel="jitdefault", jit=True)


def _link(name, code):
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol(name))
    if not address:
        raise DeviceError(f"kernel {name} has no entry point after linking; delete {cache_dir()}")
    return address


def _engine():
    """The linker of this process; it owns the code and lives as long as the process."""
    if "engine" not in _state:
        backing = llvm.parse_assembly("")
        backing.triple = llvm.get_process_triple()
        _state["engine"] = llvm.create_mcjit_compiler(backing, _target_machine())
    return _state["engine"]
