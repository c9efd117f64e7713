"""Draft metadata to configuration: both artifacts, both dialects, overrides, malformed files."""

from __future__ import annotations

import json
import math
import re

import pytest
from cudflash.loader.arch import is_draft
from cudflash.loader.draft_bind import open_draft
from cudflash.loader.draft_config import DEFAULT_SINK, describe_draft_config
from cudflash.loader.gguf import open_gguf

from cudflash.errors import FormatError, UnsupportedError, UsageError
from tests.helpers import draft_writer as d
from tests.helpers import gguf_writer as w
from tests.helpers.draft_vectors import DRAFTS, QUANTISED, draft_case, quantised_draft

FORKS = ("dflash-draft", "qwen35-dflash-draft")


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes a GGUF builder and opens it as a draft."""
    return lambda b, **options: open_draft(b.write(tmp_path / "draft.gguf"), **options)


@pytest.fixture
def opened_hf(tmp_path):
    """Return a function that writes a z-lab directory and opens it as a draft."""

    def open_(config, tensors=None, kind="dflash", **options):
        tensors = d.hf_tensors(kind) if tensors is None else tensors
        return open_draft(d.write_hf(tmp_path / "draft", config, tensors), **options)

    return open_


# ---- recorded drafts --------------------------------------------------------------------------

RECORDED = {
    "v1-muse-swa": ("dflash", (0, 1, 2, 3, 4), 16, "SSSSS", 32, 351),
    "v1-qwen3-full": ("dflash", (0, 1, 2, 3, 4), 16, "FFFFF", None, 319),
    "v2-qwen35-mixed": ("dflash2", (0, 1, 2, 3, 4), 8, "SSFSF", 20, 383),
    "v2-muse-full": ("dflash2", (4, 2, 0, 1, 3), 8, "FFFFF", None, 351),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_recorded_directories_are_read(name):
    """Catches a key of real z-lab files read under a wrong name, or taps put in another order."""
    draft = open_draft(draft_case(name).directory)
    config = draft.config
    found = (config.kind, config.taps, config.block_size, config.window_pattern, config.window)
    assert (*found, config.mask_token_id) == RECORDED[name]
    assert (config.n_layers, config.hidden_dim, config.head_dim) == (5, 256, 64)
    assert (config.n_heads, config.n_kv_heads, config.ffn_dim) == (4, 1, 256)
    assert [la.causal for la in config.layers] == [False] * 5
    assert config.window_source == "file" and config.n_target_layers == 6
    assert config.qualified_lane == (name.startswith("v1")) and draft.warnings == ()
    assert config.defaults_taken == ()
    json.dumps(describe_draft_config(config), allow_nan=False)


@pytest.mark.parametrize("name", QUANTISED)
def test_both_artifacts_of_a_draft_give_the_same_numbers(name):
    """Catches one-based taps not resolved, or a scale read from one artifact only."""
    gguf = open_draft(quantised_draft(name)).config
    hf = open_draft(draft_case(name).directory).config
    same = {"kind", "n_layers", "hidden_dim", "head_dim", "n_heads", "n_kv_heads", "ffn_dim",
            "vocab_size", "context_length", "block_size", "taps", "mask_token_id", "rope",
            "layers", "attn_scale", "value_scale", "embedding_scale", "activation", "logit_scale",
            "final_softcap", "conv_kernel", "conv_group", "selector_rank", "selector_top_k",
            "own_embedding", "own_head", "sink"}  # fmt: skip
    assert {f for f in same if getattr(gguf, f) != getattr(hf, f)} == set()
    assert gguf.rms_eps == pytest.approx(hf.rms_eps, rel=1e-7)  # stored as float32 in one
    assert (gguf.embedding_scale, gguf.logit_scale, gguf.final_softcap) == (1.5, 0.4375, 12.0)


# ---- dialects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("arch", ["dflash", *FORKS])
def test_dialects_resolve_to_the_same_draft(opened, kind, arch):
    """Catches report A43: the two dialects count taps differently and name tensors differently."""
    config = opened(d.tiny_draft(kind, arch)).config
    assert config.taps == d.TAPS and config.kind == kind
    assert config.dialect == ("gguf" if arch == "dflash" else "gguf-fork")
    assert (config.block_size, config.mask_token_id) == (d.BLOCK, d.MASK)
    assert "one-based" in config.taps_source if arch == "dflash" else "zero-based"
    assert config.defaults_taken == ()


def test_directory_and_file_of_a_tiny_draft_agree(opened, opened_hf):
    """Catches a default that differs between the readers."""
    for kind in ("dflash", "dflash2"):
        gguf = describe_draft_config(opened(d.tiny_draft(kind)).config)
        hf = describe_draft_config(opened_hf(d.hf_config(kind), kind=kind).config)
        differ = {key for key in gguf if gguf[key] != hf[key]}
        sources = {"causal_source", "block_size_source", "taps_source", "mask_token_source"}
        assert differ <= sources | {"dialect", "name", "n_target_layers", "rms_eps", "causal"}


def test_both_tap_keys_must_agree(opened):
    """Catches a file whose two lists say different layers."""
    b = d.tiny_draft().add_array("dflash.dflash.target_layer_ids", w.I32, d.TAPS)
    assert opened(b).config.taps == d.TAPS
    b.set("dflash.target_layers", w.I32, list(d.TAPS))
    with pytest.raises(FormatError, match="expected the first to be the second plus one"):
        opened(b)


def test_muse_assistant_is_flat_and_bidirectional(opened_hf):
    """Catches report A48: Meta's draft has other names, no vocabulary size and no is_causal."""
    config = d.hf_config()
    config |= config.pop("dflash_config") | {"architectures": ["MuseGlimmerAssistantModel"]}
    del config["vocab_size"], config["num_target_layers"], config["use_sliding_window"]
    config["hidden_activation"] = config.pop("hidden_act")
    tensors = d.hf_tensors()
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    draft = opened_hf(config, {"model." + name: data for name, data in tensors.items()})
    assert [la.causal for la in draft.config.layers] == [False, False]
    assert draft.config.vocab_size is None and draft.config.window == d.WINDOW
    assert draft.config.defaults_taken == ("vocab_size absent: the target's",)


