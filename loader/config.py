"""Metadata of a target model as frozen configuration: every number the forward pass needs.

Owns the meaning of keys per architecture (llama, qwen2, qwen3, gemma3, muse-glimmer; those of
qwen35 alone are read in ``config_hybrid``). Must not read tensor data. Invariant: two files that
give equal configurations are run by the same program.

Source: llama.cpp 0c1e57098bba, ``src/llama-model.cpp`` 1321-1470 (generic keys) and
``src/models/{llama,qwen2,qwen3,gemma3,muse-glimmer}.cpp``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from cudflash.loader.arch import MAX_LAYERS, KeyReader, target_architecture
from cudflash.loader.gguf import GGUFFile

from cudflash.errors import UnsupportedError

DEFAULT_FREQ_BASE = 10000.0
MUSE_POST_NORM_EPS = 1e-8  # a constant of llama.cpp's muse-glimmer graph, not stored in files
GEMMA3_27B_LAYERS = 62  # the one gemma3 size whose attention scale is not 1/sqrt(head_dim)


@dataclass(frozen=True)
class YarnConfig:
    """YaRN parameters as stored; the rope table turns them into angles and a magnitude."""

    factor: float  # context extension factor, > 0
    original_context: int  # positions the model was trained on
    ext_factor: float  # weight of the extrapolated angles, llama.cpp default 1
    attn_factor: float  # rope.scaling.yarn_attn_factor, default 1
    beta_fast: float  # rotations, default 32
    beta_slow: float  # rotations, default 1
    log_multiplier: float  # rope.scaling.yarn_log_multiplier, 0 = plain magnitude formula


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding of one layer."""

    style: Literal["interleaved", "split_half"]  # pairs (2i, 2i+1) or (i, i + n_dims/2)
    n_dims: int  # leading head dimensions that are rotated, even
    freq_base: float
    freq_scale: float  # multiplies positions: 1/factor for linear and YaRN scaling, else 1
    yarn: YarnConfig | None
    attn_factor: float  # rope.scaling.attn_factor: multiplies cos and sin, 1 = none
    # pairs that follow time, height, width and a fourth position, interleaved; None = all time
    sections: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DeltaConfig:
    """A gated-delta-net layer: what it has instead of attention."""

    n_k_heads: int  # of queries and keys
    n_v_heads: int  # value head j uses key head j % n_k_heads (tiled order)
    k_dim: int
    v_dim: int
    conv_taps: int  # width of the causal convolution, the current row included

    @property
    def k_width(self) -> int:
        """Values of all queries, and of all keys, of a row."""
        return self.n_k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        """Values of all value heads of a row."""
        return self.n_v_heads * self.v_dim

    @property
    def conv_width(self) -> int:
        """Channels that are convolved: queries, keys, values."""
        return 2 * self.k_width + self.v_width


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    n_heads: int  # of attention; 0 in a delta-net layer, as the next
    n_kv_heads: int
    ffn_dim: int
    window: int | None  # key p0 is visible to query p1 iff 0 <= p1 - p0 < window; None = full
    rope: RopeConfig | None  # None: no position encoding at all
    delta: DeltaConfig | None = None  # None: an attention layer


@dataclass(frozen=True)
class TargetConfig:
    """A target model, complete: nothing outside it changes the numbers but the weights."""

    arch: str
    name: str  # general.name, "" when absent
    n_layers: int
    hidden_dim: int  # residual width
    head_dim: int
    vocab_size: int
    context_length: int  # positions the model was trained for
    rms_eps: float
    post_norm_eps: float  # of post_attention_norm and post_ffw_norm
    layers: tuple[LayerConfig, ...]
    embedding_scale: float  # multiplies embedding rows, 1.0 = none
    embedding_norm: bool  # weightless RMS norm of the embedding row
    attn_scale: float  # multiplies q.k
    attn_softcap: float | None
    activation: Literal["silu", "gelu_tanh"]
    attn_gate: bool  # attention output * sigmoid(attn_gate x)
    qk_norm: bool  # per-head RMS norm of q and k before RoPE
    post_norms: bool  # norms after attention and after the FFN, before the residual add
    logit_scale: float  # multiplies logits before the soft cap, 1.0 = none
    final_softcap: float | None
    tied_output: bool  # the output head is token_embd
    defaults_taken: tuple[str, ...] = ()  # one line per absent key that was given a default
    fused_q_gate: bool = False  # attn_q gives head_dim queries, then head_dim gates, per head
    pre_ffn_norm: str = "ffn_norm"  # tensor that norms the input of the feed-forward
    mtp: LayerConfig | None = None  # the block that predicts one token further (NextN), if any

    @property
    def recurrent(self) -> bool:
        """Whether any layer has a state that cannot be cut at a position."""
        return any(layer.delta is not None for layer in self.layers)


