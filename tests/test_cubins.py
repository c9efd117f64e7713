"""The kernels compile for a real architecture, use no local memory, and the gate would notice."""

import copy
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cudflash.ops.cuda.source import kernels_in
from scripts import build_cubins, kernel_builds, kernel_report, sass_model

ROOT = Path(__file__).resolve().parents[1]
# one build of each shape of kernel; `make cubin` compiles all of them for every architecture
SAMPLE = ["matmul_q256 Q6_K PLANES=2 TOKEN_TILES=1 ROW_TILES=2 ROW_GROUPS=1 SLICES=8",
          "matmul_q32 Q5_0 PLANES=2 TOKEN_TILES=1 ROW_GROUPS=1 SLICES=8",
          "attention HEAD_DIM=128 KV_BITS=16", "quantize_q256 PLANES=2 TOKEN_TILES=2", "top_k"]

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not installed; the kernels are not compiled")
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or sass_model.find_nvdisasm() is None,
    reason="the extra cubin (NVRTC, nvdisasm) is not installed; the kernels are not compiled")


def build(folder, *options):
    """Run the script for sm_90."""
    command = [sys.executable, "-m", "scripts.build_cubins", "--arch", "90", "--out", folder]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True,
                          check=False)


@pytest.mark.parametrize(
    "options, words",
    [([], "NVRTC cannot be used"), (["--nvcc", "/none/nvcc"], "the compiler /none/nvcc cannot be run")],
)
def test_missing_compiler_is_one_sentence(monkeypatch, capsys, options, words):
    """A traceback where the extra is not installed, or an exit code of 0."""
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(sys, "argv", ["build_cubins", *options])
    assert build_cubins.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(words) and said.count("\n") == 1
    assert "pip install -e '.[cubin]'" in said or options


@needs_nvrtc
def test_sample_of_the_kernels_passes_the_gate(tmp_path):
    """CUDA C that only g++ accepts, spills, more instructions a byte than were recorded."""
    done = build(tmp_path, *(f"--only={word}" for word in SAMPLE))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("*.cubin"))) == len(SAMPLE)
    reports = {path.stem: json.loads(path.read_text())["kernels"] for path in
               tmp_path.rglob("*.json")}
    kernels = {name: usage for found in reports.values() for name, usage in found.items()}
    assert kernels["matmul_q256"]["instructions"]["per_byte"] > 1
    assert "LDG.E.128.CONSTANT" in kernels["matmul_q32"]["opcodes"]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert build(tmp_path, *(f"--only={word}" for word in SAMPLE)).returncode == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}


@needs_nvcc
def test_sample_compiles_with_the_other_compiler(tmp_path):
    """A text that NVRTC accepts and nvcc does not; a release whose registers explode."""
    done = build(tmp_path, "--nvcc", "nvcc", *(f"--only={word}" for word in SAMPLE[:1]))
    assert done.returncode == 0, done.stderr
    assert "CUDA" in done.stdout


@needs_nvrtc
def test_nothing_to_build_is_a_failure(tmp_path):
    """A misspelt word after which the gate passes because it looked at nothing."""
    assert build(tmp_path, "--only=no such kernel").returncode == 1


GOOD = {"registers": 100, "local": 0, "shared": 9216, "opcodes": ["IMMA.16832.S8.S8", "LDG.E.128"],
        "instructions": {"per_byte": 4.0}}
DAMAGE = {  # what is changed -> what the gate says
    "more registers": ({"registers": 101}, "registers"),
    "spills": ({"local": 8}, "local memory"),
    "other shared memory": ({"shared": 9000}, "shared memory"),
    "too much shared memory": ({"shared": 50000}, "static"),
    "more instructions": ({"instructions": {"per_byte": 4.21}}, "instructions a weight byte"),
    "fewer instructions": ({"instructions": {"per_byte": 3.79}}, "instructions a weight byte"),
    "narrow loads": ({"opcodes": ["IMMA.16832.S8.S8", "LDG.E.64"]}, "128-bit"),
    "no tensor cores": ({"opcodes": ["IDP.4A.S8.S8", "LDG.E.128"]}, "tensor-core"),
}


@pytest.mark.parametrize("what", sorted(DAMAGE))
def test_each_difference_from_the_record_is_a_fault(what):
    """A gate that looks at nothing."""
    change, words = DAMAGE[what]

    def faults(usage):
        return build_cubins.faults_of("here", "matmul_q32", "matmul_q32", usage, GOOD, True)

    assert faults(copy.deepcopy(GOOD)) == []
    found = faults({**copy.deepcopy(GOOD), **change})
    assert found and all(fault.startswith("here: matmul_q32") for fault in found)
    assert any(words in fault for fault in found)
    unknown = build_cubins.faults_of("here", "matmul_q32", "matmul_q32", GOOD, None, True)
    assert "--record" in unknown[0]


