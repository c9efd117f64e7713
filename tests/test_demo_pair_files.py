"""The embedded pair's files: they load, pair, are small, and are what their card says."""

import hashlib
import importlib.resources
import json
import re
import subprocess

import pytest
from cudflash.loader.config import read_target_config
from cudflash.loader.draft_bind import bind_draft, open_draft
from cudflash.loader.gguf import open_gguf

from scripts.train_pair import export, shapes
from tests.helpers.vectors import vector_path
from tests.test_project_rules import ROOT

FOLDER = ROOT / "cudflash" / "demo_pair"
NAMES = (export.TARGET_FILE, *export.DRAFT_FILES.values())
LARGEST = 16e6  # bytes of the three files together


def target_config():
    return read_target_config(open_gguf(FOLDER / export.TARGET_FILE))


def test_three_files_are_in_the_package_and_small():
    """A file that is not package data, or a pair that doubles the size of the wheel."""
    inside = {f.name for f in importlib.resources.files("cudflash.demo_pair").iterdir()}
    assert set(NAMES) | {"MODEL_CARD.md", "NOTICE-PSF.txt"} <= inside
    assert sum((FOLDER / name).stat().st_size for name in NAMES) <= LARGEST


def test_target_is_the_shape_that_was_trained():
    """An export with another window, scale or pattern than the training's: fluent, and worse."""
    config, shape = target_config(), shapes.TARGET
    assert config.arch == "muse-glimmer"
    assert (config.n_layers, config.hidden_dim, config.head_dim, config.vocab_size) == (
        shape.n_layers, shape.hidden_dim, shape.head_dim, shape.vocab_size)  # fmt: skip
    assert [la.window for la in config.layers] == [
        None if shape.is_full(i) else shape.window for i in range(shape.n_layers)
    ]
    assert (config.logit_scale, config.final_softcap) == (shape.logit_scale, shape.softcap)
    assert config.rms_eps == pytest.approx(shape.rms_eps)  # stored as float32


@pytest.mark.parametrize(
    "kind, shape", [("dflash", shapes.DFLASH), ("dflash2", shapes.DFLASH2)], ids=str
)
def test_drafts_pair_with_the_target_and_have_the_trained_geometry(kind, shape):
    """Taps counted from the wrong end, a lost window or causal flag: acceptance falls, no error."""
    draft = bind_draft(open_draft(FOLDER / export.DRAFT_FILES[kind]), target_config())
    config = draft.config
    assert config.kind == kind and config.taps == shape.taps
    assert (config.block_size, config.window, config.window_pattern) == (
        shape.block_size, shape.window, "S" * shape.n_layers)  # fmt: skip
    assert {la.causal for la in config.layers} == {shape.causal}
    assert config.mask_token_id == shapes.MASK_TOKEN
    assert (config.logit_scale, config.final_softcap) == (shape.logit_scale, shape.softcap)
    assert not config.own_embedding and not config.own_head
    assert config.selector_rank in (None, 256)  # a multiple of 256 takes k-quants
    assert not [line for line in config.defaults_taken if "absent" in line]


def test_every_matrix_is_a_k_quant():
    """A fall-back type for a matrix whose rows are no multiple of 256."""
    for name in NAMES:
        tensors = open_gguf(FOLDER / name).tensors
        kinds = {t.type_name for t in tensors.values() if len(t.shape) == 2}
        assert kinds <= {"Q3_K", "Q4_K", "Q5_K", "Q6_K"}, name


def test_card_states_the_digests_of_the_files():
    """A card of other files than those that are shipped."""
    card = (FOLDER / "MODEL_CARD.md").read_text()
    for name in NAMES:
        digest = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
        assert re.search(rf"{re.escape(name)}.*{digest}", card), name


def test_notice_keeps_the_copyright_and_names_the_changes():
    """The two things the licence of the training text asks of whoever passes a derivative on."""
    notice = (FOLDER / "NOTICE-PSF.txt").read_text()
    assert "Python Software Foundation; All Rights Reserved" in notice
    assert "Summary of changes" in notice and "PSF LICENSE AGREEMENT FOR PYTHON 3.11" in notice


def test_prompts_are_four_windows_long_and_no_prompt_was_trained_on():
    """Prompts too short for a window fault to show, or from a file of the training set."""
    stored = json.loads(vector_path("demo_pair/prompts.json").read_text())
    heldout = json.loads((ROOT / "scripts/train_pair/results/corpus.json").read_text())
    assert stored["window"] == shapes.DFLASH.window
    kinds = [p["kind"] for p in stored["prompts"]]
    assert 12 <= len(kinds) <= 20 and {"docs", "code", "records"} == set(kinds)
    for prompt in stored["prompts"]:
        assert prompt["n_tokens"] >= 4 * shapes.DFLASH.window
        if prompt["kind"] != "records":
            assert prompt["source"] in heldout[prompt["kind"]]["heldout_files"]


def test_tokenizer_counts_prompts_as_the_trainer_did():
    """A tokenizer in the file that cuts text otherwise than the one the model was trained with."""
    from cudflash.loader.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(open_gguf(FOLDER / export.TARGET_FILE))
    for prompt in json.loads(vector_path("demo_pair/prompts.json").read_text())["prompts"]:
        assert len(tokenizer.encode(prompt["text"])) == prompt["n_tokens"]


def test_files_are_tracked():
    """Model files that an ignore rule keeps out of a checkout."""
    listed = subprocess.run(["git", "ls-files", "cudflash/demo_pair"], cwd=ROOT, text=True,
                            capture_output=True, check=False)  # fmt: skip
    if listed.returncode or not listed.stdout:
        pytest.skip("this source tree has no git")
    assert {f"cudflash/demo_pair/{name}" for name in NAMES} <= set(listed.stdout.split())
