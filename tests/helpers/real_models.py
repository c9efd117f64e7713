"""Find the two small real models; skip, with the command that gets them, when they are absent.

Looked at in this order: the folder named by CUDFLASH_TEST_MODELS, `models/` of the repository
(where `scripts/fetch_models.py` puts them), the packages installed in this Python.
"""

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from scripts.fetch_models import MODELS, installed_parts, sha256_of

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = tuple(MODELS)


@cache
def find_model(name):
    """Verified path of real model `name` ("smollm2" or "gemma3"), or None when it is nowhere.

    Raises
    ------
    ValueError
        There is a file of that name with another content.
    """
    model = MODELS[name]
    folders = [os.environ.get("CUDFLASH_TEST_MODELS"), REPOSITORY / "models"]
    for folder in filter(None, folders):
        path = Path(folder) / model.file_name
        if path.exists():
            return _verified(path, model)
    parts = installed_parts(model)
    if parts is None:
        return None
    if len(parts) == 1:
        return _verified(parts[0], model)
    return _verified(_joined(parts, model), model)


def require_model(name):
    """Path of real model `name`; skips the running test when it is absent."""
    path = find_model(name)
    if path is None:
        pytest.skip(f"no {MODELS[name].file_name}; run: python scripts/fetch_models.py {name}")
    return path


def _joined(parts, model):
    folder = Path(tempfile.gettempdir()) / f"cudflash-models-{os.getuid()}"
    path = folder / model.file_name
    if path.exists() and path.stat().st_size == model.n_bytes:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as out:
        for part in parts:
            with part.open("rb") as data:
                shutil.copyfileobj(data, out)
    os.replace(out.name, path)  # whole or not at all
    return path


def _verified(path, model):
    found = sha256_of(path)
    if found != model.sha256:
        raise ValueError(f"{path} has SHA-256 {found}, expected {model.sha256}; move it away")
    return path