@pytest.mark.parametrize(
    "where, expected",
    [({}, [True, False]), ({"is_causal": None}, [True, False]), ({"is_causal": True}, [True] * 2),
     ({"is_causal": False}, [False] * 2)],
)  # fmt: skip
def test_causality_of_directories_follows_z_lab(opened_hf, where, expected):
    """Catches llama.cpp's reading of an absent is_causal (bidirectional) where z-lab's holds."""
    config = opened_hf(d.hf_config() | where).config
    assert [la.causal for la in config.layers] == expected
    assert config.causal_source.startswith("absent" if where.get("is_causal") is None else "file")


@pytest.mark.parametrize("value, expected", [(None, False), (0, False), (1, True)])
def test_causality_of_gguf_is_one_flag_absent_bidirectional(opened, value, expected):
    """Catches z-lab's reading of an absent flag where llama.cpp's holds."""
    b = d.tiny_draft()
    if value is not None:
        b.add("dflash.attention.causal", w.BOOL, value)
    config = opened(b).config
    assert [la.causal for la in config.layers] == [expected] * 2
    assert config.causal_source == ("absent: bidirectional" if value is None else "file")


def test_block_size_inside_dflash_config_wins(opened_hf):
    """Catches the reader that runs a DFlash2 draft at the block size of the top level."""
    config = d.hf_config("dflash2") | {"block_size": 16}
    found = opened_hf(config, kind="dflash2").config
    assert (found.block_size, found.block_size_source) == (4, "file (dflash_config.block_size)")


# ---- rope and scales --------------------------------------------------------------------------


