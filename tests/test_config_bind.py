"""Metadata to configuration, and strict binding: nothing that changes numbers passes silently."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from cudflash.loader.arch import SUPPORTED_ARCHITECTURES, is_draft
from cudflash.loader.bind import bind_target
from cudflash.loader.config import read_target_config
from cudflash.loader.ggml_types import GGMLType
from cudflash.loader.gguf import open_gguf
from cudflash.loader.summary import summarize

from cudflash import __version__
from cudflash.errors import FormatError, UnsupportedError, UsageError
from tests.helpers import gguf_writer as w
from tests.helpers.vectors import vector_path

ARCHES = ["llama", "qwen2", "qwen3", "gemma3", "muse-glimmer"]


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes a builder and opens the file."""
    return lambda builder: open_gguf(builder.write(tmp_path / "model.gguf"))


@pytest.fixture
def config_of(opened):
    """Return a function from builder to configuration."""
    return lambda builder: read_target_config(opened(builder))


# ---- real files ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("variant", ["f32", "kq"])
def test_recorded_targets_bind_completely(arch, variant):
    """Catches a tensor name, shape or key of an architecture that real converters write."""
    target = bind_target(open_gguf(vector_path(f"targets/{arch}-{variant}.gguf")))
    assert target.config.arch == arch and target.extra_tensors == ()
    layer = target.weights.layers[-1]
    assert len(target.weights.layers) == target.config.n_layers
    assert layer.attn_q.shape[0] == target.config.layers[-1].n_heads * target.config.head_dim
    assert (layer.attn_gate is not None) == (arch == "muse-glimmer")
    assert (layer.attn_q_norm is not None) == (arch in ("qwen3", "gemma3", "muse-glimmer"))
    assert (layer.post_ffw_norm is not None) == (arch in ("gemma3", "muse-glimmer"))
    assert (layer.attn_q_bias is not None) == (arch == "qwen2")
    assert layer.attn_output_bias is None
    assert (target.weights.rope_freqs is not None) == (arch == "llama")
    tied = target.weights.output is target.weights.token_embd
    assert tied == target.config.tied_output == (arch in ("qwen2", "gemma3"))


def test_gemma3_target_has_its_windows_bases_and_scale():
    """Catches window pattern, rope base or embedding scale of sliding layers mixed up."""
    config = read_target_config(open_gguf(vector_path("targets/gemma3-kq.gguf")))
    assert [layer.window for layer in config.layers] == [24, 24, None, 24]
    assert [layer.rope.freq_base for layer in config.layers] == [1e4, 1e4, 1e6, 1e4]
    assert config.embedding_scale == 16.0 and config.activation == "gelu_tanh"
    assert "gemma3.rope.freq_base_swa absent: 10000.0" in config.defaults_taken


def test_muse_target_rotates_only_sliding_layers():
    """Catches RoPE in full layers, or the wrong epsilon of the post norms."""
    config = read_target_config(open_gguf(vector_path("targets/muse-glimmer-kq.gguf")))
    assert [layer.window for layer in config.layers] == [32, 32, 32, None, 32, None]
    assert [layer.rope is None for layer in config.layers] == [False] * 3 + [True, False, True]
    assert config.layers[0].rope.style == "interleaved"
    assert config.layers[0].rope.freq_base == 500000.0
    assert (config.post_norm_eps, config.embedding_norm, config.attn_gate) == (1e-8, True, True)
    assert (config.logit_scale, config.final_softcap) == (0.4375, 12.0)


# ---- required keys and recorded defaults --------------------------------------------------------

GENERIC = [
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.layer_norm_rms_epsilon",
]  # fmt: skip
REQUIRED = (
    [(arch, suffix) for arch in ARCHES for suffix in GENERIC]
    + [(arch, "rope.freq_base") for arch in ARCHES if arch != "llama"]
    + [
        ("muse-glimmer", suffix)
        for suffix in ("attention.sliding_window", "logit_scale", "final_logit_softcapping")
    ]
)


@pytest.mark.parametrize("arch, suffix", REQUIRED)
def test_missing_required_key_is_an_error_naming_it(config_of, arch, suffix):
    """Catches a silent default (the soft cap of 30, a window of 0, a base of 10000)."""
    with pytest.raises(FormatError, match=f"metadata key {arch}.{suffix} is missing"):
        config_of(w.tiny_model(arch).drop(f"{arch}.{suffix}"))


