"""Draft configuration from ``config.json`` of a safetensors directory, DFlash and DFlash2.

Owns the key names of z-lab's drafts and of the Muse-Glimmer assistant, and where each is looked up
(inside ``dflash_config`` first, then at the top level). Must not bind tensors; it only asks which
are there. An absent ``is_causal`` means causal inside the block in sliding layers only, as in
z-lab's classes; the Muse-Glimmer assistant is bidirectional.

Source: z-lab dflash 0.1.0 ``dflash/model.py``; transformers ``modeling_rope_utils.py`` (YaRN) and
``muse_glimmer``; llama.cpp 0c1e57098bba ``conversion/qwen.py`` 664-858 (what each key becomes).
"""

from __future__ import annotations

import math

from cudflash.loader.arch import MAX_COUNT, MAX_LAYERS
from cudflash.loader.config import RopeConfig, YarnConfig
from cudflash.loader.draft_config import DraftConfig, has_dflash2_tensors, make_layers

from cudflash.errors import FormatError, UnsupportedError, UsageError

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "MuseGlimmerAssistantModel")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # "gelu" is the exact form here
# Keys that would change the numbers, with the values that switch them off.
_FOREIGN = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_sink_bias": (False,),
    "quantization_config": (),
    "quantization": (),
    "speculators_config": (),
    "markov_head_type": (),
    "markov_rank": (0,),
    "enable_confidence_head": (False,),
    "mask_embedding": (False,),
}
_REQUIRED = object()


