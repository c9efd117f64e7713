"""`cudflash doctor`: every state a machine can be in, each named in one sentence."""

import subprocess
import sys

import pytest

from tests.cli.conftest import finish, program

# A stand-in for CuPy; %s is what getDeviceCount does.
FAKE_CUPY = """
class CUDARuntimeError(RuntimeError):
    pass

class cuda:
    class runtime:
        @staticmethod
        def getDeviceCount():
            %s
        @staticmethod
        def getDeviceProperties(index):
            return {"name": b"Test GPU"}
"""


def fake_cupy(folder, body, *packages):
    """Put a package and its metadata on a folder that PYTHONPATH then names."""
    if body is not None:
        (folder / "cupy").mkdir()
        (folder / "cupy" / "__init__.py").write_text(body)
    for name in packages:
        info = folder / f"{name.replace('-', '_')}-14.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.0.0\n")
    return {"PYTHONPATH": str(folder)}


def doctor(env, *args):
    """Findings of a machine with a changed environment."""
    done = finish(program("doctor", "--json", *args, env=env), timeout=300)
    assert "Traceback" not in done.err
    return done.code, done.json


def test_machine_without_cupy_runs_on_the_cpu(cli):
    """A missing GPU package reported as a fault, or the device without its reason."""
    done = cli("doctor", "--json")
    assert done.code == 0 and done.json["ok"] and done.json["cpu"]["works"]
    assert done.json["device"]["kind"] == "cpu" and done.json["device"]["reason"]
    assert done.json["cpu"]["isa"] in ("generic", "avx2", "avx512vnni")
    assert {"cudflash", "python", "numpy", "numba"} <= done.json["versions"].keys()
    text = cli("doctor")
    assert text.code == 0 and text.out.startswith(b"device") and b"kernel cache" in text.out


@pytest.mark.parametrize(
    "body, packages, words",
    [
        (FAKE_CUPY % "return 0", ["cupy-cuda12x"], "shows no GPU"),
        (
            FAKE_CUPY % "raise CUDARuntimeError('cudaErrorInsufficientDriver: too old')",
            ["cupy-cuda12x"],
            "no NVIDIA driver",
        ),
        (FAKE_CUPY % "raise CUDARuntimeError('cudaErrorNoDevice: x')", ["cupy-cuda13x"], "no GPU"),
        (FAKE_CUPY % "raise OSError('libcudart')", ["cupy-cuda13x"], "CUDA runtime fails"),
        ("raise ImportError('libcublas.so.12: no such file')", ["cupy-cuda12x"], "libcublas.so.12"),
        ("import no_such_part_of_cupy", ["cupy-cuda12x"], "reinstall cupy-cuda12x"),
        (None, ["cupy-cuda12x"], "reinstall cupy-cuda12x"),
        (None, ["cupy-cuda11x", "cupy-cuda12x"], "pip uninstall cupy-cuda11x cupy-cuda12x"),
    ],
    ids=["no device", "no driver", "driver sees none", "runtime", "broken", "incomplete",
         "metadata only", "two packages"],
)  # fmt: skip
def test_faults_of_cupy_are_one_sentence_each(tmp_path, body, packages, words):
    """An import error, a driver error or two packages that end in a traceback or in silence."""
    code, found = doctor(fake_cupy(tmp_path, body, *packages))
    assert code == 0, "the CPU still works"
    assert len(found["problems"]) == 1 and words in found["problems"][0]
    assert "\n" not in found["problems"][0] and found["gpu"]["problems"] == found["problems"]


def test_working_gpus_are_named(tmp_path):
    """A GPU that is there and not shown."""
    env = fake_cupy(tmp_path, FAKE_CUPY % "return 1", "cupy-cuda12x")
    assert doctor(env)[1]["gpu"]["devices"] == ["Test GPU"]


def test_device_that_is_missing_is_exit_6(cli):
    """A script that asks for a GPU and is told that all is well."""
    done = cli("doctor", "--device", "cuda")
    assert done.code == 6 and "cuda" in done.sentence
    assert cli("doctor", "--device", "cpu").code == 0


def test_two_packages_are_named_by_version_too(tmp_path):
    """--version is what bug reports carry: it must show both."""
    env = fake_cupy(tmp_path, None, "cupy-cuda11x", "cupy-cuda12x")
    out = finish(program("--version", env=env)).out.decode()
    assert "cupy-cuda11x 14.0.0, cupy-cuda12x 14.0.0" in out