DEFAULTS = [
    ("llama", "rope.freq_base", "10000.0", lambda c: c.layers[0].rope.freq_base == 10000.0),
    ("llama", "attention.head_count_kv", "4", lambda c: c.layers[0].n_kv_heads == 4),
    ("gemma3", "attention.sliding_window", "0", lambda c: c.layers[0].window is None),
    ("gemma3", "rope.freq_base_swa", "10000.0", lambda c: c.layers[0].rope.freq_base == 1e4),
    ("gemma3", "attention.sliding_window_pattern", "period 6", lambda c: c.layers[0].window == 24),
    ("muse-glimmer", "attention.sliding_window_pattern", "period 4", lambda c: c.layers[1].window),
    ("muse-glimmer", "rope.freq_base_swa", "5.*", lambda c: c.layers[0].rope.freq_base == 5e5),
    ("qwen3", "rope.dimension_count", "32", lambda c: c.layers[0].rope.n_dims == 32),
]


@pytest.mark.parametrize("arch, suffix, value, holds", DEFAULTS)
def test_default_is_taken_and_recorded(config_of, arch, suffix, value, holds):
    """Catches a default that is applied without being shown."""
    config = config_of(w.tiny_model(arch).drop(f"{arch}.{suffix}"))
    lines = [line for line in config.defaults_taken if line.startswith(f"{arch}.{suffix} ")]
    assert len(lines) == 1 and re.search(f"absent: .*{value}$", lines[0]), config.defaults_taken
    assert holds(config)


def test_head_sizes_default_to_hidden_over_heads(config_of):
    """Catches a head size taken from anywhere else when the keys are absent."""
    b = w.tiny_model("llama")
    b.drop("llama.attention.key_length").drop("llama.attention.value_length")
    config = config_of(b)
    assert config.head_dim == w.HIDDEN // w.HEADS == 16 and config.attn_scale == 0.25
    assert sum("_length absent: 16" in line for line in config.defaults_taken) == 2


def test_complete_file_takes_no_default(config_of):
    """Catches a key that is read under a wrong name, so its default always applies."""
    b = w.tiny_model("muse-glimmer", n_layers=4)
    b.add("muse-glimmer.rope.freq_base_swa", w.F32, 7000.0)
    b.add("muse-glimmer.rope.dimension_count", w.U32, 32)
    b.add("muse-glimmer.attention.sliding_window_pattern", w.U32, 2)
    config = config_of(b)
    assert config.defaults_taken == ()
    assert config.layers[0].rope.freq_base == 7000.0
    assert [layer.window for layer in config.layers] == [24, None, 24, None]


@pytest.mark.parametrize(
    "period, windows", [(0, [24] * 4), (1, [None] * 4), (3, [24, 24, None, 24])]
)
def test_sliding_period_follows_llama_cpp(config_of, period, windows):
    """Catches an off-by-one in the period rule: layer l slides iff l mod n < n - 1, 0 = all."""
    b = w.tiny_model("gemma3", 4).add("gemma3.attention.sliding_window_pattern", w.U32, period)
    assert [layer.window for layer in config_of(b).layers] == windows


def test_per_layer_arrays_are_read(config_of):
    """Catches one value used for all layers."""
    b = w.tiny_model("llama")
    b.set("llama.attention.head_count", w.U32, [4, 2])
    b.set("llama.attention.head_count_kv", w.U32, [2, 1])
    b.set("llama.feed_forward_length", w.I32, [96, 64])
    layers = config_of(b).layers
    assert [(la.n_heads, la.n_kv_heads, la.ffn_dim) for la in layers] == [(4, 2, 96), (2, 1, 64)]


