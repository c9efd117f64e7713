"""Cubins: found, made, kept and refused; with a stand-in for NVRTC, and with NVRTC where it is."""

import os
import tempfile
import threading

import pytest

from cudflash.errors import DeviceError, UsageError
from cudflash.ops import store
from cudflash.ops.cuda import compiler, source
from cudflash.ops.cuda.compiler import Compiler, build_key
from scripts import ship_cubins


class Nvrtc:
    """Counts compilations; a cubin is its options."""

    def __init__(self, version=(13, 0), archs=(75, 80, 86, 89, 90, 100, 120)):
        self.version, self.archs, self.compiled, self.options = version, archs, 0, None
        self.lock = threading.Lock()

    def getVersion(self):
        return self.version

    def getSupportedArchs(self):
        return list(self.archs)

    def createProgram(self, text, name, headers, include_names):
        assert not headers and not include_names and "#include" not in text
        return 1

    def compileProgram(self, program, options):
        with self.lock:
            self.compiled += 1
        self.options = options

    def getCUBIN(self, program):
        return repr(self.options).encode()

    def getProgramLog(self, program):
        return "line 3: error"

    def destroyProgram(self, program):
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A kernel cache of the test's own."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv(store.CACHE_ENV, str(folder))
    monkeypatch.setattr(compiler, "_state", {"unsaved": False})
    return folder


def made(nvrtc, capability=90):
    return Compiler(nvrtc, capability, "Test GPU")


def cubins(folder):
    return list(folder.rglob("*.cubin"))


def test_second_start_compiles_nothing_and_options_are_the_contracts(cache):
    """A minute of compilation at every start; a build that contracts or keeps subnormals."""
    nvrtc = Nvrtc()
    first = made(nvrtc).cubin("rope", ("SPLIT_HALF=1",))
    assert {"-ftz=true", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-arch=sm_90",
            "-DSPLIT_HALF=1"} <= set(nvrtc.options)
    assert made(nvrtc).cubin("rope", ("SPLIT_HALF=1",)) == first and nvrtc.compiled == 1
    assert len(cubins(cache)) == 1 and compiler.stored()


@pytest.mark.parametrize("change", ["header", "options", "define", "arch", "version"])
def test_whatever_changes_a_cubin_changes_its_key(change, monkeypatch):
    """An edited .cuh that silently runs the old machine code."""
    nvrtc, capability, defines = Nvrtc(), 90, ("SPLIT_HALF=1",)
    made(nvrtc).cubin("rope", defines)
    if change == "header":
        text = source.spliced("rope").replace("fma_rn", "fma_rn ")
        assert "common/numerics.cuh" in text
        monkeypatch.setattr(compiler, "spliced", lambda name: text)
    elif change == "options":
        monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-lineinfo"))
    elif change == "define":
        defines = ("SPLIT_HALF=0",)
    elif change == "arch":
        capability = 80
    else:
        nvrtc.version = (13, 1)
    made(nvrtc, capability).cubin("rope", defines)
    assert nvrtc.compiled == 2


@pytest.mark.parametrize("damage", ["torn", "writable by all", "of a folder writable by all"])
def test_file_that_cannot_be_trusted_is_not_run(cache, damage):
    """Torn or planted machine code that is loaded into the card."""
    nvrtc = Nvrtc()
    code = made(nvrtc).cubin("argmax", ())
    (path,) = cubins(cache)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-3])
    elif damage == "writable by all":
        path.chmod(0o666)
    else:
        path.parent.chmod(0o777)
    assert made(nvrtc).cubin("argmax", ()) == code and nvrtc.compiled == 2


def test_cache_that_is_full_or_read_only_works_and_is_told(monkeypatch):
    """A full disk that ends the start, or makes every start slow without a word."""
    def full(*args, **how):
        raise OSError(28, "No space left on device")

    nvrtc = Nvrtc()
    monkeypatch.setattr(tempfile, "mkstemp", full)
    assert made(nvrtc).cubin("argmax", ()) == made(nvrtc).cubin("argmax", ())
    assert nvrtc.compiled == 2 and not compiler.stored()
    monkeypatch.setenv(store.CACHE_ENV, "/dev/null/x")
    made(nvrtc).cubin("argmax", ())
    assert nvrtc.compiled == 3 and not compiler.stored()


