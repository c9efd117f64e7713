"""Bind the tensors of a file to the places of the forward pass, strictly.

Owns the tensor names and shapes of the target architectures (those of delta-net layers and of the
MTP block are listed in ``bind_hybrid``). Must not know how a tensor is multiplied. Invariant: after
``bind_target`` every tensor the graph needs is present with the exact shape and a type the op set
supports, no tensor that would change the numbers was left over, and no projection was copied
(``raw`` is a view on the memory map).

Source: llama.cpp 0c1e57098bba, ``src/llama-model.cpp`` 3396 (fused and optional tensors) and
``src/models/*.cpp``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from cudflash.loader.config import LayerConfig, TargetConfig, read_target_config
from cudflash.loader.ggml_types import SUPPORTED, VECTOR_TYPES, GGMLType
from cudflash.loader.gguf import GGUFFile

from cudflash.errors import FormatError, UnsupportedError

MAX_NAMED = 8  # names listed in one message; the rest are counted


@dataclass(frozen=True, eq=False)
class WeightRef:
    """A projection, still packed."""

    name: str
    type: GGMLType
    shape: tuple[int, int]  # (n_out, n_in)
    raw: np.ndarray  # (n_out, row_bytes) uint8, read-only view on the memory map


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer; None where the architecture (or this file, or this layer) has no such tensor.

    N is n_heads * head_dim, or twice that where every head's queries are followed by its gates.
    The last group of fields belongs to delta-net layers: C conv_width, T conv_taps, H v heads.
    """

    attn_norm: np.ndarray  # (hidden_dim,) float32
    attn_q: WeightRef | None  # (N, hidden_dim)
    attn_k: WeightRef | None  # (n_kv_heads * head_dim, hidden_dim)
    attn_v: WeightRef | None  # (n_kv_heads * head_dim, hidden_dim)
    attn_q_bias: np.ndarray | None  # (n_heads * head_dim,) float32
    attn_k_bias: np.ndarray | None  # (n_kv_heads * head_dim,) float32
    attn_v_bias: np.ndarray | None  # (n_kv_heads * head_dim,) float32
    attn_q_norm: np.ndarray | None  # (head_dim,) float32
    attn_k_norm: np.ndarray | None  # (head_dim,) float32
    attn_output: WeightRef | None  # (hidden_dim, n_heads * head_dim)
    attn_output_bias: np.ndarray | None  # (hidden_dim,) float32
    attn_gate: WeightRef | None  # (n_heads * head_dim, hidden_dim); delta net: (v_width, ...)
    post_attention_norm: np.ndarray | None  # (hidden_dim,) float32
    ffn_norm: np.ndarray  # (hidden_dim,) float32
    ffn_gate: WeightRef  # (ffn_dim, hidden_dim)
    ffn_up: WeightRef  # (ffn_dim, hidden_dim)
    ffn_down: WeightRef  # (hidden_dim, ffn_dim)
    post_ffw_norm: np.ndarray | None  # (hidden_dim,) float32
    attn_qkv: WeightRef | None = None  # (C, hidden_dim): queries, keys, values
    ssm_conv: np.ndarray | None = None  # (T, C) float32, oldest row's tap first
    ssm_alpha: WeightRef | None = None  # (H, hidden_dim)
    ssm_beta: WeightRef | None = None  # (H, hidden_dim)
    ssm_dt: np.ndarray | None = None  # (H,) float32
    ssm_a: np.ndarray | None = None  # (H,) float32, negative
    ssm_norm: np.ndarray | None = None  # (v_dim,) float32
    ssm_out: WeightRef | None = None  # (hidden_dim, v_width)


@dataclass(frozen=True, eq=False)
class MTPWeights:
    """The block that predicts one token further from a hidden row and the token after it."""

    layer: LayerWeights
    eh_proj: WeightRef  # (hidden_dim, 2 * hidden_dim): columns of the embedding, then the hidden
    enorm: np.ndarray  # (hidden_dim,) float32
    hnorm: np.ndarray  # (hidden_dim,) float32
    head_norm: np.ndarray  # (hidden_dim,) float32; the target's output_norm where it has none
    token_embd: WeightRef | None  # None: the target's
    head: WeightRef | None  # None: the target's