def test_gemma3_27b_scales_attention_by_hidden_over_heads(config_of):
    """Catches 1/sqrt(head_dim) in the one size (62 layers) that uses another rule."""
    config = config_of(w.tiny_model("gemma3", 62))
    assert config.attn_scale == 1 / math.sqrt(w.HIDDEN // w.HEADS)
    assert config_of(w.tiny_model("gemma3", 61)).attn_scale == 1 / math.sqrt(w.HEAD_DIM)


def test_llama_scales_are_applied_and_zero_means_unset(config_of):
    """Catches optional scales ignored, or zero taken literally."""
    b = w.tiny_model("llama").add("llama.attention.scale", w.F32, 0.5)
    b.add("llama.embedding_scale", w.F32, 12.0)
    assert (config_of(b).attn_scale, config_of(b).embedding_scale) == (0.5, 12.0)
    b.set("llama.attention.scale", w.F32, 0.0).set("llama.embedding_scale", w.F32, 0.0)
    assert (config_of(b).attn_scale, config_of(b).embedding_scale) == (1 / math.sqrt(32), 1.0)


# ---- rope scaling -----------------------------------------------------------------------------


def scaled(kind: str | None, factor: float | None, arch: str = "llama") -> w.GGUFBuilder:
    b = w.tiny_model(arch)
    if kind is not None:
        b.add(f"{arch}.rope.scaling.type", w.STRING, kind)
    if factor is not None:
        b.add(f"{arch}.rope.scaling.factor", w.F32, factor)
    return b


@pytest.mark.parametrize(
    "kind, factor, scale",
    [(None, None, 1.0), ("none", 4.0, 1.0), ("linear", 4.0, 0.25), (None, 4.0, 0.25),
     (None, 0.0, 1.0), ("yarn", 4.0, 0.25)],
)  # fmt: skip
def test_rope_scaling_factor(config_of, kind, factor, scale):
    """Catches an ignored or inverted factor, and scaling applied where the type says none."""
    rope = config_of(scaled(kind, factor)).layers[0].rope
    assert rope.freq_scale == scale and (rope.yarn is not None) == (kind == "yarn")


def test_yarn_parameters_are_read_and_their_defaults_recorded(config_of):
    """Catches a YaRN parameter under a wrong name, or a wrong default."""
    b = scaled("yarn", 4.0)
    yarn = config_of(b).layers[0].rope.yarn
    assert (yarn.factor, yarn.original_context, yarn.ext_factor, yarn.attn_factor) == (4, 512, 1, 1)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.log_multiplier) == (32, 1, 0)
    assert sum("rope.scaling" in line for line in config_of(b).defaults_taken) == 6
    prefix = "llama.rope.scaling."
    b.add(prefix + "original_context_length", w.U32, 128).add(prefix + "attn_factor", w.F32, 0.75)
    for i, name in enumerate(("ext_factor", "attn_factor", "beta_fast", "beta_slow")):
        b.add(f"{prefix}yarn_{name}", w.F32, 2.0 + i)
    b.add(prefix + "yarn_log_multiplier", w.F32, 0.125)
    config = config_of(b)
    yarn = config.layers[0].rope.yarn
    assert (yarn.original_context, yarn.ext_factor, yarn.attn_factor) == (128, 2.0, 3.0)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.log_multiplier) == (4.0, 5.0, 0.125)
    assert config.layers[0].rope.attn_factor == 0.75
    assert not any("rope.scaling" in line for line in config.defaults_taken)


def test_gemma3_scales_only_full_layers(config_of):
    """Catches position scaling leaking into sliding layers."""
    b = scaled("linear", 8.0, "gemma3").add("gemma3.attention.sliding_window_pattern", w.U32, 2)
    assert [layer.rope.freq_scale for layer in config_of(b).layers] == [1.0, 0.125]


# ---- values that make no sense ------------------------------------------------------------------

