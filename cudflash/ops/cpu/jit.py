"""Kernels of the CPU op set: compiled by Numba once, loaded from disk afterwards.

A kernel is a Python function ``f(args, tid, n_threads)``: ``args`` is the address of an int64
block, the other two select its share of the work. It allocates nothing and raises nothing, so its
machine code needs neither the interpreter nor Numba. That code is kept as an object file; a warm
start puts it into memory (``link``) without importing Numba or, on most machines, LLVM.

The cache key covers the source text of this package, the versions of Numba and llvmlite, the
processor and the kernel's name. A changed kernel, library or machine never meets an old object.
"""

import os
import sys
import threading
from pathlib import Path

from cudflash.errors import DeviceError
from cudflash.ops import store
from cudflash.ops.cpu import link
from cudflash.ops.cpu.host import host, package_version

ISA_ENV = "CUDFLASH_CPU_ISA"

_lock = threading.RLock()
_registry = {}
_loaded = {}
_state = {}


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
        _state["cache"] = store.find_folder()
    return _state["cache"]


def _host():
    if "host" not in _state:
        _state["host"] = host(cache_dir())
    return _state["host"]


def _best_isa():
    if "isa" not in _state:
        found, best = _host(), "generic"
        if found.has("avx512f", "avx512bw", "avx512vl", "avx512vnni"):
            best = "avx512vnni"
        elif found.has("avx2"):
            best = "avx2"
        _state["isa"] = best
    return _state["isa"]


def _fingerprint():
    if "fingerprint" not in _state:
        sources = [
            part for path in sorted(Path(__file__).parent.glob("*.py"))
            for part in (path.name.encode(), path.read_bytes())]
        versions = [package_version("numba"), package_version("llvmlite"), sys.version]
        words = [*versions, *_host(), isa()]
        key = store.digest(*sources, *(word.encode() for word in words))
        _state["fingerprint"] = key.hex()[:24]
    return _state["fingerprint"]


def _load(kern):
    with _lock:
        if kern.name in _loaded:
            return _loaded[kern.name]
        code = _read_cached(kern.name)
        if code is None:
            store.announce(kern.name)
            code = _compile(kern)
            _write_cached(kern.name, code)
        _loaded[kern.name] = _link(kern.name, code)
        return _loaded[kern.name]


def _cache_file(name):
    folder = cache_dir()
    return None if folder is None else folder / _fingerprint() / f"{name}.o"


def _read_cached(name):
    path = _cache_file(name)
    return None if path is None else store.read(path)


def _write_cached(name, code):
    path = _cache_file(name)
    if path is not None and not store.write(path, code):
        _state["unsaved"] = True


def stored():
    """Whether every kernel compiled by this process was kept for the next one."""
    return cache_dir() is not None and not _state.get("unsaved", False)


def _compile(kern):
    """Object code with one external symbol, the kernel's name."""
    import llvmlite.binding as llvm
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
        if f.is_declaration and not f.name.startswith("llvm.")} - link.ALLOWED_SYMBOLS
    if foreign:
        raise DeviceError(
            f"kernel {kern.name} calls {', '.join(sorted(foreign))}, which compiled kernels "
            "cannot use; this is a bug in cudflash")
    return machine.emit_object(module)


def symbol(name):
    """Linker symbol of a kernel."""
    return f"cudflash_{name}"


def _target_machine():
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found = _host()
    return llvm.Target.from_triple(found.triple).create_target_machine(
        cpu=found.cpu, features=found.features,
        opt=3, reloc="default", codemodel="jitdefault", jit=True)


def _link(name, code):
    address = link.place(code, symbol(name))
    if address is None:
        address = _link_by_llvm(symbol(name), code)
    if not address:
        raise DeviceError(f"kernel {name} has no entry point after linking; delete {cache_dir()}")
    return address


def _link_by_llvm(name, code):
    import llvmlite.binding as llvm

    if "engine" not in _state:  # owns the code and lives as long as the process
        backing = llvm.parse_assembly("")
        backing.triple = _host().triple
        _state["engine"] = llvm.create_mcjit_compiler(backing, _target_machine())
    engine = _state["engine"]
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(name)