@dataclass(frozen=True, eq=False)
class TargetWeights:
    """All weights of a target model."""

    token_embd: WeightRef  # (vocab_size, hidden_dim)
    output_norm: np.ndarray  # (hidden_dim,) float32
    output: WeightRef  # (vocab_size, hidden_dim); the same object as token_embd when tied
    rope_freqs: np.ndarray | None  # (n_dims / 2,) float32, divides the angles of each pair
    layers: tuple[LayerWeights, ...]
    mtp: MTPWeights | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """A target model ready to be loaded."""

    config: TargetConfig
    weights: TargetWeights
    extra_tensors: tuple[str, ...]  # in the file, not used by the graph, without effect


@dataclass(frozen=True)
class _Need:
    name: str  # in the file
    shape: tuple[int, ...]  # row-major
    matrix: bool  # projection (packed types) or vector (F32, F16, BF16)


# Last name part -> what it is, for tensors that change the numbers in llama.cpp. One of these left
# over means the file is not the model the graph computes, so it is refused, not listed.
_EFFECTIVE = frozenset({
    "attn_qkv", "attn_gate", "attn_q_norm", "attn_k_norm", "attn_sinks", "attn_sub_norm",
    "ffn_sub_norm", "attn_norm_2", "post_attention_norm", "post_ffw_norm", "attn_output_norm",
    "layer_output_norm", "layer_output_scale", "rope_freqs", "rope_factors_long",
    "rope_factors_short", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
    "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "token_embd_norm", "position_embd",
    "ssm_in", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt", "ssm_norm", "ssm_out", "ssm_alpha",
    "ssm_beta", "ssm_ba", "nextn",
})  # fmt: skip
_EFFECTIVE_ENDINGS = (".bias", ".scale", ".input_scale")
_BLOCK = re.compile(r"blk\.(\d+)\.")


def bind_target(gguf: GGUFFile) -> Target:
    """Read the configuration and bind every tensor of a target model.

    Parameters
    ----------
    gguf : GGUFFile

    Returns
    -------
    Target

    Raises
    ------
    FormatError
        If tensors are missing (all are listed), have another shape, or hold non-finite norms.
    UnsupportedError
        If a type cannot be multiplied, or the file has tensors the graph would have to apply but
        does not; also for the reasons of ``read_target_config``.
    UsageError
        If the file is a draft.
    """
    config = read_target_config(gguf)
    top = _top_needs(gguf, config)
    layers = _layer_needs(gguf, config)
    mtp = {} if config.mtp is None else _mtp_needs(gguf, config)
    needs = [*top.values(), *(need for layer in layers for need in layer.values())]
    needs += mtp.values()
    _check_presence(gguf, needs)
    _check_vocabulary(gguf, config)
    _check_shapes(gguf, needs)
    _check_types(gguf, needs)
    used = {need.name for need in needs}
    extra = tuple(name for name in gguf.tensors if name not in used)
    _check_extra(gguf, config, extra)
    weights = TargetWeights(
        token_embd=(token_embd := _weight(gguf, top["token_embd"])),
        output_norm=_vector(gguf, top["output_norm"]),
        output=_weight(gguf, top["output"]) if "output" in top else token_embd,
        rope_freqs=_rope_freqs(gguf, top.get("rope_freqs")),
        layers=tuple(
            _bind_layer(gguf, config.layers[index], config.head_dim, need)
            for index, need in enumerate(layers)
        ),
        mtp=_bind_mtp(gguf, config, mtp) if mtp else None,
    )
    return Target(config, weights, extra)


def _top_needs(gguf: GGUFFile, config: TargetConfig) -> dict[str, _Need]:
    """Tensors outside the layers."""
    table = (config.vocab_size, config.hidden_dim)
    needs = {
        "token_embd": _Need("token_embd.weight", table, True),
        "output_norm": _Need("output_norm.weight", (config.hidden_dim,), False),
    }
    if not config.tied_output:
        needs["output"] = _Need("output.weight", table, True)
    if config.arch == "llama" and "rope_freqs.weight" in gguf.tensors:
        n_pairs = config.layers[0].rope.n_dims // 2
        needs["rope_freqs"] = _Need("rope_freqs.weight", (n_pairs,), False)
    return needs


def _layer_needs(gguf: GGUFFile, config: TargetConfig) -> list[dict[str, _Need]]:
    """Per layer, by field name; a fused projection stands under ``attn_qkv``."""
    # a bias is optional as a kind: if one layer has it, all layers need it
    biases = {
        kind
        for kind in ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")
        if any(f"blk.{i}.{kind}.bias" in gguf.tensors for i in range(config.n_layers))
    }
    if config.arch == "qwen2":  # its attention always has them; their absence is damage
        biases |= {"attn_q", "attn_k", "attn_v"}
    if config.arch != "llama":  # no other supported graph adds one
        biases.discard("attn_output")
    if config.arch == "qwen35":  # its graph adds none at all
        biases = set()
    return [
        _delta_needs(config, index) if layer.delta is not None
        else _one_layer(gguf, config, index, layer, biases)
        for index, layer in enumerate(config.layers)
    ]  # fmt: skip


