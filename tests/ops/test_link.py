"""Placing kernels without LLVM: the same code runs, and whatever is not understood is left alone."""

import platform
import struct
from pathlib import Path

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.ops import store
from cudflash.ops.cpu import host, jit, link

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux",
    reason="other machines use LLVM's linker",
)


@pytest.fixture(scope="module")
def scale():
    """Object file of the kernel behind `ops.scale`."""
    x = np.ones((1, 64), np.float32)
    ops.scale(x, x, 2.0)
    code = jit._read_cached("scale")
    assert code is not None
    return code


@pytest.mark.parametrize("name", ["scale", "run_program", "rms_norm", "argmax_spans"])
def test_kernels_need_no_other_linker(name):
    """Catches a compiler whose files we stop understanding: every start would load LLVM again."""
    x = np.ones((2, 64), np.float32)
    ops.scale(x, x, 2.0)
    ops.rms_norm(x, x, np.ones(64, np.float32), 1e-6)
    ops.argmax(np.zeros(2, np.int32), x)
    code = jit._read_cached(name)
    assert code is not None and link.place(code, jit.symbol(name))


def test_both_linkers_give_the_same_results(monkeypatch):
    """Catches an address that is filled in wrongly: constants, tables, calls of the C library."""
    rng = np.random.default_rng(5)
    x, gate = (rng.standard_normal((3, 96)).astype(np.float32) for _ in range(2))
    results = []
    for place in (link.place, lambda code, name: None):
        monkeypatch.setattr(link, "place", place)
        monkeypatch.setattr(jit, "_loaded", {})
        out, norm = np.empty_like(x), np.empty_like(x)
        ops.swiglu(out, x, gate)
        ops.rms_norm(norm, x, None, 1e-6)
        ids = np.zeros(3, np.int32)
        ops.argmax(ids, out)
        results.append((out.view(np.int32), norm.view(np.int32), ids))
        assert jit._loaded
    for ours, llvms in zip(*results):
        np.testing.assert_array_equal(ours, llvms)


def changed(code, offset, layout, value):
    """The file with one field replaced."""
    code = bytearray(code)
    struct.pack_into(layout, code, offset, value)
    return bytes(code)


def section(code, kind):
    """Offset of the first section header of a type."""
    first, count = struct.unpack_from("<Q", code, 40)[0], struct.unpack_from("<H", code, 60)[0]
    for offset in range(first, first + count * 64, 64):
        if struct.unpack_from("<I", code, offset + 4)[0] == kind:
            return offset
    raise AssertionError(f"no section of type {kind}")


@pytest.mark.parametrize("what", [
    "not ELF", "another machine", "linked", "cut short", "writable data", "thread data", "no symbols",
    "another relocation",
])  # fmt: skip
def test_a_file_that_is_not_understood_is_left_to_llvm(scale, what):
    """Catches a guess: code placed with a relocation, or data, that this linker does not know."""
    text = next(
        offset for offset in range(struct.unpack_from("<Q", scale, 40)[0], len(scale), 64)
        if struct.unpack_from("<I", scale, offset + 4)[0] == 1
        and struct.unpack_from("<Q", scale, offset + 8)[0] & 4
        and struct.unpack_from("<Q", scale, offset + 32)[0]
    )
    flags = struct.unpack_from("<Q", scale, text + 8)[0]
    if what == "not ELF":
        code = b"\0" + scale[1:]
    elif what == "another machine":
        code = changed(scale, 18, "<H", 183)
    elif what == "linked":
        code = changed(scale, 16, "<H", 3)
    elif what == "cut short":
        code = scale[: len(scale) // 2]
    elif what == "writable data":
        code = changed(scale, text + 8, "<Q", flags | 1)
    elif what == "thread data":
        code = changed(scale, text + 8, "<Q", flags | 0x400)
    elif what == "no symbols":
        code = changed(scale, section(scale, 2) + 4, "<I", 0)
    else:
        code = jit._read_cached("run_program")
        relocations = struct.unpack_from("<Q", code, section(code, 4) + 24)[0]
        info = struct.unpack_from("<Q", code, relocations + 8)[0]
        code = changed(code, relocations + 8, "<Q", info | 2)
    assert link.place(code, jit.symbol("run_program" if "relocation" in what else "scale")) is None


def test_a_function_outside_the_list_is_not_called():
    """Catches a kernel that gets the address of any function whose name stands in its file."""
    code = jit._read_cached("run_program")
    assert code.count(b"syscall\0") == 1
    other = code.replace(b"syscall\0", b"mprotect"[:7] + b"\0")
    assert link.place(other, jit.symbol("run_program")) is None


def test_no_memory_of_kernels_is_writable(scale):
    """Catches code that a stray store could change."""
    address = link.place(scale, jit.symbol("scale"))
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            assert rights.startswith("r-x")
            return
    raise AssertionError("not mapped")


def test_the_machine_is_described_as_llvm_does(tmp_path):
    """Catches a description that is kept for another processor, or not kept at all."""
    asked = host.ask_llvm()
    assert host.host(None) == asked and host.host(tmp_path) == asked
    (path,) = tmp_path.iterdir()
    assert store.read(path) is not None
    path.write_bytes(store.sealed(path.name, b"triple\ncpu\n+avx2,-fma"))
    again = host.host(tmp_path)
    assert again == host.Host("triple", "cpu", "+avx2,-fma")
    assert again.has("avx2") and not again.has("fma") and not again.has("avx2", "fma")


@pytest.mark.parametrize("damage", ["torn", "open to all"])
def test_a_description_that_cannot_be_trusted_is_asked_for_again(tmp_path, damage):
    """Catches kernels compiled for a processor that somebody else wrote down."""
    host.host(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(store.sealed(path.name, b"triple\ncpu\n+avx2"))
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.chmod(0o666)
    assert host.host(tmp_path) == host.ask_llvm()


def test_another_processor_or_llvm_is_another_description(monkeypatch, tmp_path):
    """Catches a home directory on two machines, or a new LLVM, with the old one's description."""
    host.host(tmp_path)
    lines = host._first_processor(Path("/proc/cpuinfo").read_text().splitlines())
    assert any(line.startswith("flags") for line in lines)
    assert not any("MHz" in line for line in lines)  # changes all the time
    monkeypatch.setattr(host, "_first_processor", lambda file: [*lines, "flags: amx_tile"])
    host.host(tmp_path)
    monkeypatch.setattr(host, "package_version", lambda name: "99")
    host.host(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_systems_that_tell_nothing_of_the_processor_ask_llvm(monkeypatch, tmp_path):
    """Catches one description for all processors of a system without /proc/cpuinfo."""
    monkeypatch.setattr(host, "_first_processor", lambda file: ["model: 2"])
    assert host.host(tmp_path) == host.ask_llvm() and not list(tmp_path.iterdir())