BAD_VALUES = [
    ("llama", "block_count", w.U32, 0, "block_count is 0, expected 1 to"),
    ("llama", "block_count", w.U32, 100000, "block_count is 100000, expected at most 512"),
    ("llama", "block_count", w.F32, 2.0, "block_count is a floating-point number, expected an int"),
    ("llama", "embedding_length", w.U64, 1 << 40, f"embedding_length is {1 << 40}"),
    ("llama", "attention.head_count_kv", w.U32, 3, "is 3, expected a divisor of 4 heads"),
    ("llama", "attention.head_count", w.U32, [4, 4, 4], "3 uint32 values, expected 2 integers"),
    ("llama", "attention.head_count", w.U32, [4, 0], "is 0 for layer 1"),
    ("llama", "attention.layer_norm_rms_epsilon", w.F32, math.nan, "is nan, expected a finite"),
    ("llama", "attention.layer_norm_rms_epsilon", w.F32, 0.0, "is 0.0, expected a finite number"),
    ("llama", "attention.layer_norm_rms_epsilon", w.U32, 1, "is an integer, expected a floating"),
    ("llama", "attention.value_length", w.U32, 16, "value_length is 16, expected 32"),
    ("gemma3", "attention.key_length_swa", w.U32, 16, "key_length_swa is 16, expected 32"),
    ("llama", "rope.freq_base", w.F32, -1.0, "freq_base is -1.0"),
    ("llama", "rope.dimension_count", w.U32, 31, "dimension_count is 31, expected an even"),
    ("llama", "rope.dimension_count", w.U32, 16, "dimension_count is 16, expected the head size"),
    ("gemma3", "rope.dimension_count", w.U32, 34, "dimension_count is 34, expected an even"),
    ("llama", "rope.scaling.type", w.STRING, "longrope", "is 'longrope'.*longrope needs factors"),
    ("llama", "rope.scaling.type", w.STRING, "su", "is 'su', expected none, linear or yarn"),
    ("llama", "rope.scaling.type", w.STRING, "yarn", "factor is absent.*because .* is yarn"),
    ("llama", "rope.scaling.factor", w.F32, math.inf, "factor is inf"),
    ("muse-glimmer", "rope.scaling.factor", w.F32, 2.0, "type is linear, expected no scaling"),
    ("muse-glimmer", "logit_scale", w.F32, 0.0, "logit_scale is 0.0"),
    ("gemma3", "attention.sliding_window_pattern", w.BOOL, [1], "1 bool values, expected 2 bools"),
    ("llama", "vocab_size", w.U32, 9, "vocab_size is 9, expected 7, the tokens"),
    ("llama", "expert_count", w.U32, 8, "expert_count is 8 .a mixture of experts."),
    ("llama", "attention.causal", w.BOOL, 0, "attention.causal is False, expected true"),
    ("llama", "logit_scale", w.F32, 0.25, "logit_scale is 0.25, expected no such key"),
    ("qwen3", "final_logit_softcapping", w.F32, 30.0, "would change the numbers"),
    ("gemma3", "attn_logit_softcapping", w.F32, 50.0, "would change the numbers"),
    ("qwen2", "attention.scale", w.F32, [0.1, 0.2], "is not a number, expected no such key"),
]


@pytest.mark.parametrize("arch, suffix, tag, value, fragment", BAD_VALUES)
def test_bad_value_has_its_own_sentence(config_of, arch, suffix, tag, value, fragment):
    """Catches a value that is clamped, ignored, or fails later without a name."""
    with pytest.raises(FormatError, match=fragment) as caught:
        config_of(w.tiny_model(arch).set(f"{arch}.{suffix}", tag, value))
    assert "model.gguf: " in str(caught.value) and "\n" not in str(caught.value)


def test_vocabulary_is_required(config_of):
    """Catches a model without tokenizer that loads."""
    with pytest.raises(FormatError, match=r"tokenizer.ggml.tokens is missing"):
        config_of(w.tiny_model("llama").drop("tokenizer.ggml.tokens"))
    with pytest.raises(FormatError, match=r"tokenizer.ggml.tokens is empty"):
        config_of(w.tiny_model("llama").set("tokenizer.ggml.tokens", w.STRING, []))


# ---- recognition ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dflash", "dflash-draft"])
def test_draft_as_target_says_it_is_a_draft(tmp_path, opened, name):
    """Catches 'unknown architecture' for a draft given as the main model (report A47)."""
    g = opened(w.GGUFBuilder().add("general.architecture", w.STRING, name))
    assert is_draft(g)
    with pytest.raises(UsageError, match=f"this is a draft .architecture {name}.*--draft"):
        bind_target(g)