class JsonKeys:
    """Typed, range-checked reading of ``config.json``.

    Parameters
    ----------
    path : str
        Of the file, for messages.
    config : dict
    """

    def __init__(self, path: str, config: dict):
        self.path = path
        self.config = config
        inner = config.get("dflash_config")
        if inner is not None and not isinstance(inner, dict):
            raise self.fail("dflash_config", inner, "an object")
        self.inner: dict = inner or {}
        self.defaults_taken: list[str] = []

    def find(self, name: str):
        """Return (full name, value) inside ``dflash_config`` first; value None when absent."""
        if self.inner.get(name) is not None:
            return f"dflash_config.{name}", self.inner[name]
        return name, self.config.get(name)

    def fail(self, name: str, found, expected: str, kind: type = FormatError):
        """Return the exception for a value that cannot be used."""
        shown = "absent" if found is None else repr(found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return kind(
            f"{self.path}: {name} is {shown}, expected {expected}; correct the file or use another "
            "draft"
        )

    def count(self, name: str, default=_REQUIRED, least: int = 1) -> int:
        """Read a whole number of at least ``least``; null counts as absent."""
        full, value = self.find(name)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
            raise self.fail(full, value, f"a whole number from {least} to {MAX_COUNT}")
        return value

    def number(self, name: str, default=_REQUIRED, where: dict | None = None) -> float:
        """Read a finite number above zero; null counts as absent."""
        full, value = self.find(name) if where is None else (name, where.get(name))
        if value is None and default is not _REQUIRED:
            return default
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        if not sound or not math.isfinite(value) or value <= 0:
            raise self.fail(full, value, "a finite number above 0")
        return float(value)

    def flag(self, name: str) -> bool | None:
        """Read true, false, or None when absent."""
        full, value = self.find(name)
        if value is not None and not isinstance(value, bool):
            raise self.fail(full, value, "true or false")
        return value


def read_hf_draft_config(path: str, config: dict, tensor_names) -> DraftConfig:
    """Read the configuration of a draft.

    Parameters
    ----------
    path : str
        Of ``config.json``.
    config : dict
        Its content.
    tensor_names : collection of str
        Names in the safetensors files, without a leading ``model.``.

    Returns
    -------
    DraftConfig
        As the file states it: no override applied, ``sink`` 0.

    Raises
    ------
    FormatError, UnsupportedError
        For a key that is missing, senseless, or asks for what the draft graph does not do.
    UsageError
        If the directory holds a target.
    """
    keys = JsonKeys(path, config)
    architecture = _read_architecture(keys)
    _refuse_foreign(keys)
    taps_key, taps = _read_taps(keys)
    n_layers = keys.count("num_hidden_layers")
    if n_layers > MAX_LAYERS:
        raise keys.fail("num_hidden_layers", n_layers, f"at most {MAX_LAYERS}")
    head_dim = keys.count("head_dim")
    context_length = keys.count("max_position_embeddings")
    vocab_size = keys.count("vocab_size", None)
    if vocab_size is None:
        keys.defaults_taken.append("vocab_size absent: the target's")
    block_key, _ = keys.find("block_size")
    mask_key, _ = keys.find("mask_token_id")
    slides, window, window_source = _read_window(keys, n_layers)
    causal, causal_source = _read_causal(keys, architecture)
    own_embedding = "embed_tokens.weight" in tensor_names
    own_head = "lm_head.weight" in tensor_names
    tied = own_embedding and bool(keys.flag("tie_word_embeddings"))
    scale_key, scale = keys.find("output_multiplier")
    return DraftConfig(
        dialect="safetensors",
        name=str(config.get("_name_or_path") or ""),
        n_layers=n_layers,
        hidden_dim=keys.count("hidden_size"),
        head_dim=head_dim,
        n_heads=keys.count("num_attention_heads"),
        n_kv_heads=keys.count("num_key_value_heads"),
        ffn_dim=keys.count("intermediate_size"),
        vocab_size=vocab_size,
        context_length=context_length,
        block_size=keys.count("block_size"),
        taps=taps,
        n_target_layers=keys.count("num_target_layers", None),
        mask_token_id=keys.count("mask_token_id", least=0),
        rms_eps=keys.number("rms_norm_eps"),
        rope=_read_rope(keys, head_dim, context_length),
        layers=make_layers(slides, window, causal),
        attn_scale=1.0 / math.sqrt(head_dim),
        value_scale=keys.number("attention_value_scale", 1.0),
        embedding_scale=keys.number("input_embedding_scale", 1.0),
        activation=_read_activation(keys),
        logit_scale=keys.number("output_multiplier", 1.0),
        final_softcap=_read_softcap(keys),
        own_embedding=own_embedding,
        own_head=own_head or tied,
        sink=0,
        window_source=window_source,
        sink_source="default",
        causal_source=causal_source,
        block_size_source=f"file ({block_key})",
        taps_source=f"{taps_key}, zero-based",
        mask_token_source=f"file ({mask_key})",
        logit_scale_source="absent: 1" if scale is None else f"file ({scale_key})",
        defaults_taken=tuple(keys.defaults_taken),
        **_read_conv_and_selector(keys, tensor_names),
    )


def _read_architecture(keys: JsonKeys) -> str:
    """Return the architecture, told from a target's by what the file states, not by its name."""
    names = keys.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = next((a for a in ARCHITECTURES if a.lower() == str(name).lower()), None)
    if known is not None:
        return known
    if keys.find("target_layer_ids")[1] is None and not keys.inner:
        raise UsageError(
            f"{keys.path}: this is a target (architecture {name}), expected a DFlash draft; pass a "
            "GGUF of it with --model and give the draft with --draft"
        )
    raise keys.fail("architectures", names, f"one of {', '.join(ARCHITECTURES)}", UnsupportedError)


def _refuse_foreign(keys: JsonKeys) -> None:
    for name, off in _FOREIGN.items():
        full, value = keys.find(name)
        if value is not None and value not in off:
            expected = "no such key, because this version does not do what it asks for"
            raise keys.fail(full, value, expected, UnsupportedError)
    full, reduced = keys.find("draft_vocab_size")
    if reduced is not None and reduced != keys.find("vocab_size")[1]:
        expected = "the vocabulary size, because reduced draft vocabularies are not supported"
        raise keys.fail(full, reduced, expected, UnsupportedError)


def _read_taps(keys: JsonKeys) -> tuple[str, tuple[int, ...]]:
    full, value = keys.find("target_layer_ids")
    if value is None:
        raise FormatError(
            f"{keys.path}: target_layer_ids is missing (neither in dflash_config nor at the top), "
            "so the target layers the draft reads are unknown and cannot be guessed, expected a "
            "list; download the draft's config.json again"
        )
    sound = isinstance(value, list) and len(value) <= MAX_LAYERS
    if not sound or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        raise keys.fail(full, value, f"a list of at most {MAX_LAYERS} layer numbers")
    return full, tuple(value)


def _read_window(keys: JsonKeys, n_layers: int) -> tuple[tuple[bool, ...], int | None, str]:
    """Read (which layers slide, window, where that came from)."""
    use = keys.flag("use_sliding_window")
    all_slide = keys.flag("use_swa")
    types = _read_layer_types(keys, n_layers)
    if all_slide:
        name = "swa_window_size" if keys.find("swa_window_size")[1] else "sliding_window"
        return (True,) * n_layers, keys.count(name), "file"
    stated = any(
        name in where
        for name in ("sliding_window", "use_sliding_window", "layer_types")
        for where in (keys.config, keys.inner)
    )
    window = keys.count("sliding_window", 0, least=0)
    slides = types if types is not None else (False,) * n_layers
    if any(slides) and use is False:
        expected = "true, because layer_types has sliding layers"
        raise keys.fail("use_sliding_window", use, expected)
    if any(slides) and not window:
        expected = "a window, because layer_types has sliding layers"
        raise keys.fail("sliding_window", window or None, expected)
    if window and use and types is None:
        expected = f"a type for each of {n_layers} layers beside a window of {window}"
        raise keys.fail("layer_types", None, expected)
    if not stated:
        keys.defaults_taken.append("sliding_window absent: no window")
    return slides, window if any(slides) else None, "file" if stated else "absent"


def _read_layer_types(keys: JsonKeys, n_layers: int) -> tuple[bool, ...] | None:
    """Read which layers slide; None when not stated."""
    full, types = keys.find("layer_types")
    if types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != n_layers or any(t not in known for t in types):
        raise keys.fail(full, types, f"{n_layers} times full_attention or sliding_attention")
    return tuple(t == "sliding_attention" for t in types)


def _read_causal(keys: JsonKeys, architecture: str) -> tuple[bool | None, str]:
    """Read (flag of all layers, or None for z-lab's rule; where that came from)."""
    for name in ("is_causal", "causal"):
        value = keys.flag(name)
        if value is not None:
            return value, f"file ({keys.find(name)[0]})"
    if architecture == "MuseGlimmerAssistantModel":
        return False, "absent: bidirectional"
    return None, "absent: causal in sliding layers only"


def _read_rope(keys: JsonKeys, head_dim: int, context_length: int) -> RopeConfig:
    stated = _rope_parameters(keys)
    base = stated.get("rope_theta")
    full = "rope_theta" if base is None else "rope_parameters.rope_theta"
    base = keys.config.get("rope_theta") if base is None else base
    where = {full: base}
    freq_base = keys.number(full, where=where)
    share = stated.get("partial_rotary_factor", keys.config.get("partial_rotary_factor"))
    share = keys.number("partial_rotary_factor", 1.0, {"partial_rotary_factor": share})
    style = "split_half"
    for name in ("is_neox_style", "rope_is_neox_style"):
        if keys.flag(name) is False:
            style = "interleaved"
    n_dims = int(head_dim * share)
    scale, yarn, attn_factor = _read_scaling(keys, stated, context_length)
    return RopeConfig(style, n_dims, freq_base, scale, yarn, attn_factor)


def _rope_parameters(keys: JsonKeys) -> dict:
    """Return rope_parameters (or rope_scaling), also when it is stated per layer type."""
    name = "rope_parameters" if keys.config.get("rope_parameters") is not None else "rope_scaling"
    stated = keys.config.get(name)
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise keys.fail(name, stated, "an object")
    nested = [value for value in stated.values() if isinstance(value, dict)]
    if not nested:
        return stated
    if len(nested) != len(stated) or any(value != nested[0] for value in nested):
        raise keys.fail(name, stated, "the same RoPE in all layers", UnsupportedError)
    return nested[0]


def _read_scaling(
    keys: JsonKeys, stated: dict, context_length: int
) -> tuple[float, YarnConfig | None, float]:
    """Read (factor on positions, YaRN or None, factor on cosine and sine)."""
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "default":
        return 1.0, None, 1.0
    if kind not in ("linear", "yarn"):
        raise keys.fail("rope_type", kind, "default, linear or yarn", UnsupportedError)
    factor = keys.number("factor", where=stated)
    if kind == "linear":
        return 1.0 / factor, None, 1.0
    original = stated.get("original_max_position_embeddings")
    if original is None:
        original = context_length
        keys.defaults_taken.append(f"original_max_position_embeddings absent: {original}")
    if stated.get("truncate") is False:
        raise keys.fail("truncate", False, "true in YaRN", UnsupportedError)
    yarn = YarnConfig(
        factor=factor,
        original_context=int(keys.number("original", where={"original": original})),
        ext_factor=1.0,
        attn_factor=1.0,
        beta_fast=keys.number("beta_fast", 32.0, stated),
        beta_slow=keys.number("beta_slow", 1.0, stated),
        log_multiplier=0.0,
    )

    def grown(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 1.0 + 0.1 * multiplier * math.log(factor)

    magnitude = grown(1.0)
    if stated.get("attention_factor") is not None:
        magnitude = keys.number("attention_factor", where=stated)
    elif stated.get("mscale") and stated.get("mscale_all_dim"):
        magnitude = grown(keys.number("mscale", where=stated))
        magnitude /= grown(keys.number("mscale_all_dim", where=stated))
    # the rope table multiplies by grown(1) itself
    return 1.0 / factor, yarn, magnitude / grown(1.0)


def _read_activation(keys: JsonKeys) -> str:
    full, name = keys.find("hidden_act")
    if name is None:
        full, name = keys.find("hidden_activation")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise keys.fail(full, name, f"one of {', '.join(_ACTIVATIONS)}", UnsupportedError)
    return _ACTIVATIONS[name]


def _read_softcap(keys: JsonKeys) -> float | None:
    _, value = keys.find("final_logit_softcapping")
    return keys.number("final_logit_softcapping") if value else None


def _read_conv_and_selector(keys: JsonKeys, tensor_names) -> dict:
    """Read the kind (by tensors) and the four numbers of DFlash2, or None four times."""
    names = {
        "conv_kernel": "conv_kernel_size",
        "conv_group": "conv_group_size",
        "selector_rank": "selector_rank",
        "selector_top_k": "selector_top_k",
    }
    if has_dflash2_tensors(tensor_names):
        return {"kind": "dflash2", **{field: keys.count(key) for field, key in names.items()}}
    stated = next((key for key in names.values() if keys.find(key)[1]), None)
    if stated is not None:
        raise FormatError(
            f"{keys.path}: {keys.find(stated)[0]} says DFlash2, but none of its convolution and "
            "selector tensors is in the directory, expected them; download all files of the draft"
        )
    return {"kind": "dflash", **dict.fromkeys(names)}