def test_gguf_rope_and_scales_follow_the_draft(opened):
    """Catches report A22, A23: rotation or scaling taken from anywhere but the draft's keys."""
    b = d.tiny_draft().add_array("dflash.rope.dimension_sections", w.I32, [16, 0, 0, 0])
    for suffix, value in (
        ("attention.scale", 0.5), ("attention.value_scale", 2.0), ("embedding_scale", 3.0),
        ("logit_scale", 0.25), ("final_logit_softcapping", 15.0),
    ):  # fmt: skip
        b.add(f"dflash.{suffix}", w.F32, value)
    b.add("dflash.hidden_activation", w.STRING, "gelu_pytorch_tanh")
    config = opened(b).config
    assert (config.rope.style, config.rope.n_dims, config.rope.freq_base) == ("split_half", 32, 7e3)
    assert (config.attn_scale, config.value_scale, config.embedding_scale) == (0.5, 2.0, 3.0)
    assert (config.logit_scale, config.final_softcap) == (0.25, 15.0)
    assert config.activation == "gelu_tanh" and config.rope.yarn is None
    plain = opened(d.tiny_draft()).config
    assert (plain.attn_scale, plain.value_scale) == (1 / math.sqrt(32), 1.0)
    assert (plain.embedding_scale, plain.logit_scale, plain.final_softcap) == (1.0, 1.0, None)


