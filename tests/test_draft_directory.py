"""Drafts as z-lab directories: a malformed config.json or a missing file has its own sentence."""

from __future__ import annotations

import contextlib
import copy
import json
import os

import pytest
from cudflash.loader.draft_bind import open_draft
from cudflash.loader.safetensors_dir import open_safetensors_dir, read_json

from cudflash.errors import CudflashError, FormatError
from tests.helpers import draft_writer as d


@pytest.fixture
def opened_hf(tmp_path):
    """Return a function that writes a z-lab directory and opens it as a draft."""
    return lambda config: open_draft(d.write_hf(tmp_path / "draft", config, d.hf_tensors()))


BAD_CONFIG = [
    ({"architectures": ["Eagle3"]}, "architectures is .'Eagle3'., expected one of DFlashDraft"),
    ({"attention_bias": True}, "attention_bias is True, expected no such key"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is .* expected no such key"),
    ({"draft_vocab_size": 5}, "draft_vocab_size is 5.*reduced draft vocabularies"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    ({"hidden_act": ["silu"]}, "hidden_act is .'silu'., expected one of silu"),
    ({"partial_rotary_factor": 0.01}, "rotated dimensions is 0, expected an even number from 2"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a finite number above 0"),
    ({"head_dim": None}, "head_dim is absent, expected a whole number"),
    ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
    ({"num_hidden_layers": 600}, "num_hidden_layers is 600, expected at most 512"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is absent, expected a finite"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type is 'llama3'"),
    ({"layer_types": ["full_attention"]}, "layer_types is .*expected 2 times full_attention or"),
    ({"layer_types": ["sliding_attention", "local"]}, "layer_types is .*expected 2 times"),
    ({"layer_types": None}, "layer_types is absent, expected a type .* beside a window of 24"),
    ({"use_sliding_window": False}, "use_sliding_window is False, expected true, because layer_t"),
    ({"sliding_window": None}, "sliding_window is absent, expected a window, because layer_types"),
    ({"sliding_window": 3}, "sliding window is 3, expected at least the block size 4"),
    ({"is_causal": 1}, "is_causal is 1, expected true or false"),
    ({"num_target_layers": 2}, r"layers \[2, 0\], expected layers below 2"),
    ({"dflash_config": [1]}, "dflash_config is .1., expected an object"),
    ({"block_size": None}, "block_size is absent, expected a whole number from 1"),
]


@pytest.mark.parametrize("change, fragment", BAD_CONFIG)
def test_malformed_config_has_its_own_sentence(opened_hf, change, fragment):
    """Catches a config.json value that is ignored or replaced by a library's default."""
    with pytest.raises(FormatError, match=fragment) as caught:
        opened_hf(d.hf_config() | change)
    assert "\n" not in str(caught.value)


BAD_INNER = [
    ({"target_layer_ids": None}, "target_layer_ids is missing .* cannot be guessed"),
    ({"target_layer_ids": []}, "tap list .dflash_config.target_layer_ids, zero-based. is empty"),
    ({"target_layer_ids": [1, 1]}, "with layer 1 twice"),
    ({"target_layer_ids": [0, 3]}, "expected layers below 3, the target layers the draft states"),
    ({"target_layer_ids": [0, 1, 2]}, "fc.weight fuses 2 taps of 64, but the tap list has 3"),
    ({"target_layer_ids": [0, True]}, "expected a list of at most 512 layer numbers"),
    ({"mask_token_id": None}, "mask_token_id is absent"),
    ({"mask_token_id": 7}, "mask token id is 7, expected below the vocabulary size 7"),
    ({"selector_top_k": 3}, "dflash_config.selector_top_k says DFlash2, but none"),
    ({"markov_rank": 64}, "dflash_config.markov_rank is 64, expected no such key"),
]


@pytest.mark.parametrize("change, fragment", BAD_INNER)
def test_malformed_dflash_config_has_its_own_sentence(opened_hf, change, fragment):
    """Catches the fallback formula for taps, and faults of the inner object."""
    config = d.hf_config()
    config["dflash_config"] |= change
    with pytest.raises(FormatError, match=fragment):
        opened_hf(config)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_fifo_in_the_directory_is_refused_at_once(tmp_path, name):
    """Catches a program that waits for ever for somebody to write into a FIFO."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match="regular file|config.json"):
        if name == "config.json":
            read_json(str(tmp_path / name))
        else:
            open_safetensors_dir(tmp_path)


def test_directory_files_are_checked(tmp_path):
    """Catches missing or damaged files of a directory reported as something else."""
    folder = tmp_path / "draft"
    folder.mkdir()
    with pytest.raises(FormatError, match="a directory without config.json"):
        open_draft(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(FormatError, match="config.json: not JSON"):
        open_draft(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(FormatError, match="holds a JSON list, expected an object"):
        open_draft(folder)
    (folder / "config.json").write_text(json.dumps(d.hf_config()))
    with pytest.raises(FormatError, match=r"holds no .safetensors file"):
        open_draft(folder)
    (folder / "model.safetensors").write_bytes(b"\x10" + bytes(40))
    with pytest.raises(FormatError, match="not a sound safetensors file"):
        open_draft(folder)
    d.write_hf(folder, d.hf_config(), d.hf_tensors())
    index = {"weight_map": {"fc.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="names model-2.safetensors, which is not in the"):
        open_draft(folder)


ODD = [None, True, -1, 0, 1 << 40, 1.5, "x", [], [[1]], {"rope_type": ["x"]}]


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_odd_values_never_escape_as_other_errors(tmp_path, kind):
    """Catches a TypeError or a KeyError on a config.json nobody thought of."""
    base = d.hf_config(kind)
    folder = d.write_hf(tmp_path / "draft", base, d.hf_tensors(kind))
    paths = [(key,) for key in base] + [("dflash_config", key) for key in base["dflash_config"]]
    paths += [("use_swa",), ("rope_scaling",), ("output_multiplier",), ("quantization_config",)]
    for path in paths:
        for value in ODD:
            config = copy.deepcopy(base)
            place = config if len(path) == 1 else config[path[0]]
            place[path[-1]] = value
            (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
            with contextlib.suppress(CudflashError):
                open_draft(folder)
