"""What inspect shows: complete, JSON-able, and available for files that cannot be run."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from cudflash.loader.gguf import open_gguf
from cudflash.loader.summary import file_digest, summarize

from cudflash.errors import FormatError
from tests.helpers import gguf_writer as w
from tests.helpers.vectors import vector_path

ARCHES = ["llama", "qwen2", "qwen3", "gemma3", "muse-glimmer"]


@pytest.mark.parametrize("arch", ARCHES)
def test_summary_is_json_and_complete(arch):
    """Catches a value JSON cannot hold, or a field inspect promises and lacks."""
    path = vector_path(f"targets/{arch}-kq.gguf")
    summary = json.loads(json.dumps(summarize(open_gguf(path)), allow_nan=False))
    assert (summary["architecture"], summary["role"], summary["problem"]) == (arch, "target", None)
    assert summary["file_bytes"] == path.stat().st_size
    assert sum(row["tensors"] for row in summary["tensor_types"]) == summary["n_tensors"]
    model = summary["model"]
    assert len(model["window_pattern"]) == model["n_layers"]
    if arch == "muse-glimmer":
        assert (model["window"], model["window_pattern"]) == (32, "SSSFSF")
        assert model["rope"] is None and model["rope_sliding"]["freq_base"] == 500000.0
    else:
        assert model["rope"]["n_dims"] == model["head_dim"]
    assert summary["tokenizer"]["vocab_size"] == model["vocab_size"]


def test_summary_of_a_file_that_cannot_run_says_why(tmp_path):
    """Catches inspect failing on the very files people need it for."""
    b = w.GGUFBuilder().add("general.architecture", w.STRING, "dflash")
    b.add_array("dflash.target_layers", w.I32, [3, 1]).add("dflash.block_size", w.U32, 8)
    b.add("dflash.logit_scale", w.F32, math.nan)
    b.add("tokenizer.chat_template", w.STRING, "{{ messages }}")
    summary = summarize(open_gguf(b.write(tmp_path / "model.gguf")))
    json.dumps(summary, allow_nan=False)
    assert summary["role"] == "draft" and "this is a draft" in summary["problem"]
    assert summary["hyperparameters"] == {
        "target_layers": [3, 1], "block_size": 8, "logit_scale": "nan"
    }  # fmt: skip
    digest = hashlib.sha256(b"{{ messages }}").hexdigest()
    assert summary["tokenizer"]["chat_template_sha256"] == digest


def test_file_digest_is_sha256_in_pieces(tmp_path):
    """Catches a digest of only the first piece."""
    blob = bytes(range(256)) * 10_000
    path = tmp_path / "x"
    path.write_bytes(blob)
    seen = []
    assert file_digest(path, seen.append) == hashlib.sha256(blob).hexdigest()
    assert seen[-1] == len(blob) and len(seen) == 3
    with pytest.raises(FormatError, match="cannot be read"):
        file_digest(tmp_path / "absent")