def test_draft_is_recognised_by_metadata_not_by_name(tmp_path):
    """Catches recognition by file name (report A48): a target may be called draft."""
    target = open_gguf(w.tiny_model("llama").write(tmp_path / "dflash-draft.gguf"))
    assert not is_draft(target) and bind_target(target)
    b = w.GGUFBuilder().add("general.architecture", w.STRING, "assistant")
    b.add_array("assistant.target_layers", w.I32, [1, 2])
    assert is_draft(open_gguf(b.write(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    "name, fragment",
    [
        ("qwen35moe", "qwen35moe .a mixture of experts. is not supported"),
        ("qwen3next", "qwen3next .* is not supported"),
        ("mamba", "'mamba' is unknown"),
    ],
)
def test_other_architecture_lists_the_supported_ones_and_the_version(opened, name, fragment):
    """Catches a bare 'unknown model architecture' (report A49)."""
    with pytest.raises(UnsupportedError, match=fragment) as caught:
        bind_target(opened(w.GGUFBuilder().add("general.architecture", w.STRING, name)))
    assert __version__ in str(caught.value)
    assert all(arch in str(caught.value) for arch in SUPPORTED_ARCHITECTURES)


def test_architecture_is_required(opened):
    """Catches a guess where the file does not say what it is."""
    with pytest.raises(FormatError, match="general.architecture is missing"):
        bind_target(opened(w.GGUFBuilder()))
    with pytest.raises(FormatError, match="general.architecture is empty"):
        bind_target(opened(w.GGUFBuilder().add("general.architecture", w.STRING, "")))


# ---- binding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
def test_every_tensor_is_needed_with_its_exact_shape(tmp_path, arch):
    """Catches an unchecked tensor: each one, removed or a row longer, is refused by name."""
    names = [t.name for t in w.tiny_model(arch, 1).tensors]
    path = tmp_path / "model.gguf"
    for name in names:
        if not (name == "output.weight" and arch != "muse-glimmer"):  # absent means tied
            g = open_gguf(w.tiny_model(arch, 1).drop_tensor(name).write(path))
            with pytest.raises(FormatError, match=rf"missing \({name}\)"):
                bind_target(g)
        b = w.tiny_model(arch, 1)
        spec = b.tensor(name)
        if len(spec.ne) == 2:
            spec.ne, spec.data = (spec.ne[0], spec.ne[1] + 1), spec.data + bytes(34 * 8)
        else:
            spec.ne, spec.data = (spec.ne[0] + 1,), spec.data + bytes(4)
        with pytest.raises(FormatError, match=f"{name} has .*expected"):
            bind_target(open_gguf(b.write(path)))


def test_missing_tensors_are_listed_together(opened):
    """Catches one error per run for a file that lacks many tensors (report A46)."""
    b = w.tiny_model("llama")
    b.tensors = [t for t in b.tensors if not t.name.startswith("blk.1.")]
    with pytest.raises(FormatError, match=r"9 of the 21 needed are missing .*and 1 more\)"):
        bind_target(opened(b))
    b.tensors = []
    with pytest.raises(FormatError, match="holds no tensors at all but"):
        bind_target(opened(b))


def test_vocabulary_must_match_the_embedding(opened):
    """Catches a tokenizer of another model."""
    b = w.tiny_model("llama").set("tokenizer.ggml.tokens", w.STRING, ["a"] * 8)
    with pytest.raises(FormatError, match="token_embd.weight has 7 rows, expected 8, the tokens"):
        bind_target(opened(b))


def test_unsupported_types_are_listed_with_the_supported_ones(opened):
    """Catches a type that reaches the kernels, or fails without its name."""
    b = w.tiny_model("llama")
    b.tensor("blk.0.ffn_up.weight").type_id = 99
    b.tensor("blk.1.attn_norm.weight").type_id = int(GGMLType.I32)
    with pytest.raises(UnsupportedError, match=r"blk.0.ffn_up.weight type 99.*Q4_K"):
        bind_target(opened(b))
    b.tensor("blk.0.ffn_up.weight").type_id = w.TYPE_Q8_0
    with pytest.raises(UnsupportedError, match=r"1 norms or biases .*blk.1.attn_norm.weight I32"):
        bind_target(opened(b))


def test_projections_stay_packed_views_of_the_map(opened):
    """Catches weights copied or expanded at load (report A57)."""
    b = w.tiny_model("llama")
    g = opened(b)
    ref = bind_target(g).weights.layers[1].ffn_down
    assert (ref.name, ref.type, ref.shape) == ("blk.1.ffn_down.weight", GGMLType.Q8_0, (64, 96))
    assert np.shares_memory(ref.raw, g.data(ref.name)) and not ref.raw.flags.writeable
    assert ref.raw.shape == (64, 3 * 34) and ref.raw.tobytes() == b.tensor(ref.name).data


def test_fused_qkv_is_split_by_rows(opened):
    """Catches wrong row borders, a copy, or a bias not split with its weight."""
    b = w.tiny_model("qwen2")
    for index in range(2):
        data, bias = b"", b""
        for part in "qkv":
            data += b.tensor(f"blk.{index}.attn_{part}.weight").data
            bias += b.tensor(f"blk.{index}.attn_{part}.bias").data
            b.drop_tensor(f"blk.{index}.attn_{part}.weight")
            b.drop_tensor(f"blk.{index}.attn_{part}.bias")
        name = f"blk.{index}.attn_qkv"
        b.tensors.append(w.TensorSpec(name + ".weight", (64, 256), w.TYPE_Q8_0, data))
        b.tensors.append(w.TensorSpec(name + ".bias", (256,), w.TYPE_F32, bias))
    plain, target = w.tiny_model("qwen2"), bind_target(opened(b))
    for index, layer in enumerate(target.weights.layers):
        for part in "qkv":
            ref = getattr(layer, f"attn_{part}")
            same = plain.tensor(f"blk.{index}.attn_{part}.weight")
            assert ref.raw.tobytes() == same.data and ref.shape == same.ne[::-1]
            bias = getattr(layer, f"attn_{part}_bias")
            assert bias.tobytes() == plain.tensor(f"blk.{index}.attn_{part}.bias").data
    assert target.extra_tensors == ()


def test_bias_is_optional_as_a_kind_but_not_per_layer(opened):
    """Catches a bias that one layer has and another silently lacks."""
    b = w.tiny_model("llama")
    for index in range(2):
        b.add_f32(f"blk.{index}.attn_output.bias", np.arange(w.HIDDEN))
        b.add_f32(f"blk.{index}.attn_q.bias", np.arange(128))
    layer = bind_target(opened(b)).weights.layers[1]
    assert layer.attn_output_bias.tolist() == list(range(w.HIDDEN))
    assert layer.attn_q_bias.shape == (128,) and layer.attn_k_bias is None
    with pytest.raises(FormatError, match=r"missing \(blk.1.attn_q.bias\)"):
        bind_target(opened(b.drop_tensor("blk.1.attn_q.bias")))


def test_output_is_tied_when_absent_and_recorded(opened):
    """Catches a tied head that is not shown, or a second copy of the table."""
    target = bind_target(opened(w.tiny_model("llama").drop_tensor("output.weight")))
    assert target.weights.output is target.weights.token_embd and target.config.tied_output
    assert "output.weight absent: tied to token_embd.weight" in target.config.defaults_taken


def test_extra_tensor_without_effect_is_reported(opened):
    """Catches refusal of harmless leftovers, and silence about them."""
    b = w.tiny_model("llama").add_f32("blk.0.attn_rot_embd.weight", [1.0]).add_f32("note", [1.0])
    g = opened(b)
    assert bind_target(g).extra_tensors == ("blk.0.attn_rot_embd.weight", "note")
    assert summarize(g)["model"]["extra_tensors"] == ["blk.0.attn_rot_embd.weight", "note"]


@pytest.mark.parametrize(
    "arch, name",
    [("llama", "blk.0.ffn_up.bias"), ("llama", "blk.0.attn_q.scale"), ("llama", "output.bias"),
     ("llama", "rope_factors_long.weight"), ("qwen2", "rope_freqs.weight"),
     ("qwen2", "blk.1.attn_q_norm.weight"), ("llama", "blk.0.attn_sinks.weight"),
     ("llama", "blk.0.attn_qkv.weight"), ("qwen3", "blk.0.attn_output.bias")],
)  # fmt: skip
def test_extra_tensor_that_changes_numbers_is_refused(opened, arch, name):
    """Catches a graph that ignores a tensor llama.cpp would apply."""
    with pytest.raises(UnsupportedError, match=f"would change the numbers .*{name}"):
        bind_target(opened(w.tiny_model(arch).add_f32(name, [1.0])))


def test_layers_beyond_block_count_are_refused(opened):
    """Catches a damaged block_count that would run a shorter model."""
    with pytest.raises(FormatError, match=r"blk.1.* belongs to layer 1, expected layers below"):
        bind_target(opened(w.tiny_model("llama").set("llama.block_count", w.U32, 1)))


def test_rope_freqs_are_bound_and_checked(opened):
    """Catches Llama 3 factors ignored, of a wrong length, or zero (they divide)."""
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    target = bind_target(opened(w.tiny_model("llama").add_f32("rope_freqs.weight", factors)))
    assert target.weights.rope_freqs.tolist() == factors.tolist()
    with pytest.raises(FormatError, match=r"rope_freqs.weight has shape .15,.*expected .16,"):
        bind_target(opened(w.tiny_model("llama").add_f32("rope_freqs.weight", factors[1:])))
    factors[3] = 0
    with pytest.raises(FormatError, match="rope_freqs.weight holds 0.0 at index 3"):
        bind_target(opened(w.tiny_model("llama").add_f32("rope_freqs.weight", factors)))


def test_non_finite_norm_is_refused(opened):
    """Catches damage in data that would turn every logit into NaN."""
    b = w.tiny_model("llama")
    values = np.ones(w.HIDDEN, "<f4")
    values[5] = np.nan
    b.tensor("blk.1.ffn_norm.weight").data = values.tobytes()
    with pytest.raises(FormatError, match="blk.1.ffn_norm.weight holds nan at index 5"):
        bind_target(opened(b))
