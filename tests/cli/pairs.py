"""Tiny targets and drafts, copied so that a test decides what lies beside what."""

import shutil

from tests.helpers.draft_vectors import draft_directory, quantised_draft
from tests.helpers.vectors import vector_path


def put_target(folder, arch="muse-glimmer", name="model.gguf"):
    """Copy a tiny target into a folder."""
    return shutil.copy(vector_path(f"targets/{arch}-kq.gguf"), folder / name)


def put_draft(folder, name="draft.gguf"):
    """Copy the GGUF draft of the tiny muse-glimmer; ``dflash-*`` is found beside a model."""
    return shutil.copy(quantised_draft("v2-muse-full"), folder / name)


def put_directory(folder, draft="v1-muse-swa", name="draft"):
    """Copy a draft's directory: config.json beside model.safetensors."""
    return shutil.copytree(draft_directory(draft), folder / name)
