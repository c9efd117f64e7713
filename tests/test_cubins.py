"""The kernels compile for a real architecture, use no local memory, and the gate would notice."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import build_cubins

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "build_cubins.py"
# one build of each shape of kernel; `make cubin` compiles all of them for every architecture
SAMPLE = ["matmul_q256 Q6_K PLANES=2 TOKEN_TILES=1 ROW_TILES=2 ROW_GROUPS=1 SLICES=8",
          "matmul_q32 Q5_0 PLANES=2 TOKEN_TILES=1", "attention HEAD_DIM=128 KV_BITS=16",
          "quantize_q256 PLANES=2 TOKEN_TILES=2", "rms_norm", "elementwise"]

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not installed; the kernels are not compiled")


def build(folder, *options):
    """Run the script for sm_90."""
    return subprocess.run([sys.executable, SCRIPT, "--arch", "90", "--out", folder, *options],
                          capture_output=True, text=True, check=False)


@needs_nvcc
def test_sample_of_the_kernels_compiles_without_spills(tmp_path):
    """CUDA C that only g++ accepts, an intrinsic or a PTX line that the assembler refuses, spills."""
    table = tmp_path / "table.md"
    done = build(tmp_path, "--table", table, *(f"--only={word}" for word in SAMPLE))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("*.cubin"))) == len(SAMPLE)
    rows = [line for line in table.read_text().splitlines() if line.startswith("| `")]
    found = [row.split("|")[1].strip(" `") for row in rows]
    assert {"matmul_q256", "matmul_q32", "attention_chunks", "rms_norm_long"} <= set(found)
    assert len(found) == 3 + 2 + 2 + 8  # two kernels in attention and in rms_norm, 8 elementwise


@needs_nvcc
def test_nothing_to_build_is_a_failure(tmp_path):
    """A misspelt word after which the gate passes because it looked at nothing."""
    assert build(tmp_path, "--only=no such kernel").returncode == 1


def test_every_kernel_file_is_in_the_list_and_says_what_the_style_asks():
    """A shipped file that no build compiles, or one without its header block."""
    files = {path.stem for path in (ROOT / "raw_kernels").glob("*.cu")}
    assert {file for file, _ in build_cubins.shipped()} == files
    for name in sorted(files):
        text = (ROOT / "raw_kernels" / f"{name}.cu").read_text()
        head = text.split("#include")[0]
        assert len(head.splitlines()) <= 25, name
        at = [head.find(f"// {word}") for word in (
            "Computes:", "Shapes/dtypes:", "Launch:", "Defines:", "Accumulates in:",
            "Reads/writes:", "Twin:", "Source:")]
        assert min(at) >= 0 and at == sorted(at), name


def test_recorded_table_has_a_row_for_every_build():
    """A kernel added without its registers on record."""
    text = (ROOT / "raw_kernels" / "REGISTERS.md").read_text()
    for file, defines in build_cubins.shipped():
        name = build_cubins.label(file, defines)
        assert f"| {name.split(' ', 1)[1] if defines else ''} |" in text, name


def test_report_of_the_assembler_is_read():
    """A spill that is not seen because the wording was not understood."""
    text = ("ptxas info    : Compiling entry function 'a' for 'sm_90'\n"
            "    40 bytes stack frame, 32 bytes spill stores, 36 bytes spill loads\n"
            "ptxas info    : Used 128 registers, used 1 barriers, 2048 bytes smem\n"
            "ptxas info    : Compiling entry function 'b' for 'sm_90'\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            "ptxas info    : Used 16 registers\n")
    assert build_cubins.read_usage(text) == [("a", 128, 40, 2048), ("b", 16, 0, 0)]