def test_every_kernel_file_is_in_the_list_and_says_what_the_style_asks():
    """A shipped file that no build compiles, or one without its header block."""
    files = {path.stem for path in (ROOT / "raw_kernels").glob("*.cu")}
    assert {file for file, _ in kernel_builds.shipped()} == files
    for name in sorted(files):
        text = (ROOT / "raw_kernels" / f"{name}.cu").read_text()
        head = text.split("#include")[0]
        assert len(head.splitlines()) <= 25, name
        at = [head.find(f"// {word}") for word in (
            "Computes:", "Shapes/dtypes:", "Launch:", "Defines:", "Accumulates in:",
            "Reads/writes:", "Twin:", "Source:")]
        assert min(at) >= 0 and at == sorted(at), name


def test_record_and_tables_belong_together_and_name_every_build():
    """A kernel added without its registers on record; a table edited by hand."""
    record = kernel_report.Record.read(build_cubins.RECORD)
    assert {build for _, build, _ in record.rows()} == {
        kernel_builds.label(*build) for build in kernel_builds.shipped()}
    assert kernel_report.registers_table(record) in kernel_report.REGISTERS.read_text()
    text = kernel_report.KERNELS.read_text()
    assert kernel_report.model_table(record) in text
    for path in (ROOT / "raw_kernels").glob("*.cu"):
        for kernel in kernels_in(path.read_text()):
            assert f"`{kernel}`" in text, f"{kernel} of {path.name} is not in docs/KERNELS.md"


def test_report_of_the_assembler_is_read():
    """A spill that is not seen because the wording was not understood."""
    text = ("ptxas info    : Compiling entry function 'a' for 'sm_90'\n"
            "    40 bytes stack frame, 32 bytes spill stores, 36 bytes spill loads\n"
            "ptxas info    : Used 128 registers, used 1 barriers, 2048 bytes smem\n"
            "ptxas info    : Compiling entry function 'b' for 'sm_90'\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            "ptxas info    : Used 16 registers\n")
    assert build_cubins.read_usage(text) == {
        "a": {"registers": 128, "local": 40, "shared": 2048},
        "b": {"registers": 16, "local": 0, "shared": 0}}


def test_hot_loop_is_the_innermost_with_most_multiplies():
    """An outer loop or the remainder of an unrolled one counted as the loop over the weights."""
    code = [("MOV", ""), ("LDG.E.128", ""), ("IMMA.16832.S8.S8", ""), ("IMMA.16832.S8.S8", ""),
            ("NOP", ""), ("BRA", "0x10"), ("IMMA.16832.S8.S8", ""), ("BRA", "0x60"),
            ("BRA", "0x0"), ("BRA", "0x200")]
    assert sass_model.loops(code) == [(1, 5), (6, 7), (0, 8)]
    body = sass_model.hot_loop(code[:8], "IMMA")
    assert body == code[1:6] and sass_model.n_real(body) == 4
    assert sass_model.hot_loop(code, "FFMA") == []


def test_model_is_worked_out_by_hand():
    """A pipe, unit or share that is wrong by a factor."""
    card = sass_model.Card("90", 100, 1.0, 1000, 32, 64, 128, 64, 4096)
    body = [("IMMA.16832.S8.S8", "")] * 10 + [("LDG.E.128.CONSTANT", "")] * 2 + [("NOP", "")]
    # issue 12; tensor 10 * 8192 / 1024 = 80 cycles; L1 4 * 1024 / 128 = 32; DRAM 0.92 * 1000
    assert sass_model.model(card, body, 1024, 0) == (920.0, "DRAM")
    assert sass_model.model(card, body * 10, 1024, 0) == (1024 * 4 * 100 / 800, "tensor")
    gbs, limit = sass_model.model(card, body, 1024, 7 * 1024)
    assert (round(gbs, 6), limit) == (32 * 100 / 8, "L2")


def test_units_of_the_loops_follow_the_formats():
    """Bytes of one format's tile with another's multiplies: the figure a byte is then wrong."""
    scratch = ("PLANES=2", "TOKEN_TILES=2", "ROW_TILES=2", "ROW_GROUPS=1", "SLICES=8")
    loop = kernel_builds.weight_loop("matmul_q256", ("FORMAT=Q4_K", *scratch), "90")
    assert loop[:3] == ("IMMA", (8 + 2) * 2 * 2 * 2, 2 * 2304)
    loop = kernel_builds.weight_loop("matmul_q256", ("FORMAT=Q6_K", *scratch), "75")
    assert loop[:3] == ("IMMA", (16 * 2 + 4) * 2 * 2 * 2, 2 * 3360)
    assert kernel_builds.weight_loop("rope", ("SPLIT_HALF=0",), "90") is None
