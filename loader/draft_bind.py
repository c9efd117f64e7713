"""Open a draft and bind its tensors: one contract for a GGUF file and a safetensors directory.

Owns the exact shapes of a draft's tensors, and the comparison with a target.
Must not know how a tensor is multiplied. Invariant: after ``open_draft`` every tensor the graph
needs is present with the exact shape and a type the op set supports, every tensor in the artifact
is used, and no projection was copied (``raw`` is a view on the memory map).

Source: llama.cpp 0c1e57098bba ``src/models/dflash.cpp`` 108-261 (shapes, sharing of embedding and
head with the target).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
from cudflash.loader.bind import WeightRef
from cudflash.loader.draft_config import DraftConfig, apply_overrides, check_draft_config
from cudflash.loader.draft_gguf import read_gguf_draft_config
from cudflash.loader.draft_hf import read_hf_draft_config
from cudflash.loader.draft_names import EXTRAS, LAYER, LAYER_OF, LAYER_PREFIX, TOP
from cudflash.loader.ggml_types import SUPPORTED, VECTOR_TYPES
from cudflash.loader.gguf import GGUFFile, open_gguf
from cudflash.loader.safetensors_dir import SafetensorsDir, open_safetensors_dir, read_json

from cudflash.errors import FormatError, PairingError, UnsupportedError

MAX_NAMED = 8  # names listed in one message; the rest are counted


@dataclass(frozen=True, eq=False)
class DraftLayerWeights:
    """One draft layer; the convolution is None in DFlash."""

    attn_norm: np.ndarray  # (hidden_dim,) float32
    attn_q: WeightRef  # (n_heads * head_dim, hidden_dim)
    attn_k: WeightRef  # (n_kv_heads * head_dim, hidden_dim), for block rows and context rows
    attn_v: WeightRef  # (n_kv_heads * head_dim, hidden_dim), for block rows and context rows
    attn_output: WeightRef  # (hidden_dim, n_heads * head_dim)
    attn_q_norm: np.ndarray  # (head_dim,) float32
    attn_k_norm: np.ndarray  # (head_dim,) float32
    ffn_norm: np.ndarray  # (hidden_dim,) float32
    ffn_gate: WeightRef  # (ffn_dim, hidden_dim)
    ffn_up: WeightRef  # (ffn_dim, hidden_dim)
    ffn_down: WeightRef  # (hidden_dim, ffn_dim)
    attn_conv_base: np.ndarray | None  # (2, conv_kernel, hidden_dim) float32: before, after
    attn_conv_proj: WeightRef | None  # (2 * conv_kernel * n_groups, hidden_dim): side, tap, group
    ffn_conv_base: np.ndarray | None  # as attn_conv_base, around the MLP
    ffn_conv_proj: WeightRef | None  # as attn_conv_proj


@dataclass(frozen=True, eq=False)
class DraftWeights:
    """All weights of a draft; the selector is None in DFlash."""

    fc: WeightRef  # (hidden_dim, n_taps * hidden_dim), columns in the order of config.taps
    hidden_norm: np.ndarray  # (hidden_dim,) float32, after fc
    output_norm: np.ndarray  # (hidden_dim,) float32
    layers: tuple[DraftLayerWeights, ...]
    selector_predecessor: WeightRef | None  # (vocab_size, selector_rank)
    selector_successor: WeightRef | None  # (vocab_size, selector_rank)
    selector_hidden: WeightRef | None  # (selector_rank, hidden_dim)
    token_embd: WeightRef | None  # (vocab_size, hidden_dim); None: use the target's
    output: WeightRef | None  # (vocab_size, hidden_dim); None: use the target's


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft ready to be loaded."""

    path: str
    files: tuple[str, ...]  # what was read, sorted; the digest of a draft is over these
    config: DraftConfig
    weights: DraftWeights
    warnings: tuple[str, ...]  # sentences the caller prints


@dataclass(frozen=True)
class _Need:
    name: str  # in the artifact
    shape: tuple[int, ...]  # row-major
    matrix: bool  # projection (packed types) or vector (F32, F16, BF16)


