"""The recorded drafts of `tests/vectors/drafts/`: artifacts, reference values, target tables."""

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tests.helpers.vectors import recorded_sha256, vector_path
from tests.reference.gguf_tensors import GGUFTensors

TARGET_OF = {
    "v1-muse-swa": "muse-glimmer",
    "v1-qwen3-full": "qwen3",
    "v2-qwen35-mixed": "qwen35",
    "v2-muse-full": "muse-glimmer",
}
DRAFTS = tuple(TARGET_OF)
QUANTISED = ("v2-muse-full",)  # drafts with a recorded NAME-kq.gguf


@dataclass(frozen=True)
class DraftCase:
    """One draft and what z-lab's classes computed with it."""

    name: str
    target: str
    directory: Path  # config.json and model.safetensors
    data: dict  # arrays of NAME.npz

    @property
    def n_rounds(self):
        """Rounds recorded."""
        return int(self.data["rounds"])

    def get(self, round_, leaf, variant="f32"):
        """Array of one round, or None where it was not recorded."""
        return self.data.get(f"{variant}/r{round_}/{leaf}")

    def start(self, round_):
        """Position of the anchor; the context is every position before it."""
        return int(self.data[f"f32/r{round_}/start"])


@cache
def draft_case(name):
    """Load one of `DRAFTS`."""
    with np.load(vector_path(f"drafts/{name}.npz")) as npz:
        data = {key: npz[key] for key in npz.files}
    return DraftCase(name, TARGET_OF[name], draft_directory(name), data)


@cache
def draft_directory(name):
    """Unpacked z-lab directory of a draft: config.json beside model.safetensors."""
    digest = recorded_sha256(f"drafts/{name}/model.safetensors")
    parent = Path(tempfile.gettempdir()) / f"cudflash-vectors-{os.getuid()}"
    folder = parent / f"{name}-{digest[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        content = vector_path(f"drafts/{name}/{file}").read_bytes()
        if not (folder / file).exists() or (folder / file).read_bytes() != content:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
                part.write(content)
            os.replace(part.name, folder / file)  # whole or not at all
    return folder


def quantised_draft(name):
    """GGUF file of one of `QUANTISED`."""
    return vector_path(f"drafts/{name}-kq.gguf")


@cache
def target_tables(target):
    """Raw embedding and head of a tiny target: two of (V, C) float32."""
    file = GGUFTensors(vector_path(f"targets/{target}-f32.gguf"), np.float32)
    return file.array("token_embd.weight"), file.array("output.weight")