def test_home_that_is_not_writable_is_no_fault():
    """A container without a home: kernels go to the temporary folder, and doctor says where."""
    code, found = doctor(
        {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/cache", "CUDFLASH_CACHE": ""}
    )
    assert code == 0 and found["cpu"]["works"]
    assert "/dev/null" not in found["cpu"]["cache_dir"] and found["problems"] == []


def test_cache_that_is_not_writable_is_told():
    """Kernels compiled at every start without a word about it."""
    code, found = doctor({"CUDFLASH_CACHE": "/dev/null/x"})
    assert code == 0 and found["cpu"]["cache_dir"] is None
    assert "CUDFLASH_CACHE" in found["problems"][0]


def test_first_compilation_is_told_once(tmp_path):
    """A minute of silence at the first start, or a message at every start."""
    env = {"CUDFLASH_CACHE": str(tmp_path / "kernels"), "CUDFLASH_CPU_ISA": "generic"}
    first = finish(program("doctor", env=env), timeout=300)
    assert "compiling kernels for this machine" in first.err
    assert f"(once, cached in {tmp_path}" in first.err
    assert "compil" not in finish(program("doctor", env=env)).err


def test_broken_numba_is_exit_6(tmp_path):
    """The CPU op set that cannot be imported: it must be named, not raise."""
    (tmp_path / "llvmlite").mkdir()
    (tmp_path / "llvmlite" / "__init__.py").write_text("raise OSError('libLLVM is missing')")
    code, found = doctor({"PYTHONPATH": str(tmp_path)})
    assert code == 6 and not found["ok"] and "libLLVM is missing" in found["problems"][0]


def test_isa_that_the_processor_lacks_is_a_sentence():
    """An environment variable that is wrong and silently ignored."""
    code, found = doctor({"CUDFLASH_CPU_ISA": "sse9"})
    assert code == 6 and "CUDFLASH_CPU_ISA" in found["problems"][0]


def test_probe_survives_whatever_importing_cupy_does(tmp_path):
    """A package that calls sys.exit() while it is imported."""
    env = fake_cupy(tmp_path, "raise SystemExit(3)", "cupy-cuda12x")
    code = "from cudflash.cupy_state import cupy_state; print(cupy_state().state)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "cannot be imported (SystemExit: 3)" in done.stdout


# A stand-in whose driver answers; %s is what getDeviceProperties returns, %s the compiler.
FAKE_CARD = """
class cuda:
    class runtime:
        @staticmethod
        def driverGetVersion():
            return %s
        @staticmethod
        def getDeviceCount():
            %s
        @staticmethod
        def getDeviceProperties(index):
            return {"name": b"Test GPU", "major": %s, "minor": %s, "multiProcessorCount": 1}
    class nvrtc:
        @staticmethod
        def getVersion():
            %s
        @staticmethod
        def getSupportedArchs():
            return [75, 80, 90]
"""


@pytest.mark.parametrize(
    "card, words",
    [
        ((11040, "raise RuntimeError('cudaErrorInsufficientDriver: x')", 9, 0, "return 13, 0"),
         "CUDA 11.4, which is too old"),
        ((13000, "return 1", 6, 1, "return 13, 0"), "compute capability 6.1"),
        ((13000, "return 1", 12, 0, "return 12, 4"), "does not compile for Test GPU"),
        ((13000, "return 1", 9, 0, "raise RuntimeError('libnvrtc.so.13')"), "libnvrtc.so.13"),
    ],
    ids=["old driver", "old card", "old compiler", "no compiler"],
)
def test_card_that_cannot_be_used_is_one_sentence(tmp_path, card, words):
    """Driver, card and compiler that do not go together: CUDA's own error, or the CPU in silence."""
    env = fake_cupy(tmp_path, FAKE_CARD % card, "cupy-cuda13x")
    done = finish(program("doctor", "--json", "--device", "cuda", env=env), timeout=300)
    assert done.code == 6 and "Traceback" not in done.err
    found = done.json["problems"]
    assert any(words in problem for problem in found) and not any("\n" in p for p in found)


def test_card_out_of_range_is_named(tmp_path):
    """cuda:3 on a machine with one card."""
    env = fake_cupy(tmp_path, FAKE_CARD % (13000, "return 1", 9, 0, "return 13, 0"), "cupy-cuda13x")
    done = finish(program("doctor", "--json", "--device", "cuda:3", env=env), timeout=300)
    assert done.code == 6 and "cuda:0 Test GPU" in done.json["problems"][0]
