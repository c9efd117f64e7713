"""Verdicts on pairs, the draft found beside a model, and the digest of a draft."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
from cudflash.loader.bind import bind_target
from cudflash.loader.draft_bind import open_draft
from cudflash.loader.gguf import open_gguf
from cudflash.loader.pairing import draft_digest, find_draft_beside, pairing_verdict

from cudflash.errors import UsageError
from tests.helpers import draft_writer as d
from tests.helpers import gguf_writer as w
from tests.helpers.draft_vectors import draft_case, quantised_draft
from tests.helpers.vectors import vector_path


def recorded_target(arch):
    return bind_target(open_gguf(vector_path(f"targets/{arch}-kq.gguf")))


@pytest.fixture
def model(tmp_path):
    """A 3-layer llama target that the tiny draft fits: (path, Target)."""
    path = w.tiny_model("llama", 3).write(tmp_path / "model.gguf")
    return path, bind_target(open_gguf(path))


@pytest.mark.parametrize("name", ["v1-muse-swa", "v1-qwen3-full", "v2-muse-full"])
def test_recorded_pair_is_compatible(name):
    """Catches a verdict that is not JSON, or a lane named wrongly."""
    case = draft_case(name)
    verdict = pairing_verdict(recorded_target(case.target), open_draft(case.directory))
    json.dumps(verdict, allow_nan=False)
    assert verdict["compatible"] and verdict["reasons"] == []
    assert all(check["fits"] for check in verdict["checks"])
    assert verdict["qualified_lane"] == name.startswith("v1")
    assert ("is not the qualified lane" in verdict["lane"]) == name.startswith("v2")


def test_wrong_pair_says_why():
    """Catches a pair of equal shapes but other vocabulary that passes."""
    verdict = pairing_verdict(recorded_target("qwen3"), open_draft(quantised_draft("v2-muse-full")))
    assert not verdict["compatible"] and not verdict["qualified_lane"]
    assert any("352 tokens, the target's 320" in reason for reason in verdict["reasons"])
    assert [check["what"] for check in verdict["checks"] if not check["fits"]] == [
        "vocabulary", "mask token id",
    ]  # fmt: skip


def test_nothing_beside_is_explained(model):
    """Catches silence about why no draft is used."""
    found = find_draft_beside(*model)
    assert found.path is None and "no dflash-*.gguf beside" in found.explanation


def test_the_fitting_draft_is_chosen_by_what_it_holds(tmp_path, model):
    """Catches a choice by name or by order: wrong, damaged and foreign files lie beside it."""
    shutil.copy(quantised_draft("v2-muse-full"), tmp_path / "dflash-a.gguf")
    (tmp_path / "dflash-b.gguf").write_bytes(b"GGUF")
    w.tiny_model("llama").write(tmp_path / "dflash-c.gguf")
    good = d.tiny_draft().write(tmp_path / "dflash-tiny.gguf")
    d.tiny_draft().write(tmp_path / "other.gguf")
    found = find_draft_beside(*model)
    assert found.path == good and "taps [2, 0]" in found.explanation
    why = {path.rsplit("/", 1)[1]: reason for path, reason in found.rejected}
    assert set(why) == {"dflash-a.gguf", "dflash-b.gguf", "dflash-c.gguf"}
    assert "hidden size is 256, the target's 64" in why["dflash-a.gguf"]
    assert "this is a target" in why["dflash-c.gguf"]
    assert all(name in found.explanation for name in why)


def test_none_that_fits_is_explained(tmp_path, model):
    """Catches a misfit that is used, or passed over without a word."""
    shutil.copy(quantised_draft("v2-muse-full"), tmp_path / "dflash-a.gguf")
    found = find_draft_beside(*model)
    assert found.path is None and "none of 1 dflash-*.gguf" in found.explanation


def test_several_that_fit_are_listed(tmp_path, model):
    """Catches a silent choice among equals."""
    d.tiny_draft().write(tmp_path / "dflash-one.gguf")
    d.tiny_draft("dflash2").write(tmp_path / "dflash-two.gguf")
    with pytest.raises(UsageError, match=r"2 drafts .*dflash-one.gguf, .*dflash-two.gguf.*--draft"):
        find_draft_beside(*model)


def test_model_is_not_its_own_draft(tmp_path):
    """Catches report A48's reverse: a target whose own name matches the pattern."""
    path = w.tiny_model("llama", 3).write(tmp_path / "dflash-model.gguf")
    found = find_draft_beside(path, bind_target(open_gguf(path)))
    assert found.path is None and found.rejected == ()


def test_digest_covers_every_file(tmp_path):
    """Catches a digest that misses config.json, a shard, or their order."""
    path = d.tiny_draft().write(tmp_path / "draft.gguf")
    whole = hashlib.sha256(open(path, "rb").read()).hexdigest()
    assert draft_digest(open_draft(path)) == whole
    folder = d.write_hf(tmp_path / "a", d.hf_config(), d.hf_tensors(), shards=2)
    first = draft_digest(open_draft(folder))
    lines = ""
    for name in ("config.json", "model-00001.safetensors", "model-00002.safetensors"):
        lines += f"{name} {hashlib.sha256((tmp_path / 'a' / name).read_bytes()).hexdigest()}\n"
    assert first == hashlib.sha256(lines.encode()).hexdigest()
    d.write_hf(tmp_path / "a", d.hf_config() | {"rms_norm_eps": 1e-6}, d.hf_tensors(), shards=2)
    assert draft_digest(open_draft(folder)) != first