def read_target_config(gguf: GGUFFile) -> TargetConfig:
    """Read the configuration of a target model.

    Parameters
    ----------
    gguf : GGUFFile

    Returns
    -------
    TargetConfig

    Raises
    ------
    FormatError
        If a required key is missing, has another type, or has a value that makes no sense.
    UnsupportedError
        If the architecture or one of its variants is not supported.
    UsageError
        If the file is a draft.
    """
    arch = target_architecture(gguf)
    keys = KeyReader(gguf, arch)
    read = _READERS[arch]
    keys.refuse_foreign(_DEFINED.get(arch, frozenset()))
    config = read(keys, _read_common(keys))
    return replace(config, defaults_taken=tuple(keys.defaults_taken))


def _read_common(keys: KeyReader) -> TargetConfig:
    """Read what all architectures share; RoPE, windows and switches are filled in by each."""
    n_layers = keys.count("block_count")
    if n_layers > MAX_LAYERS:
        raise keys.fail("block_count", n_layers, f"at most {MAX_LAYERS}")
    n_nextn = keys.count("nextn_predict_layers", 0, least=0, note=False)  # of these blocks
    if n_nextn > 1 or n_nextn >= n_layers:
        expected = "0 or 1 block after at least one layer"
        raise keys.fail("nextn_predict_layers", n_nextn, expected, UnsupportedError)
    hidden_dim = keys.count("embedding_length")
    n_heads = keys.per_layer("attention.head_count", n_layers)
    n_kv_heads = keys.per_layer("attention.head_count_kv", n_layers, default=None)
    if n_kv_heads is None:
        n_kv_heads = n_heads
        keys.default(keys.key("attention.head_count_kv"), f"attention.head_count {n_heads[0]}")
    for heads, kv_heads in zip(n_heads, n_kv_heads, strict=True):
        if heads % kv_heads:
            raise keys.fail("attention.head_count_kv", kv_heads, f"a divisor of {heads} heads")
    ffn_dim = keys.per_layer("feed_forward_length", n_layers)
    head_dim = _read_head_dim(keys, hidden_dim, n_heads)
    rms_eps = keys.number("attention.layer_norm_rms_epsilon")
    tied = "output.weight" not in keys.gguf.tensors
    if tied and keys.arch != "muse-glimmer":
        keys.default("output.weight", "tied to token_embd.weight")
    layers = tuple(
        LayerConfig(n_heads=h, n_kv_heads=kv, ffn_dim=f, window=None, rope=None)
        for h, kv, f in zip(n_heads, n_kv_heads, ffn_dim, strict=True)
    )
    return TargetConfig(
        arch=keys.arch,
        name=keys.gguf.get("general.name", "", str),
        n_layers=n_layers - n_nextn,
        hidden_dim=hidden_dim,
        head_dim=head_dim,
        vocab_size=keys.vocab_size(),
        context_length=keys.count("context_length"),
        rms_eps=rms_eps,
        post_norm_eps=rms_eps,
        layers=layers[: n_layers - n_nextn],
        embedding_scale=1.0,
        embedding_norm=False,
        attn_scale=1.0 / math.sqrt(head_dim),
        attn_softcap=None,
        activation="silu",
        attn_gate=False,
        qk_norm=False,
        post_norms=False,
        logit_scale=1.0,
        final_softcap=None,
        tied_output=tied,
        mtp=layers[-1] if n_nextn else None,
    )