def test_yarn_is_read_from_both_artifacts(opened, opened_hf):
    """Catches YaRN dropped, or transformers' attention factor multiplied twice."""
    b = d.tiny_draft().add("dflash.rope.scaling.type", w.STRING, "yarn")
    b.add("dflash.rope.scaling.factor", w.F32, 4.0)
    b.add("dflash.rope.scaling.original_context_length", w.U32, 128)
    gguf = opened(b).config.rope
    yarn = {"rope_type": "yarn", "rope_theta": 7000.0, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 128
    hf = opened_hf(d.hf_config() | {"rope_parameters": yarn}).config.rope
    assert gguf == hf and hf.yarn.original_context == 128 and hf.freq_scale == 0.25
    grown = 1 + 0.1 * math.log(4)
    stated = opened_hf(d.hf_config() | {"rope_parameters": yarn | {"attention_factor": 1.5}})
    assert stated.config.rope.attn_factor == pytest.approx(1.5 / grown)


def test_hf_rope_variants(opened_hf):
    """Catches a base, a share or a pairing that is read from the wrong place or ignored."""
    config = d.hf_config()
    del config["rope_parameters"]
    config |= {"rope_theta": 9000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config |= {"partial_rotary_factor": 0.5, "rope_is_neox_style": False}
    rope = opened_hf(config).config.rope
    assert (rope.freq_base, rope.freq_scale, rope.n_dims) == (9000.0, 0.5, 16)
    assert rope.style == "interleaved"
    kinds = dict.fromkeys(("full_attention", "sliding_attention"), {"rope_theta": 5e5})
    assert opened_hf(d.hf_config() | {"rope_parameters": kinds}).config.rope.freq_base == 5e5


# ---- window and sink --------------------------------------------------------------------------


def test_window_of_file_is_used_and_sink_is_recorded(opened):
    """Catches a window or a sink applied without being shown."""
    draft = opened(d.tiny_draft())
    config = draft.config
    assert (config.window, config.window_pattern) == (d.WINDOW, "SF")
    assert (config.window_source, config.sink, config.sink_source) == ("file", 64, "default")
    assert draft.warnings == () and DEFAULT_SINK == 64


def without_window(b):
    b.drop("dflash.attention.sliding_window")
    return b.drop("dflash.attention.sliding_window_pattern")


def test_missing_window_loads_loudly(opened, opened_hf):
    """Catches the seed's fault: no window key, silently another conditioning."""
    draft = opened(without_window(d.tiny_draft()))
    assert (draft.config.window, draft.config.window_source) == (None, "absent")
    assert (draft.config.sink, draft.config.sink_source) == (0, "no window")
    assert len(draft.warnings) == 1 and "--draft-window" in draft.warnings[0]
    config = d.hf_config()
    for key in ("sliding_window", "use_sliding_window", "layer_types"):
        del config[key]
    draft = opened_hf(config)
    assert draft.config.window_source == "absent" and "--draft-window" in draft.warnings[0]
    config |= {"use_sliding_window": False, "sliding_window": None}
    draft = opened_hf(config)
    assert draft.config.window_source == "file" and draft.warnings == ()


OVERRIDES = [
    ({"window": 8}, "SF", 8, 64),
    ({"window": 0}, "FF", None, 0),
    ({"sink": 0}, "SF", 24, 0),
    ({"sink": 16, "window": 12}, "SF", 12, 16),
]


@pytest.mark.parametrize("options, pattern, window, sink", OVERRIDES)
def test_overrides_are_loud_and_recorded(opened, options, pattern, window, sink):
    """Catches an override that is silent, or that does not reach the configuration."""
    draft = opened(d.tiny_draft(), **options)
    config = draft.config
    assert (config.window_pattern, config.window, config.sink) == (pattern, window, sink)
    assert len(draft.warnings) == len(options)
    assert all("overridden" in warning for warning in draft.warnings)
    if "window" in options:
        assert config.window_source == "override"
    if "sink" in options:
        assert config.sink_source == "override"


def test_window_override_of_a_full_draft_slides_all_layers(opened):
    """Catches an override that finds no sliding layer and does nothing."""
    draft = opened(without_window(d.tiny_draft()), window=8)
    assert (draft.config.window_pattern, draft.config.window, draft.config.sink) == ("SS", 8, 64)
    assert "overridden: 8 instead of none" in draft.warnings[0]


@pytest.mark.parametrize(
    "options, fragment",
    [({"window": 3}, "at least the block size 4"), ({"window": -1}, "is -1, expected"),
     ({"window": True}, "is True, expected"), ({"sink": -1}, "is -1, expected"),
     ({"sink": 2.0}, "is 2.0, expected"), ({"window": 0, "sink": 4}, "nothing to pin")],
)  # fmt: skip
def test_senseless_override_is_refused(opened, options, fragment):
    """Catches an override that is clamped or ignored."""
    with pytest.raises(UsageError, match=fragment):
        opened(d.tiny_draft(), **options)


# ---- malformed GGUF drafts (report A44) -------------------------------------------------------

REQUIRED = (
    "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "context_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "block_size",
    "attention.sliding_window_pattern", "target_layers",
)  # fmt: skip


@pytest.mark.parametrize("suffix", REQUIRED)
def test_missing_required_key_is_named(opened, suffix):
    """Catches a constant of a model family standing in for a missing key."""
    with pytest.raises(FormatError, match=f"metadata key dflash.{suffix} is missing"):
        opened(d.tiny_draft().drop(f"dflash.{suffix}"))


BAD_KEYS = [
    ("dflash.target_layers", w.I32, [], "one-based. is empty, expected the target layers"),
    ("dflash.target_layers", w.I32, [3, 3], r"layers \[2, 2\] with layer 2 twice"),
    ("dflash.target_layers", w.I32, [0, 3], r"layers \[-1, 2\], expected layers from 0 on"),
    ("dflash.target_layers", w.I32, [1, 2, 3], "fc.weight fuses 2 taps of 64.*list has 3 layers"),
    ("dflash.target_layers", w.I32, [1], "fc.weight fuses 2 taps of 64.*list has 1 layers"),
    ("dflash.target_layers", w.F32, [1.0, 3.0], "an array of float32 values, expected .*integers"),
    ("dflash.target_layers", w.STRING, ["1"], "is an array of strings, expected an array of num"),
    ("dflash.target_layers", w.I32, list(range(1, 600)), "a list of 599 layers, expected at most"),
    ("dflash.block_size", w.U32, 1, "the block size is 1, expected at least 2"),
    ("dflash.block_size", w.U32, 0, "dflash.block_size is 0, expected 1 to"),
    ("dflash.block_size", w.U32, 25, "sliding window is 24, expected at least the block size 25"),
    ("dflash.block_count", w.U32, 600, "block_count is 600, expected at most 512"),
    ("dflash.attention.head_count_kv", w.U32, 3, "heads is 3, expected a divisor of 4 heads"),
    ("dflash.attention.head_count", w.U32, [4, 2], r"is \[4, 2\], expected the same in all layers"),
    ("dflash.attention.value_length", w.U32, 16, "value_length is 16, expected 32"),
    ("dflash.attention.sliding_window_pattern", w.BOOL, [1], "1 bool values, expected 2 bools"),
    ("dflash.attention.causal", w.U32, 1, "attention.causal is an integer, expected a bool"),
    ("dflash.rope.dimension_count", w.U32, 34, "rotated dimensions is 34, expected an even"),
    ("dflash.rope.dimension_sections", w.I32, [8, 4, 4, 0], r"expected \[16, 0, 0, 0\]"),
    ("dflash.rope.freq_base_swa", w.F32, 1e4, "freq_base_swa is 10000.0, expected 7000.0"),
    ("dflash.rope.scaling.type", w.STRING, "longrope", "'longrope', expected none, linear or yarn"),
    ("dflash.hidden_activation", w.STRING, "relu", "'relu', expected one of silu, gelu"),
    ("tokenizer.ggml.mask_token_id", w.U32, 7, "mask token id is 7, expected below .* size 7"),
    ("tokenizer.ggml.mask_token_id", w.I32, -1, "mask_token_id is -1, expected a token id"),
    ("dflash.vocab_size", w.U32, 9, "vocab_size is 9, expected 7, the tokens"),
    ("dflash.expert_count", w.U32, 8, "expert_count is 8 .a mixture of experts."),
    ("dflash.attn_logit_softcapping", w.F32, 50.0, "attn_logit_softcapping is 50.0, expected no"),
    ("dflash.hyper_connection.count", w.U32, 2, "a DSV4-DSpark draft"),
    ("dflash.sample_from_anchor", w.BOOL, 1, "a DSpark draft"),
    ("dflash.selector_top_k", w.U32, 4, "selector_top_k says DFlash2, but none of its convolution"),
    ("dflash.conv_group_size", w.U32, 16, "conv_group_size says DFlash2"),
]


@pytest.mark.parametrize("key, tag, value, fragment", BAD_KEYS)
def test_malformed_gguf_draft_has_its_own_sentence(opened, key, tag, value, fragment):
    """Catches a malformed draft that loads, crashes, or gets a message about something else."""
    with pytest.raises(FormatError, match=fragment) as caught:
        opened(d.tiny_draft().set(key, tag, value))
    assert "draft.gguf: " in str(caught.value) and "\n" not in str(caught.value)


BAD_V2 = [
    ("conv_group_size", 24, "convolution group size is 24, expected a divisor of .* 64"),
    ("conv_kernel_size", 5, "kernel size is 5, expected at most the block size 4"),
    ("selector_top_k", 8, "top k is 8, expected at most the vocabulary size 7"),
    ("selector_rank", 64, r"selector_predecessor.weight has shape \(7, 32\).*expected \(7, 64\)"),
    ("conv_group_size", 32, r"attn_conv_proj.weight has shape \(16, 64\).*expected \(8, 64\)"),
]


@pytest.mark.parametrize("suffix, value, fragment", BAD_V2)
def test_malformed_dflash2_numbers(opened, suffix, value, fragment):
    """Catches convolution and selector numbers that do not fit the tensors."""
    with pytest.raises(FormatError, match=fragment):
        opened(d.tiny_draft("dflash2").set(f"dflash.{suffix}", w.U32, value))


def test_missing_dflash2_number_is_named(opened):
    """Catches a DFlash2 draft run with a default group, rank or top k."""
    for suffix in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        with pytest.raises(FormatError, match=f"dflash.{suffix} is missing"):
            opened(d.tiny_draft("dflash2").drop(f"dflash.{suffix}"))


FORK = "dflash-draft."
BAD_FORK = [
    ("dflash.n_target_features", w.U32, 64, "n_target_features is 64, expected 128, because"),
    ("dflash.n_target_layers", w.U32, 5, "n_target_layers is 5, expected 2, because"),
    ("dflash.target_layer_ids", w.I32, [-1, 0], r"layers \[-1, 0\], expected layers from 0 on"),
    ("dflash.mask_token_id", w.U32, 9, "mask token id is 9, expected below"),
    ("target_layers", w.I32, [2, 0], "expected the first to be the second plus one"),
]


@pytest.mark.parametrize("suffix, tag, value, fragment", BAD_FORK)
def test_malformed_fork_draft_has_its_own_sentence(opened, suffix, tag, value, fragment):
    """Catches the fork's redundant numbers being ignored."""
    with pytest.raises(FormatError, match=fragment):
        opened(d.tiny_draft(arch="dflash-draft").set(FORK + suffix, tag, value))


def test_fork_list_of_unknown_base_is_refused(opened):
    """Catches a guess where converters disagree whether target_layers counts from 0 or 1."""
    b = d.tiny_draft(arch="dflash-draft").drop(FORK + "dflash.target_layer_ids")
    with pytest.raises(FormatError, match="dflash.target_layer_ids is missing, so the target"):
        opened(b)
    with pytest.raises(UnsupportedError, match="converters disagree"):
        opened(b.add_array(FORK + "target_layers", w.I32, [1, 2]))


def test_fork_without_tokenizer_takes_the_vocabulary_from_the_codebook(opened):
    """Catches a fork file refused, or its mask token unchecked, for lack of a tokenizer."""
    b = d.tiny_draft("dflash2", "dflash-draft").drop("tokenizer.ggml.tokens")
    config = opened(b).config
    assert config.vocab_size == w.VOCAB
    assert config.defaults_taken == (
        "vocabulary size absent: 7, the rows of selector_predecessor.weight",
    )
    b = d.tiny_draft("dflash", "dflash-draft").drop("tokenizer.ggml.tokens")
    assert opened(b).config.vocab_size is None


# ---- recognition ------------------------------------------------------------------------------


def test_target_as_draft_says_it_is_a_target(tmp_path, opened, opened_hf):
    """Catches 'missing key' for a target given as the draft."""
    with pytest.raises(UsageError, match=r"this is a target .architecture llama.*--model"):
        opened(w.tiny_model("llama"))
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}
    with pytest.raises(UsageError, match=r"this is a target .architecture Qwen3ForCausalLM"):
        opened_hf(config)


def test_other_draft_architecture_is_named(opened):
    """Catches an EAGLE draft read as DFlash."""
    b = w.GGUFBuilder().add("general.architecture", w.STRING, "eagle3")
    b.add_array("eagle3.target_layers", w.I32, [1, 2])
    with pytest.raises(UnsupportedError, match="a draft of architecture 'eagle3'"):
        opened(b)


def test_forks_are_recognised_as_drafts(tmp_path):
    """Catches a fork's draft passed as the main model being called an unknown architecture."""
    for arch in FORKS:
        assert is_draft(open_gguf(d.tiny_draft(arch=arch).write(tmp_path / "x.gguf")))


def test_no_model_constants_in_the_loader():
    """Catches a tap list, a window or a RoPE base of a model family in the draft's loader."""
    from pathlib import Path

    import cudflash.loader.draft_config as module

    folder = Path(module.__file__).parent
    for path in [*folder.glob("draft_*.py"), folder / "pairing.py"]:
        code = re.sub(r'""".*?"""|#.*', "", path.read_text(), flags=re.S)
        assert not re.search(r"\b(2048|2112|1024|500_?000|10_?000_?000|1e7|1e6|5e5)\b", code), path
        assert not re.search(r"[\[(]\d+, ?\d+, ?\d+, ?\d+", code), path
