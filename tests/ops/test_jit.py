"""The store of compiled kernels: kept, checked, and never in the way."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from cudflash.errors import DeviceError
from cudflash.ops import store
from cudflash.ops.cpu import jit

ROOT = Path(__file__).resolve().parents[2]

# Runs one op, prints the kernels that were compiled and whether Numba or LLVM was imported.
PROBE = """
import sys, numpy as np
from cudflash.ops import cpu as ops
from cudflash.ops import store
from cudflash.ops.cpu import jit
compiled = []
store.on_compile(compiled.append)
ops.set_threads(1)
x = np.ones((1, 64), np.float32)
ops.scale(x, x, 3.0)
loaded = "numba" in sys.modules or "llvmlite" in sys.modules
print(float(x.sum()), len(compiled), loaded, jit.cache_dir())
"""


def probe(**env):
    """Run PROBE in a fresh process; returns (sum, compiled, compiler imported, cache folder)."""
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **env}, check=True)
    total, compiled, loaded, folder = done.stdout.split(maxsplit=3)
    return float(total), int(compiled), loaded == "True", folder.strip()


def test_a_second_start_compiles_nothing_and_loads_no_compiler(tmp_path):
    """Catches a cache key that changes from start to start, and Numba or LLVM in the warm path."""
    cold = probe(CUDFLASH_CACHE=str(tmp_path))
    assert cold[0] == 192 and cold[1] > 0
    warm = probe(CUDFLASH_CACHE=str(tmp_path))
    assert warm == (192.0, 0, False, str(tmp_path))


def test_a_damaged_object_is_compiled_again_and_replaced(tmp_path):
    """Catches the execution of a torn file (a full disk, a killed process)."""
    probe(CUDFLASH_CACHE=str(tmp_path))
    objects = sorted(tmp_path.rglob("*.o"))
    assert objects
    for path in objects:
        path.write_bytes(path.read_bytes()[:-7] + b"damaged")
    again = probe(CUDFLASH_CACHE=str(tmp_path))
    assert again[0] == 192 and again[1] == len(objects)
    assert probe(CUDFLASH_CACHE=str(tmp_path))[1] == 0


def test_an_object_in_another_ones_place_is_compiled_again(tmp_path):
    """Catches a sound file under the wrong name, and a pipe that a start would wait for."""
    probe(CUDFLASH_CACHE=str(tmp_path))
    first, second, *rest = sorted(tmp_path.rglob("*.o"))
    second.write_bytes(first.read_bytes())
    for path in tmp_path.glob("host-*"):
        path.write_bytes(first.read_bytes())
    if rest and hasattr(os, "mkfifo"):
        rest[0].unlink()
        os.mkfifo(rest[0], 0o600)
    again = probe(CUDFLASH_CACHE=str(tmp_path))
    assert again[0] == 192 and again[1] == 1 + bool(rest)
    assert probe(CUDFLASH_CACHE=str(tmp_path))[1] == 0


def test_without_a_writable_folder_kernels_work_and_nothing_is_kept(monkeypatch, tmp_path):
    """Catches a start that fails, or a folder made elsewhere, when nothing can be written."""
    monkeypatch.setattr(jit, "_state", {})
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv(store.CACHE_ENV, str(blocked / "cache"))
    assert jit.cache_dir() is None
    assert jit._cache_file("k") is None
    jit._write_cached("k", b"code")
    assert jit._read_cached("k") is None


def test_the_temporary_folder_is_used_when_home_is_not_writable(monkeypatch, tmp_path):
    """Catches a read-only or missing home that switches the cache off (numba #5566)."""
    monkeypatch.setattr(jit, "_state", {})
    monkeypatch.delenv(store.CACHE_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert jit.cache_dir().parent == tmp_path


def foreign_folder(path, kind):
    """A cache folder that somebody else could fill."""
    if kind == "symlink":
        (path.parent / "elsewhere").mkdir()
        path.symlink_to(path.parent / "elsewhere")
        return
    path.mkdir()
    if kind == "open to all":
        path.chmod(0o1777)
    else:
        os.chown(path, 12345, 12345)


@pytest.mark.parametrize("kind", ["another user's", "symlink", "open to all"])
def test_a_folder_others_can_fill_is_not_used(monkeypatch, tmp_path, kind):
    """Catches the execution of code that another user put into a shared folder."""
    if kind == "another user's" and os.getuid() != 0:
        pytest.skip("needs chown")
    monkeypatch.setattr(jit, "_state", {})
    foreign_folder(tmp_path / "cache", kind)
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "cache"))
    assert jit.cache_dir() is None


@pytest.mark.parametrize("kind", ["symlink", "open to all"])
@pytest.mark.parametrize("level", ["folder", "object"])
def test_an_object_others_can_write_is_not_executed(monkeypatch, tmp_path, kind, level):
    """Catches a check of the top folder alone: its subfolder and the objects count as well."""
    monkeypatch.setattr(jit, "_state", {})
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "cache"))
    jit._write_cached("k", b"code")
    assert jit._read_cached("k") == b"code" and jit.stored()
    path = jit._cache_file("k")
    changed = path if level == "object" else path.parent
    if kind == "open to all":
        changed.chmod(0o777)
    else:
        moved = tmp_path / "moved"
        changed.rename(moved)
        changed.symlink_to(moved)
    assert jit._read_cached("k") is None


def test_a_failed_write_leaves_nothing_behind_and_is_known(monkeypatch, tmp_path):
    """Catches litter on a full disk, and a claim that kernels were kept."""
    monkeypatch.setattr(jit, "_state", {})
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    jit._write_cached("k", b"code")
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not jit.stored()


def test_the_folder_is_closed_to_others(tmp_path):
    """Catches a cache that others may write into."""
    probe(CUDFLASH_CACHE=str(tmp_path / "made"))
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) & 0o022 == 0


def test_two_cold_starts_at_once_agree(tmp_path):
    """Catches two processes that tear each other's objects (cupy #9463)."""
    env = {**os.environ, "CUDFLASH_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", PROBE], cwd=ROOT, env=env,
                             stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and out.startswith("192.0")
    assert probe(CUDFLASH_CACHE=str(tmp_path))[1] == 0
    assert not list(tmp_path.rglob(".*"))


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    """Catches a misspelt setting that silently measures another path."""
    monkeypatch.setenv(jit.ISA_ENV, "sse9")
    with pytest.raises(DeviceError, match="expected one of generic, avx2, avx512vnni"):
        jit.isa()


def test_a_kernel_that_needs_the_interpreter_is_refused():
    """Catches a kernel that allocates: its object would jump into a runtime that is not there."""

    def build():
        def allocates(args, tid, n_threads):
            np.zeros(n_threads)[0] = tid

        return allocates

    with pytest.raises(DeviceError, match="which compiled kernels cannot use"):
        _ = jit.register("test_allocates", build).address