def _read_head_dim(keys: KeyReader, hidden_dim: int, n_heads: tuple[int, ...]) -> int:
    """Read key_length and check that every other head size in the file equals it."""
    even_split = len(set(n_heads)) == 1 and hidden_dim % n_heads[0] == 0
    if keys.has("attention.key_length"):
        head_dim = keys.count("attention.key_length")
    elif not even_split:
        raise keys.fail("attention.key_length", "absent", "a value, because heads differ in size")
    else:
        head_dim = keys.count("attention.key_length", hidden_dim // n_heads[0])
    if keys.has("attention.value_length") or not even_split:
        value_dim = keys.count("attention.value_length")
    else:
        value_dim = keys.count("attention.value_length", hidden_dim // n_heads[0])
    if value_dim != head_dim:
        expected = f"{head_dim} (attention.key_length)"
        raise keys.fail("attention.value_length", value_dim, expected, UnsupportedError)
    for suffix in ("attention.key_length_swa", "attention.value_length_swa"):
        other = keys.count(suffix, head_dim, note=False)
        if other != head_dim:
            expected = f"{head_dim} (attention.key_length)"
            raise keys.fail(suffix, other, expected, UnsupportedError)
    return head_dim


def _read_rope(keys: KeyReader, base: TargetConfig, style: str) -> RopeConfig:
    """Read the RoPE of full-attention layers."""
    n_dims = keys.count("rope.dimension_count", base.head_dim)
    if n_dims % 2 or n_dims > base.head_dim:
        expected = f"an even number up to the head size {base.head_dim}"
        raise keys.fail("rope.dimension_count", n_dims, expected)
    if keys.arch in ("llama", "qwen2", "qwen3") and n_dims != base.head_dim:
        raise keys.fail("rope.dimension_count", n_dims, f"the head size {base.head_dim}")
    # why only llama may lack it: converters wrote no base for the first LLaMA models
    if keys.arch == "llama":
        freq_base = keys.number("rope.freq_base", DEFAULT_FREQ_BASE)
    else:
        freq_base = keys.number("rope.freq_base")
    freq_scale, yarn = _read_scaling(keys, base.context_length)
    attn_factor = keys.number("rope.scaling.attn_factor", 1.0, note=False)
    return RopeConfig(style, n_dims, freq_base, freq_scale, yarn, attn_factor)


def _read_scaling(keys: KeyReader, context_length: int) -> tuple[float, YarnConfig | None]:
    """Read rope.scaling.*: (factor on positions, YaRN parameters or None)."""
    kind = keys.text("rope.scaling.type")
    if kind == "longrope":
        raise UnsupportedError(
            f"{keys.gguf.path}: {keys.key('rope.scaling.type')} is 'longrope', expected none, "
            "linear or yarn; longrope needs factors this version does not apply, use another model"
        )
    if kind not in (None, "none", "linear", "yarn"):
        expected = "none, linear or yarn"
        raise keys.fail("rope.scaling.type", repr(kind), expected, UnsupportedError)
    if kind == "none":
        return 1.0, None
    # rope.scale_linear is the name of the factor in older files
    suffix = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.number(suffix, 0.0, positive=False, note=False)
    if kind is None:
        if factor not in (0.0, 1.0):
            keys.default(keys.key("rope.scaling.type"), "linear")
        return (1.0 / factor if factor else 1.0), None
    if factor == 0.0:
        suffix = "rope.scaling.factor"
        found = "0" if keys.has(suffix) else "absent"
        raise keys.fail(suffix, found, f"a factor, because rope.scaling.type is {kind}")
    if kind == "linear":
        return 1.0 / factor, None
    yarn = YarnConfig(
        factor=factor,
        original_context=keys.count("rope.scaling.original_context_length", context_length),
        ext_factor=keys.number("rope.scaling.yarn_ext_factor", 1.0, positive=False),
        attn_factor=keys.number("rope.scaling.yarn_attn_factor", 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0, positive=False),
    )
    return 1.0 / factor, yarn


def _with_rope(base: TargetConfig, rope: RopeConfig) -> tuple[LayerConfig, ...]:
    return tuple(replace(layer, rope=rope) for layer in base.layers)


def _note_ignored_window(keys: KeyReader) -> None:
    """Record a window that llama.cpp does not apply in an architecture without sliding layers."""
    window = keys.count("attention.sliding_window", 0, least=0, note=False)
    if window:
        key = keys.key("attention.sliding_window")
        keys.defaults_taken.append(f"{key} {window} not applied: all layers see the whole context")


def _read_llama(keys: KeyReader, base: TargetConfig) -> TargetConfig:
    _note_ignored_window(keys)
    rope = _read_rope(keys, base, "interleaved")
    # zero means "not set" for both keys in llama.cpp
    attn_scale = keys.number("attention.scale", 0.0, positive=False, note=False)
    embedding_scale = keys.number("embedding_scale", 0.0, positive=False, note=False)
    return replace(
        base,
        layers=_with_rope(base, rope),
        attn_scale=attn_scale or base.attn_scale,
        embedding_scale=embedding_scale or 1.0,
    )


def _read_qwen2(keys: KeyReader, base: TargetConfig) -> TargetConfig:
    _note_ignored_window(keys)
    return replace(base, layers=_with_rope(base, _read_rope(keys, base, "split_half")))


def _read_qwen3(keys: KeyReader, base: TargetConfig) -> TargetConfig:
    return replace(_read_qwen2(keys, base), qk_norm=True)


def _read_gemma3(keys: KeyReader, base: TargetConfig) -> TargetConfig:
    rope = _read_rope(keys, base, "split_half")
    window = keys.count("attention.sliding_window", 0, least=0)
    layers = _with_rope(base, rope)
    if window:
        pattern = keys.sliding_pattern(base.n_layers, default_period=6)
        # why scale 1 and no YaRN: scaling stretches only the layers that see the whole context
        sliding_rope = replace(
            rope,
            n_dims=_read_swa_dims(keys, rope.n_dims, base.head_dim),
            freq_base=keys.number("rope.freq_base_swa", DEFAULT_FREQ_BASE),
            freq_scale=1.0,
            yarn=None,
        )
        layers = tuple(
            replace(layer, window=window, rope=sliding_rope) if slides else layer
            for layer, slides in zip(layers, pattern, strict=True)
        )
    attn_scale = base.attn_scale
    if base.n_layers == GEMMA3_27B_LAYERS:
        attn_scale = 1.0 / math.sqrt(base.hidden_dim // base.layers[0].n_heads)
    return replace(
        base,
        layers=layers,
        embedding_scale=math.sqrt(base.hidden_dim),
        attn_scale=attn_scale,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        final_softcap=_read_softcap(keys, required=False),
    )


def _read_muse_glimmer(keys: KeyReader, base: TargetConfig) -> TargetConfig:
    if keys.has("rope.freq_base_swa") and not keys.has("rope.freq_base"):
        freq_base = keys.number("rope.freq_base_swa")
    else:
        freq_base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base"))
    scaling, yarn = _read_scaling(keys, base.context_length)
    if scaling != 1.0 or yarn is not None:
        found = keys.text("rope.scaling.type", "linear")
        raise keys.fail("rope.scaling.type", found, "no scaling", UnsupportedError)
    window = keys.count("attention.sliding_window")
    pattern = keys.sliding_pattern(base.n_layers, default_period=4)
    n_dims = keys.count("rope.dimension_count", base.head_dim)
    rope = RopeConfig(
        style="interleaved",
        n_dims=_read_swa_dims(keys, n_dims, base.head_dim),
        freq_base=freq_base,
        freq_scale=1.0,
        yarn=None,
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0, note=False),
    )
    # only sliding layers have positions; full layers are position-free
    layers = tuple(
        replace(layer, window=window, rope=rope) if slides else layer
        for layer, slides in zip(base.layers, pattern, strict=True)
    )
    return replace(
        base,
        layers=layers,
        post_norm_eps=MUSE_POST_NORM_EPS,
        embedding_norm=True,
        attn_gate=True,
        qk_norm=True,
        post_norms=True,
        logit_scale=keys.number("logit_scale"),
        # why required: the loader default of llama.cpp (30) is not the model's value (20)
        final_softcap=_read_softcap(keys, required=True),
        tied_output=False,
    )


def _read_qwen35(keys: KeyReader, base: TargetConfig) -> TargetConfig:
    # here, not on top: it imports this module
    from cudflash.loader.config_hybrid import read_qwen35

    return read_qwen35(keys, base, _read_rope(keys, base, "split_half"))


def _read_swa_dims(keys: KeyReader, n_dims: int, head_dim: int) -> int:
    """Read the rotated dimensions of sliding layers; absent means as in full layers."""
    n_dims = keys.count("rope.dimension_count_swa", n_dims, note=False)
    if n_dims % 2 or n_dims > head_dim:
        suffix = "rope.dimension_count_swa"
        suffix = suffix if keys.has(suffix) else "rope.dimension_count"
        raise keys.fail(suffix, n_dims, f"an even number up to the head size {head_dim}")
    return n_dims


def _read_softcap(keys: KeyReader, required: bool) -> float | None:
    """Read final_logit_softcapping; zero means no cap."""
    suffix = "final_logit_softcapping"
    if required:
        return keys.number(suffix, positive=False) or None
    return keys.number(suffix, 0.0, positive=False, note=False) or None


_READERS = {
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "gemma3": _read_gemma3,
    "muse-glimmer": _read_muse_glimmer,
    "qwen35": _read_qwen35,
}

# number-changing keys each architecture does read
_DEFINED = {
    "llama": frozenset({"attention.scale", "embedding_scale"}),
    "gemma3": frozenset({"final_logit_softcapping"}),
    "muse-glimmer": frozenset({"final_logit_softcapping", "logit_scale"}),
    "qwen35": frozenset({"attention.scale", "nextn_predict_layers"}),
}