def _delta_needs(config: TargetConfig, index: int) -> dict[str, _Need]:
    from cudflash.loader.bind_hybrid import delta_tensors

    return {f: _Need(*row) for f, row in delta_tensors(config, index).items()}


def _mtp_needs(gguf: GGUFFile, config: TargetConfig) -> dict[str, _Need]:
    """The block after the last layer: an attention layer, and what joins it to the target."""
    from cudflash.loader.bind_hybrid import mtp_tensors

    index = config.n_layers
    return _one_layer(gguf, config, index, config.mtp, set()) | {
        f: _Need(*row) for f, row in mtp_tensors(gguf, config, index).items()
    }


def _one_layer(
    gguf: GGUFFile, config: TargetConfig, index: int, layer: LayerConfig, biases: set[str]
) -> dict[str, _Need]:
    hidden, ffn = config.hidden_dim, layer.ffn_dim
    n_q = layer.n_heads * config.head_dim
    n_kv = layer.n_kv_heads * config.head_dim
    matrices = {
        "attn_output": (hidden, n_q),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    vectors = {"attn_norm": hidden, "ffn_norm": hidden}
    prefix = f"blk.{index}."
    fused = prefix + "attn_qkv.weight" in gguf.tensors and not config.fused_q_gate
    if fused and prefix + "attn_q.weight" not in gguf.tensors:
        matrices["attn_qkv"] = (n_q + 2 * n_kv, hidden)
        if biases & {"attn_q", "attn_k", "attn_v", "attn_qkv"}:
            vectors["attn_qkv_bias"] = n_q + 2 * n_kv
    else:
        n_gates = n_q if config.fused_q_gate else 0
        for name, n_out in (("attn_q", n_q + n_gates), ("attn_k", n_kv), ("attn_v", n_kv)):
            matrices[name] = (n_out, hidden)
            if biases & {name, "attn_qkv"}:
                vectors[name + "_bias"] = n_out
    if "attn_output" in biases:
        vectors["attn_output_bias"] = hidden
    if config.attn_gate:
        matrices["attn_gate"] = (n_q, hidden)
    if config.qk_norm:
        vectors |= {"attn_q_norm": config.head_dim, "attn_k_norm": config.head_dim}
    if config.post_norms:
        vectors |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
    needs = {f: _Need(f"{prefix}{f}.weight", shape, True) for f, shape in matrices.items()}
    for field, n in vectors.items():
        bias = field.endswith("_bias")
        name = field.removesuffix("_bias") + (".bias" if bias else ".weight")
        if field == "ffn_norm":
            name = config.pre_ffn_norm + ".weight"
        needs[field] = _Need(prefix + name, (n,), False)
    return needs


def _listed(names: list[str]) -> str:
    """Join names for a message, counting those past the first few."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _check_presence(gguf: GGUFFile, needs: list[_Need]) -> None:
    missing = [need.name for need in needs if need.name not in gguf.tensors]
    if not missing:
        return
    held = len(gguf.tensors)
    found = f"holds {held} tensors" if held else "holds no tensors at all"
    raise FormatError(
        f"{gguf.path}: {found} but {len(missing)} of the {len(needs)} needed are missing "
        f"({_listed(missing)}); convert or download the model again"
    )


def _check_vocabulary(gguf: GGUFFile, config: TargetConfig) -> None:
    rows = gguf.tensors["token_embd.weight"].shape[0]
    if rows != config.vocab_size:
        raise FormatError(
            f"{gguf.path}: tensor token_embd.weight has {rows} rows, expected {config.vocab_size}, "
            "the tokens in tokenizer.ggml.tokens; convert the model again with its own tokenizer"
        )


def _check_shapes(gguf: GGUFFile, needs: list[_Need]) -> None:
    for need in needs:
        shape = gguf.tensors[need.name].shape
        if shape != need.shape:
            raise FormatError(
                f"{gguf.path}: tensor {need.name} has shape {shape} (rows first), expected "
                f"{need.shape} from the metadata; convert the model again"
            )


def _check_types(gguf: GGUFFile, needs: list[_Need]) -> None:
    for matrix, allowed in ((True, SUPPORTED), (False, VECTOR_TYPES)):
        wrong = [
            f"{need.name} {gguf.tensors[need.name].type_name}"
            for need in needs
            if need.matrix is matrix and gguf.tensors[need.name].type not in allowed
        ]
        if wrong:
            names = ", ".join(t.name for t in sorted(allowed))
            what = "projections" if matrix else "norms or biases"
            raise UnsupportedError(
                f"{gguf.path}: {len(wrong)} {what} have a type this version cannot use "
                f"({_listed(wrong)}), expected one of {names}; use another quantisation"
            )


def _check_extra(gguf: GGUFFile, config: TargetConfig, extra: tuple[str, ...]) -> None:
    """Refuse leftover tensors that would change the numbers; the rest is only reported."""
    effective = []
    for name in extra:
        block = _BLOCK.match(name)
        n_blocks = config.n_layers + (config.mtp is not None)
        if block and int(block[1]) >= n_blocks:
            raise FormatError(
                f"{gguf.path}: tensor {name} belongs to layer {block[1]}, expected layers below "
                f"{config.arch}.block_count {n_blocks}; convert the model again"
            )
        part = name.removeprefix(block[0] if block else "").split(".")[0]
        if part in _EFFECTIVE or name.endswith(_EFFECTIVE_ENDINGS):
            effective.append(name)
    if effective:
        raise UnsupportedError(
            f"{gguf.path}: {len(effective)} tensors would change the numbers but are not part of "
            f"the {config.arch} graph of this version ({_listed(effective)}), expected none; use "
            "another file of the model"
        )


def _weight(gguf: GGUFFile, need: _Need) -> WeightRef:
    return WeightRef(need.name, gguf.tensors[need.name].type, need.shape, gguf.data(need.name))


def _vector(gguf: GGUFFile, need: _Need | None) -> np.ndarray | None:
    if need is None:
        return None
    values = gguf.array_f32(need.name)
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise FormatError(
            f"{gguf.path}: tensor {need.name} holds {values.flat[index]} at index {index}, expected "
            "finite values; download or convert the model again"
        )
    return values


def _rope_freqs(gguf: GGUFFile, need: _Need | None) -> np.ndarray | None:
    values = _vector(gguf, need)
    if values is not None and not (values > 0).all():
        index = int(np.flatnonzero(values <= 0)[0])
        raise FormatError(
            f"{gguf.path}: tensor {need.name} holds {values[index]} at index {index}, expected "
            "factors above 0 (they divide angles); download or convert the model again"
        )
    return values


def _bind_mtp(gguf: GGUFFile, config: TargetConfig, needs: dict[str, _Need]) -> MTPWeights:
    from cudflash.loader.bind_hybrid import MTP_FIELDS

    own = {name: need for name, need in needs.items() if name in MTP_FIELDS}
    block = {name: need for name, need in needs.items() if name not in MTP_FIELDS}
    fields = dict.fromkeys(MTP_FIELDS) | {
        name: _weight(gguf, need) if need.matrix else _vector(gguf, need)
        for name, need in own.items()
    }
    return MTPWeights(_bind_layer(gguf, config.mtp, config.head_dim, block), **fields)


def _bind_layer(
    gguf: GGUFFile, layer: LayerConfig, head_dim: int, needs: dict[str, _Need]
) -> LayerWeights:
    fields = {
        name: _weight(gguf, need) if need.matrix else _vector(gguf, need)
        for name, need in needs.items()
    }
    absent = dict.fromkeys(set(LayerWeights.__dataclass_fields__) - set(fields))
    if layer.delta is not None:
        fields["ssm_conv"] = np.ascontiguousarray(fields["ssm_conv"].T)
        return LayerWeights(**fields, **absent)
    n_q, n_kv = layer.n_heads * head_dim, layer.n_kv_heads * head_dim
    parts = {
        "attn_q": slice(0, n_q),
        "attn_k": slice(n_q, n_q + n_kv),
        "attn_v": slice(n_q + n_kv, n_q + 2 * n_kv),
    }
    fused: WeightRef | None = fields.pop("attn_qkv", None)
    fused_bias = fields.pop("attn_qkv_bias", None)
    for name, rows in parts.items():
        if fused is not None:
            shape = (rows.stop - rows.start, fused.shape[1])
            fields[name] = WeightRef(fused.name, fused.type, shape, fused.raw[rows])
        if fused_bias is not None:
            fields[name + "_bias"] = fused_bias[rows]
    absent = set(LayerWeights.__dataclass_fields__) - set(fields)
    return LayerWeights(**fields, **dict.fromkeys(absent))
