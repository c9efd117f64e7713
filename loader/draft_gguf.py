"""Draft configuration from the metadata of a GGUF file, in both dialects.

Owns the keys of mainline llama.cpp (architecture ``dflash``: ``target_layers`` counts layer
*inputs*, so it is the 0-based layer plus one) and of its forks (``dflash-draft`` and
``TARGET-dflash-draft``: keys under ``<arch>.dflash.``, 0-based layers). Must not bind tensors; it
only asks which are there. In both dialects an absent ``attention.causal`` means that every row of
the block sees the whole block.

Source: llama.cpp 0c1e57098bba ``src/models/dflash.cpp`` 7-106 and ``conversion/qwen.py`` 664-858;
fork keys: spiritbuun/buun-llama-cpp and ikawrakow/ik_llama.cpp ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import math

import numpy as np
from cudflash.loader.arch import MAX_LAYERS, KeyReader, draft_architecture
from cudflash.loader.config import RopeConfig, _read_scaling
from cudflash.loader.draft_config import DraftConfig, has_dflash2_tensors, make_layers
from cudflash.loader.gguf import GGUFFile

from cudflash.errors import FormatError, UnsupportedError

# number-changing keys a draft does define; any other of KeyReader's list is refused
_DEFINED = frozenset(
    {"logit_scale", "final_logit_softcapping", "embedding_scale", "attention.scale",
     "attention.causal"}
)  # fmt: skip
# ggml's gelu is the tanh form; the exact form is called gelu_erf there
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_CONV_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def read_gguf_draft_config(gguf: GGUFFile) -> DraftConfig:
    """Read the configuration of a draft.

    Parameters
    ----------
    gguf : GGUFFile

    Returns
    -------
    DraftConfig
        As the file states it: no override applied, ``sink`` 0.

    Raises
    ------
    FormatError
        If a required key is missing, has another type, or a value that makes no sense.
    UnsupportedError
        If the file needs something the draft graph of this version does not do.
    UsageError
        If the file is a target.
    """
    arch = draft_architecture(gguf)
    fork = arch != "dflash"
    keys = KeyReader(gguf, arch)
    keys.refuse_foreign(_DEFINED)
    _refuse_other_heads(keys)
    taps, taps_source = _read_taps(keys, fork)
    n_layers = keys.count("block_count")
    if n_layers > MAX_LAYERS:
        raise keys.fail("block_count", n_layers, f"at most {MAX_LAYERS}")
    hidden_dim = keys.count("embedding_length")
    _check_tap_counts(keys, taps, hidden_dim)
    head_dim = keys.count("attention.key_length")
    value_dim = keys.count("attention.value_length")
    if value_dim != head_dim:
        expected = f"{head_dim} (attention.key_length)"
        raise keys.fail("attention.value_length", value_dim, expected, UnsupportedError)
    context_length = keys.count("context_length")
    block_size, block_key = _first_count(keys, ("block_size", "dflash.block_size"))
    mask_token_id, mask_source = _read_mask_token(keys)
    slides, window, window_source = _read_window(keys, n_layers)
    causal = gguf.get(keys.key("attention.causal"), None, bool)
    own_embedding = "token_embd.weight" in gguf.tensors
    logit_scale = keys.number("logit_scale", 0.0, positive=False, note=False)
    numbers = _read_conv_and_selector(keys)
    return DraftConfig(
        dialect="gguf-fork" if fork else "gguf",
        name=gguf.get("general.name", "", str),
        n_layers=n_layers,
        hidden_dim=hidden_dim,
        head_dim=head_dim,
        n_heads=_same_in_all(keys, "attention.head_count", n_layers),
        n_kv_heads=_same_in_all(keys, "attention.head_count_kv", n_layers),
        ffn_dim=_same_in_all(keys, "feed_forward_length", n_layers),
        vocab_size=_read_vocab_size(keys),
        context_length=context_length,
        block_size=block_size,
        taps=taps,
        n_target_layers=None,
        mask_token_id=mask_token_id,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(keys, head_dim, context_length),
        layers=make_layers(slides, window, bool(causal)),
        attn_scale=keys.number("attention.scale", 0.0, positive=False, note=False)
        or 1.0 / math.sqrt(head_dim),
        value_scale=keys.number("attention.value_scale", 0.0, positive=False, note=False) or 1.0,
        embedding_scale=keys.number("embedding_scale", 0.0, positive=False, note=False) or 1.0,
        activation=_read_activation(keys),
        logit_scale=logit_scale or 1.0,
        final_softcap=keys.number("final_logit_softcapping", 0.0, positive=False, note=False)
        or None,
        own_embedding=own_embedding,
        own_head=own_embedding or "output.weight" in gguf.tensors,
        sink=0,
        window_source=window_source,
        sink_source="default",
        causal_source="absent: bidirectional" if causal is None else "file",
        block_size_source=f"file ({block_key})",
        taps_source=taps_source,
        mask_token_source=mask_source,
        logit_scale_source="file" if logit_scale else "absent: 1",
        defaults_taken=tuple(keys.defaults_taken),
        **numbers,
    )


def _refuse_other_heads(keys: KeyReader) -> None:
    """Refuse the other flavours that share the architecture name."""
    gguf = keys.gguf
    if keys.count("hyper_connection.count", 0, least=0, note=False):
        raise UnsupportedError(
            f"{gguf.path}: {keys.key('hyper_connection.count')} is set (a DSV4-DSpark draft), "
            "expected a DFlash or DFlash2 draft; use another draft"
        )
    if gguf.get(keys.key("sample_from_anchor"), False, bool):
        raise UnsupportedError(
            f"{gguf.path}: {keys.key('sample_from_anchor')} is true (a DSpark draft, whose anchor "
            "row is a prediction already), expected a DFlash or DFlash2 draft; use another draft"
        )


def _integers(keys: KeyReader, suffix: str) -> tuple[int, ...] | None:
    """Read an integer array; None when the key is absent."""
    if not keys.has(suffix):
        return None
    value = keys.gguf.get(keys.key(suffix), type=np.ndarray)
    if len(value) and value.dtype.kind not in "iu":
        raise keys.fail(suffix, f"an array of {value.dtype.name} values", "an array of integers")
    if len(value) > MAX_LAYERS:
        raise keys.fail(suffix, f"a list of {len(value)} layers", f"at most {MAX_LAYERS}")
    return tuple(int(v) for v in value)


def _read_taps(keys: KeyReader, fork: bool) -> tuple[tuple[int, ...], str]:
    """Read the taps as 0-based layers, and how they were stated."""
    one_based = _integers(keys, "target_layers")
    zero_based, zero_key = None, ""
    for suffix in ("dflash.target_layer_ids", "target_layer_ids"):
        zero_based = _integers(keys, suffix)
        zero_key = keys.key(suffix)
        if zero_based is not None:
            break
    one_key = keys.key("target_layers")
    if zero_based is None and one_based is None:
        name = "dflash.target_layer_ids" if fork else "target_layers"
        raise FormatError(
            f"{keys.gguf.path}: metadata key {keys.key(name)} is missing, so the target layers the "
            "draft reads are unknown and cannot be guessed, expected a list; convert the draft "
            "again"
        )
    if zero_based is None and fork:
        raise UnsupportedError(
            f"{keys.gguf.path}: {one_key} is {list(one_based)} in a {keys.arch} file, where "
            "converters disagree whether it counts from 0 or from 1, expected "
            f"{keys.key('dflash.target_layer_ids')}; convert the draft with llama.cpp"
        )
    if zero_based is None:
        return tuple(v - 1 for v in one_based), f"{one_key}, one-based"
    if one_based is not None and one_based != tuple(v + 1 for v in zero_based):
        raise FormatError(
            f"{keys.gguf.path}: {one_key} is {list(one_based)} but {zero_key} is "
            f"{list(zero_based)}, expected the first to be the second plus one; convert the draft "
            "again"
        )
    return zero_based, f"{zero_key}, zero-based"


def _check_tap_counts(keys: KeyReader, taps: tuple[int, ...], hidden_dim: int) -> None:
    """Compare what forks state beside the list: how many layers, how many columns."""
    for suffix, expected in (
        ("dflash.n_target_layers", len(taps)),
        ("dflash.n_target_features", len(taps) * hidden_dim),
    ):
        value = keys.count(suffix, expected, note=False)
        if value != expected:
            text = f"{expected}, because the tap list has {len(taps)} layers"
            raise keys.fail(suffix, value, text)


def _first_count(keys: KeyReader, suffixes: tuple[str, ...]) -> tuple[int, str]:
    """Read the first of several keys that is present; the first is required if none is."""
    suffix = next((s for s in suffixes if keys.has(s)), suffixes[0])
    return keys.count(suffix), keys.key(suffix)


def _read_mask_token(keys: KeyReader) -> tuple[int, str]:
    if keys.has("dflash.mask_token_id"):
        key = keys.key("dflash.mask_token_id")
        return keys.count("dflash.mask_token_id", least=0), f"file ({key})"
    key = "tokenizer.ggml.mask_token_id"
    value = keys.gguf.require(key, int)
    if value < 0:
        raise FormatError(
            f"{keys.gguf.path}: {key} is {value}, expected a token id; convert the draft again"
        )
    return value, f"file ({key})"


def _read_window(keys: KeyReader, n_layers: int) -> tuple[tuple[bool, ...], int | None, str]:
    """Read (which layers slide, window, where that came from)."""
    suffix = "attention.sliding_window"
    window = keys.count(suffix, 0, least=0, note=False)
    if not window:
        source = "file" if keys.has(suffix) else "absent"
        if source == "absent":
            keys.default(keys.key(suffix), "no window")
        return (False,) * n_layers, None, source
    pattern = suffix + "_pattern"
    if not keys.has(pattern):
        raise FormatError(
            f"{keys.gguf.path}: metadata key {keys.key(pattern)} is missing beside a window of "
            f"{window}, expected a bool for each of {n_layers} layers; convert the draft again"
        )
    slides = keys.sliding_pattern(n_layers, default_period=0)
    return slides, window if any(slides) else None, "file"


def _same_in_all(keys: KeyReader, suffix: str, n_layers: int) -> int:
    values = keys.per_layer(suffix, n_layers)
    if len(set(values)) > 1:
        raise keys.fail(suffix, list(values), "the same in all layers", UnsupportedError)
    return values[0]


def _read_vocab_size(keys: KeyReader) -> int | None:
    if "tokenizer.ggml.tokens" in keys.gguf.metadata:
        return keys.vocab_size()
    if keys.has("vocab_size"):
        return keys.count("vocab_size")
    keys.default("the vocabulary size", "the target's")
    return None


def _read_rope(keys: KeyReader, head_dim: int, context_length: int) -> RopeConfig:
    n_dims = keys.count("rope.dimension_count", head_dim)
    freq_base = keys.number("rope.freq_base")
    sliding_base = keys.number("rope.freq_base_swa", freq_base, note=False)
    if sliding_base != freq_base:
        expected = f"{freq_base} (rope.freq_base), which llama.cpp uses in all draft layers"
        raise keys.fail("rope.freq_base_swa", sliding_base, expected, UnsupportedError)
    sections = _integers(keys, "rope.dimension_sections") or ()
    # only the temporal section: pairs (i, i + n/2) at the text position, which is split-half
    if any(sections) and (sections[0] != n_dims // 2 or any(sections[1:])):
        expected = f"[{n_dims // 2}, 0, 0, 0], one position per token"
        raise keys.fail("rope.dimension_sections", list(sections), expected, UnsupportedError)
    freq_scale, yarn = _read_scaling(keys, context_length)
    attn_factor = keys.number("rope.scaling.attn_factor", 1.0, note=False)
    return RopeConfig("split_half", n_dims, freq_base, freq_scale, yarn, attn_factor)


def _read_activation(keys: KeyReader) -> str:
    name = keys.text("hidden_activation", "silu")
    if name not in _ACTIVATIONS:
        expected = f"one of {', '.join(_ACTIVATIONS)}"
        raise keys.fail("hidden_activation", repr(name), expected, UnsupportedError)
    return _ACTIVATIONS[name]


def _read_conv_and_selector(keys: KeyReader) -> dict:
    """Read the kind (by tensors) and the four numbers of DFlash2, or None four times."""
    names = dict(
        zip(("conv_kernel", "conv_group", "selector_rank", "selector_top_k"), _CONV_SELECTOR)
    )
    if has_dflash2_tensors(keys.gguf.tensors):
        return {"kind": "dflash2", **{field: keys.count(key) for field, key in names.items()}}
    stated = [key for key in _CONV_SELECTOR if keys.count(key, 0, least=0, note=False)]
    if stated:
        raise FormatError(
            f"{keys.gguf.path}: {keys.key(stated[0])} says DFlash2, but none of its convolution "
            "and selector tensors is in the file, expected them; convert the draft again"
        )
    return {"kind": "dflash", **dict.fromkeys(names)}