def test_two_starts_at_once_leave_one_sound_file(cache):
    """Two processes that write one file: half of each."""
    nvrtc = Nvrtc()
    workers = [threading.Thread(target=made(nvrtc).cubin, args=("top_k", ())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    (path,) = cubins(cache)
    assert store.read(path) is not None and not list(cache.rglob(".*tmp*"))
    assert os.stat(path).st_mode & 0o077 == 0


def test_shipped_cubin_needs_no_compiler(tmp_path, monkeypatch):
    """A wheel with cubins that still wants NVRTC; a damaged one that is run."""
    folder = tmp_path / "raw_kernels"
    place = folder / "cubin" / "sm_90"
    place.mkdir(parents=True)
    path = place / f"{build_key('argmax', (), 'sm_90')}.cubin"
    path.write_bytes(store.sealed(path.name, b"machine code"))
    monkeypatch.setattr(compiler, "files", lambda name: folder)
    assert made(None).cubin("argmax", ()) == b"machine code"
    path.write_bytes(b"x" * 40)
    nvrtc = Nvrtc()
    made(nvrtc).cubin("argmax", ())
    assert nvrtc.compiled == 1


def test_key_does_not_depend_on_the_order_of_defines():
    """A shipped cubin that is never found because the script writes its defines otherwise."""
    assert build_key("rope", ("A=1", "B=2"), "sm_90") == build_key("rope", ("B=2", "A=1"), "sm_90")


@pytest.mark.parametrize("capability, archs, words", [
    (61, (75, 90), "6.1"), (121, (75, 80, 90), "sm_121"), (75, (80, 90), "cudflash[cuda12]")])
def test_card_that_the_compiler_does_not_know_is_a_sentence(capability, archs, words):
    """NVRTC's 'invalid value for --gpu-architecture'."""
    with pytest.raises(DeviceError) as caught:
        made(Nvrtc(archs=archs), capability).cubin("argmax", ())
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_newer_card_of_a_known_generation_takes_the_nearest_code():
    """A card one step newer than the compiler that is refused for nothing."""
    nvrtc = Nvrtc(archs=(80, 86, 90))
    made(nvrtc, 89).cubin("argmax", ())
    assert "-arch=sm_86" in nvrtc.options


def test_compiler_that_is_missing_or_fails_is_a_sentence():
    """A loader's traceback; a log of a thousand lines."""
    class Missing(Nvrtc):
        def getVersion(self):
            raise RuntimeError("libnvrtc.so.13:\n cannot open")

    class Failing(Nvrtc):
        def compileProgram(self, program, options):
            raise RuntimeError("NVRTC_ERROR_COMPILATION (6)")

    for nvrtc, words in ((Missing(), "pip install"), (Failing(), "line 3: error")):
        with pytest.raises(DeviceError) as caught:
            made(nvrtc).cubin("argmax", ())
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_splice_keeps_lines_and_takes_each_header_once(monkeypatch):
    """Messages that name another line; a header twice; an include that the key does not cover."""
    text = source.spliced("matmul_q256")
    assert text.count('#line 1 "common/types.cuh"') == 1 and "#pragma once" not in text
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "matmul_q256(" in line)
    marker = max(i for i, line in enumerate(lines[:at]) if line.endswith('"matmul_q256.cu"'))
    first = int(lines[marker].split()[1])
    original = source._text("matmul_q256.cu").splitlines()
    assert original[first + at - marker - 2] == lines[at]
    with pytest.raises(UsageError, match="no kernel file nothing.cu"):
        source.spliced("nothing")
    with pytest.raises(UsageError, match="cuda_fp16"):
        source.splice("x.cu", "#include <cuda_fp16.h>\n")
    with pytest.raises(UsageError, match="inside #if"):
        source.splice("x.cu", '#if 1\n#include "common/types.cuh"\n#endif\n')


def test_real_nvrtc_takes_the_spliced_text():
    """What g++ and nvcc accept and NVRTC, which has no headers at all, does not."""
    cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed")
    try:
        version = cuda.nvrtc.getVersion()
    except Exception as err:  # noqa: BLE001
        pytest.skip(f"NVRTC cannot be loaded: {err}")
    assert version >= (12, 0)
    one = Compiler(cuda.nvrtc, 90, "no card")
    for file, defines in (("rms_norm", ()), ("matmul_q256", (
            "FORMAT=Q4_K", "PLANES=2", "TOKEN_TILES=1", "ROW_TILES=2", "ROW_GROUPS=1", "SLICES=8"))):
        assert one.cubin(file, defines)[:4] == b"\x7fELF"


def test_shipped_cubins_are_found_by_the_runtime(tmp_path, monkeypatch):
    """Cubins in the wheel under names that nothing looks for."""
    nvrtc, wanted = Nvrtc(), [("argmax", ()), ("rope", ("SPLIT_HALF=1",))]
    folder = tmp_path / "package"
    ship_cubins.ship(nvrtc, "90", folder / "cubin", wanted)
    monkeypatch.setattr(compiler, "files", lambda name: folder)
    for file, defines in wanted:
        assert b"sm_90" in made(None).cubin(file, defines)
    slices = {d for _, defines in ship_cubins.builds() for d in defines if d.startswith("SLICES")}
    assert slices == {"SLICES=8", "SLICES=16"}
