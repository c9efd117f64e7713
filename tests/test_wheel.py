"""A wheel built from the tree works outside of the tree."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.vectors import vector_path
from tests.test_project_rules import ROOT, tracked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a copy of the tracked files: what a checkout holds, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked():
        if path.parts[0] != "tests":
            (folder / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / "tree" / path)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    done = run([*command, folder / "tree"])
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel's contents, as pip would put them into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(command, **kwargs):
    """Run a program; never in the repository's root."""
    options = {"capture_output": True, "text": True, "check": False, "timeout": 300}
    return subprocess.run(list(map(str, command)), **{**options, **kwargs})


def test_wheel_holds_every_source_and_nothing_generic(wheel):
    """Kernel sources that stay behind, or a top-level module called `loader` in site-packages."""
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"cudflash"}
    for path in tracked("cudflash/*", "loader/*", "raw_kernels/*"):
        if path.suffix in (".py", ".cu", ".cuh") or "prompts" in path.parts:
            inside = path if path.parts[0] == "cudflash" else "cudflash" / path
            assert str(inside) in names
    info = next(name for name in names if name.endswith("entry_points.txt"))
    assert "cudflash = cudflash.__main__:script" in zipfile.ZipFile(wheel).read(info).decode()


def test_installed_package_is_the_wheels_and_works_elsewhere(installed, tmp_path):
    """A package that works only beside its own repository."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    code = "import cudflash, cudflash.loader as l, sys; print(cudflash.__file__, l.__file__)"
    found = run([sys.executable, "-c", code], env=env, cwd=tmp_path).stdout.split()
    assert [path.startswith(str(installed)) for path in found] == [True, True]
    program = [sys.executable, "-m", "cudflash"]
    version = run([*program, "--version"], env=env, cwd=tmp_path)
    assert version.returncode == 0 and version.stdout.startswith("cudflash ")
    done = run([*program, "inspect", vector_path("targets/qwen3-kq.gguf")], env=env, cwd=tmp_path)
    assert done.returncode == 0 and "qwen3" in done.stdout


def test_installed_package_generates(installed, tmp_path):
    """A wheel that lacks what only loading a model imports.

    Its kernels are compiled anew where its sources differ from the checkout's; they do not.
    """
    env = {**os.environ, "PYTHONPATH": str(installed)}
    model = vector_path("targets/llama-kq.gguf")
    command = [sys.executable, "-m", "cudflash", "generate", model, "-p", "hi", "-n", 3]
    done = run([*command, "--temp", 0, "--json"], env=env, cwd=tmp_path)
    assert done.returncode == 0 and '"finish_reason": "length"' in done.stdout, done.stderr