def open_draft(
    path: str | os.PathLike, *, window: int | None = None, sink: int | None = None
) -> Draft:
    """Open a draft, check it as far as it can be checked alone, and bind its tensors.

    Parameters
    ----------
    path : str or path-like
        A GGUF file, or a directory with ``config.json`` and safetensors files.
    window : int, optional
        Override of the sliding window; 0 for none.
    sink : int, optional
        Override of the pinned context rows of sliding layers.

    Returns
    -------
    Draft

    Raises
    ------
    FormatError, UnsupportedError
        If the artifact is damaged, incomplete, or needs what this version does not do.
    UsageError
        If it is a target, or an override makes no sense.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        source, config = _open_directory(path)
        files = (os.path.join(path, "config.json"), *source.files)
    else:
        source = open_gguf(path)
        config = read_gguf_draft_config(source)
        files = (path,)
    config = _bind_vocabulary(source, config)
    check_draft_config(path, config)
    weights = _bind(source, config)
    config, warnings = apply_overrides(path, config, window, sink)
    return Draft(path, files, config, weights, warnings)


def is_draft_directory(path: str | os.PathLike) -> bool:
    """Whether a directory says it holds a DFlash draft, for a better answer than "not a file"."""
    file = os.path.join(os.fspath(path), "config.json")
    if not os.path.isfile(file):
        return False
    try:
        config = read_json(file)
    except FormatError:
        return False
    inner = config.get("dflash_config")
    return isinstance(inner, dict) or "target_layer_ids" in config


def _open_directory(path: str) -> tuple[SafetensorsDir, DraftConfig]:
    file = os.path.join(path, "config.json")
    if not os.path.exists(file):
        inside = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
        hint = f"pass {os.path.join(path, inside[0])}" if inside else "download it too"
        raise FormatError(
            f"{path}: a directory without config.json, expected config.json and safetensors files, "
            f"or a GGUF file; {hint}"
        )
    raw = read_json(file)
    source = open_safetensors_dir(path)
    names = {name.removeprefix("model.") for name in source.tensors}
    return source, read_hf_draft_config(file, raw, names)


def _bind_vocabulary(source: GGUFFile | SafetensorsDir, config: DraftConfig) -> DraftConfig:
    """Take a vocabulary size that is not stated from a table that has a row per token."""
    if config.vocab_size is not None:
        return config
    names = _stored_names(source)
    for field in ("selector_predecessor", "token_embd", "output"):
        name = _find(names, TOP[config.dialect][field])
        shape = source.tensors[names[name]].shape if name in names else ()
        if len(shape) == 2:
            taken = [line for line in config.defaults_taken if "vocab" not in line]
            taken.append(f"vocabulary size absent: {shape[0]}, the rows of {name}")
            return replace(config, vocab_size=shape[0], defaults_taken=tuple(taken))
    return config


def _stored_names(source: GGUFFile | SafetensorsDir) -> dict[str, str]:
    """Names without the optional ``model.`` prefix -> names as stored."""
    if isinstance(source, GGUFFile):
        return {name: name for name in source.tensors}
    return {name.removeprefix("model."): name for name in source.tensors}


def _find(names, aliases: tuple[str, ...]) -> str:
    """Return the first alias that is there; the first of all when none is."""
    return next((alias for alias in aliases if alias in names), aliases[0])


def _needs(names: dict[str, str], config: DraftConfig) -> tuple[dict, list[dict]]:
    """All tensors of the graph: (by field, by layer and field)."""
    hidden = config.hidden_dim
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    top = {
        "fc": (hidden, len(config.taps) * hidden),
        "hidden_norm": (hidden,),
        "output_norm": (hidden,),
    }
    layer = {
        "attn_norm": (hidden,), "attn_q": (n_q, hidden), "attn_k": (n_kv, hidden),
        "attn_v": (n_kv, hidden), "attn_output": (hidden, n_q),
        "attn_q_norm": (config.head_dim,), "attn_k_norm": (config.head_dim,),
        "ffn_norm": (hidden,), "ffn_gate": (config.ffn_dim, hidden),
        "ffn_up": (config.ffn_dim, hidden), "ffn_down": (hidden, config.ffn_dim),
    }  # fmt: skip
    if config.own_embedding:
        top["token_embd"] = (config.vocab_size, hidden)
    if config.own_head and _find(names, TOP[config.dialect]["output"]) in names:
        top["output"] = (config.vocab_size, hidden)
    if config.kind == "dflash2":
        book = (config.vocab_size, config.selector_rank)
        top |= {"selector_predecessor": book, "selector_successor": book}
        top["selector_hidden"] = (config.selector_rank, hidden)
        base = (2, config.conv_kernel, hidden)
        proj = (2 * config.conv_kernel * (hidden // config.conv_group), hidden)
        layer |= {"attn_conv_base": base, "ffn_conv_base": base}
        layer |= {"attn_conv_proj": proj, "ffn_conv_proj": proj}

    def need(prefix: str, aliases: tuple[str, ...], shape: tuple[int, ...]) -> _Need:
        name = _find(names, tuple(prefix + alias for alias in aliases))
        return _Need(names.get(name, name), shape, len(shape) == 2)

    tables = TOP[config.dialect], LAYER[config.dialect]
    layers = [
        {
            field: need(LAYER_PREFIX[config.dialect].format(index), tables[1][field], shape)
            for field, shape in layer.items()
        }
        for index in range(config.n_layers)
    ]
    return {field: need("", tables[0][field], shape) for field, shape in top.items()}, layers


def _bind(source: GGUFFile | SafetensorsDir, config: DraftConfig) -> DraftWeights:
    top, layers = _needs(_stored_names(source), config)
    needs = [*top.values(), *(need for layer in layers for need in layer.values())]
    _check_presence(source, needs)
    _refuse_extra(source, config, {need.name for need in needs})
    _check_fc(source, config, top["fc"])
    _check_shapes_and_types(source, needs)

    def bound(fields: dict[str, _Need], cls) -> dict:
        values = {field: _load(source, need) for field, need in fields.items()}
        return dict.fromkeys(cls.__dataclass_fields__) | values

    values = bound(top, DraftWeights)
    values["layers"] = tuple(
        DraftLayerWeights(**bound(layer, DraftLayerWeights)) for layer in layers
    )
    if config.own_head and values["output"] is None:
        values["output"] = values["token_embd"]
    return DraftWeights(**values)


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _check_presence(source, needs: list[_Need]) -> None:
    missing = [need.name for need in needs if need.name not in source.tensors]
    if missing:
        held = len(source.tensors)
        found = f"holds {held} tensors" if held else "holds no tensors at all"
        raise FormatError(
            f"{source.path}: {found} but {len(missing)} of the {len(needs)} the draft needs are "
            f"missing ({_listed(missing)}); convert or download the draft again"
        )


def _refuse_extra(source, config: DraftConfig, used: set[str]) -> None:
    """Refuse every tensor that would be ignored, by name."""
    extra = [name for name in source.tensors if name not in used]
    if not extra:
        return
    for name in extra:
        layer = LAYER_OF.search(name)
        if layer and int(layer[1]) >= config.n_layers:
            raise FormatError(
                f"{source.path}: tensor {name} belongs to layer {layer[1]}, expected layers below "
                f"{config.n_layers}, the number the draft states; convert the draft again"
            )
    known = next(
        (what for parts, what in EXTRAS if any(p in n for n in extra for p in parts)), None
    )
    what = f" ({known})" if known else ""
    raise UnsupportedError(
        f"{source.path}: holds {len(extra)} tensors this version would have to apply and does "
        f"not{what}: {_listed(extra)}; expected {len(used)} tensors, use another file of the draft"
    )


def _check_fc(source, config: DraftConfig, need: _Need) -> None:
    """Compare the tap count with fc before its shape: the commonest fault gets its own words."""
    shape = source.tensors[need.name].shape
    hidden, n_taps = config.hidden_dim, len(config.taps)
    fits = len(shape) == 2 and shape[0] == hidden and shape[1] % hidden == 0
    if fits and shape[1] != n_taps * hidden:
        raise FormatError(
            f"{source.path}: tensor {need.name} fuses {shape[1] // hidden} taps of {hidden}, but "
            f"the tap list has {n_taps} layers ({config.taps_source}), expected the same number; "
            "convert the draft again"
        )


def _check_shapes_and_types(source, needs: list[_Need]) -> None:
    for need in needs:
        shape = source.tensors[need.name].shape
        if shape != need.shape:
            reduced = len(shape) == 2 and shape[1:] == need.shape[1:] and need.name in (
                "output.weight", "lm_head.weight", "token_embd.weight", "embed_tokens.weight"
            )  # fmt: skip
            why = " (a reduced draft vocabulary is not supported)" if reduced else ""
            raise FormatError(
                f"{source.path}: tensor {need.name} has shape {shape} (rows first), expected "
                f"{need.shape} from the metadata{why}; convert the draft again"
            )
    for matrix, allowed in ((True, SUPPORTED), (False, VECTOR_TYPES)):
        wrong = [
            f"{need.name} {source.tensors[need.name].type_name}"
            for need in needs
            if need.matrix is matrix and source.tensors[need.name].type not in allowed
        ]
        if wrong:
            names = ", ".join(t.name for t in sorted(allowed))
            what = "projections" if matrix else "norms or kernels"
            raise UnsupportedError(
                f"{source.path}: {len(wrong)} {what} have a type this version cannot use "
                f"({_listed(wrong)}), expected one of {names}; use another quantisation"
            )


def _load(source, need: _Need) -> WeightRef | np.ndarray:
    if need.matrix:
        info = source.tensors[need.name]
        return WeightRef(need.name, info.type, need.shape, source.data(need.name))
    values = source.array_f32(need.name)
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise FormatError(
            f"{source.path}: tensor {need.name} holds {values.reshape(-1)[index]} at index {index},"
            " expected finite values; download or convert the draft again"
        )
    return values


def mismatches(config: DraftConfig, target) -> list[str]:
    """List why a draft does not fit a target: empty when it does.

    Parameters
    ----------
    config : DraftConfig
    target : TargetConfig
        Read: ``hidden_dim``, ``vocab_size``, ``n_layers``.

    Returns
    -------
    list of str
        Each with the draft's and the target's number.
    """
    reasons = []
    if config.hidden_dim != target.hidden_dim:
        reasons.append(
            f"the draft's hidden size is {config.hidden_dim}, the target's {target.hidden_dim}"
        )
    if config.vocab_size is not None and config.vocab_size != target.vocab_size:
        reasons.append(
            f"the draft's vocabulary has {config.vocab_size} tokens, the target's "
            f"{target.vocab_size}"
        )
    if config.n_target_layers is not None and config.n_target_layers != target.n_layers:
        reasons.append(
            f"the draft is for a target of {config.n_target_layers} layers, the target has "
            f"{target.n_layers}"
        )
    if max(config.taps) >= target.n_layers:
        reasons.append(
            f"the draft reads layers {list(config.taps)} (0-based), the target has layers 0 to "
            f"{target.n_layers - 1}"
        )
    if config.mask_token_id >= target.vocab_size:
        reasons.append(
            f"the draft's mask token is {config.mask_token_id}, the target has tokens 0 to "
            f"{target.vocab_size - 1}"
        )
    if config.kind == "dflash2" and config.selector_top_k > target.vocab_size:
        reasons.append(
            f"the draft's selector wants {config.selector_top_k} candidates, the target has "
            f"{target.vocab_size} tokens"
        )
    return reasons


def bind_draft(draft: Draft, target) -> Draft:
    """Check that a draft belongs to a target, before any device work.

    Parameters
    ----------
    draft : Draft
    target : TargetConfig

    Returns
    -------
    Draft
        With ``config.vocab_size`` set and further warnings where there is something to say.

    Raises
    ------
    PairingError
        If anything differs; all reasons are in the sentence.
    """
    config = draft.config
    reasons = mismatches(config, target)
    if reasons:
        name = f"{target.arch} {target.name!r}" if target.name else target.arch
        raise PairingError(
            f"{draft.path}: this draft does not belong to the target ({name}): "
            f"{'; '.join(reasons)}; expected equal numbers, use the draft made for this target"
        )
    warnings = list(draft.warnings)
    if config.dialect == "safetensors" and max(config.taps) == target.n_layers - 1:
        warnings.append(
            f"{draft.path}: tap {max(config.taps)} is the target's last layer; cudflash reads its "
            "output before the final norm, the transformers library after it: if acceptance is "
            "near zero, this is why"
        )
    config = replace(config, vocab_size=target.vocab_size)
    return replace(draft, config=config, warnings=tuple(warnings))
