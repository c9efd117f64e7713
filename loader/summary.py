"""What ``inspect`` shows of a file: a plain dictionary, and the digest of the whole file.

Owns the description of any sound GGUF file, also of one that cannot be run (a draft, an
architecture or a tensor type this version does not have). Must not read tensor data except where
binding does. Invariant: the dictionary is JSON-able and its making decodes no vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable

import numpy as np
from cudflash.loader.arch import architecture, is_draft
from cudflash.loader.bind import Target, bind_target
from cudflash.loader.config import LayerConfig, RopeConfig, TargetConfig
from cudflash.loader.gguf import GGUFFile
from cudflash.loader.gguf_values import StringArray

from cudflash.errors import CudflashError, FormatError

DIGEST_CHUNK_BYTES = 1 << 20
MAX_SHOWN_ITEMS = 1024  # longer arrays (vocabularies) are shown by their length


def summarize(gguf: GGUFFile) -> dict:
    """Describe a file.

    Parameters
    ----------
    gguf : GGUFFile

    Returns
    -------
    dict
        JSON-able. ``problem`` is None when the file can be run as a target, else the sentence that
        loading it would raise; ``model`` is then None and the raw ``hyperparameters`` still tell
        what the file says of itself. ``draft`` is None for a target, else what ``open_draft`` makes
        of the file: its configuration and warnings, or the problem it has as a draft.

    Raises
    ------
    FormatError
        If the file does not even name its architecture.
    """
    arch = architecture(gguf)
    role = "draft" if is_draft(gguf) else "target"
    target, problem = None, None
    try:
        target = bind_target(gguf)
    except CudflashError as err:
        problem = str(err)
    return {
        "path": gguf.path,
        "file_bytes": gguf.size_bytes,
        "gguf_version": gguf.version,
        "architecture": arch,
        "role": role,
        "name": _plain(gguf.metadata.get("general.name")),
        "problem": problem,
        "n_tensors": len(gguf.tensors),
        "tensor_types": _type_table(gguf),
        "hyperparameters": {
            key.removeprefix(arch + "."): _plain(value)
            for key, value in gguf.metadata.items()
            if key.startswith(arch + ".")
        },
        "model": _model(target) if target else None,
        "draft": _draft(gguf.path) if role == "draft" else None,
        "tokenizer": _tokenizer(gguf),
    }


def _draft(path: str) -> dict:
    """Describe a draft, or say why it cannot be used."""
    # here, not on top: inspecting a target must not load what only drafts need
    from cudflash.loader.draft_bind import open_draft
    from cudflash.loader.draft_config import describe_draft_config

    try:
        draft = open_draft(path)
    except CudflashError as err:
        return {"problem": str(err), "config": None, "warnings": []}
    config = describe_draft_config(draft.config)
    return {"problem": None, "config": config, "warnings": list(draft.warnings)}


def file_digest(path: str | os.PathLike, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file as 64 hex digits, reading it in pieces.

    Parameters
    ----------
    path : str or path-like
    progress : callable, optional
        Called with the number of bytes read so far.

    Raises
    ------
    FormatError
        If the file cannot be read.
    """
    path = os.fspath(path)
    digest, n_bytes = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(DIGEST_CHUNK_BYTES):
                digest.update(chunk)
                n_bytes += len(chunk)
                if progress is not None:
                    progress(n_bytes)
    except OSError as err:
        raise FormatError(
            f"{path}: cannot be read ({err.strerror}), expected a readable file; check the path"
        ) from None
    return digest.hexdigest()


def _type_table(gguf: GGUFFile) -> list[dict]:
    """Tensors and bytes per type, largest first; bytes are None for an unknown type."""
    table: dict[int, dict] = {}
    for info in gguf.tensors.values():
        row = table.setdefault(
            info.type_id,
            {
                "type": info.type_name,
                "type_id": info.type_id,
                "tensors": 0,
                "values": 0,
                "bytes": None if info.n_bytes is None else 0,
            },
        )
        row["tensors"] += 1
        row["values"] += info.n_elements
        if info.n_bytes is not None:
            row["bytes"] += info.n_bytes
    return sorted(table.values(), key=lambda row: (-(row["bytes"] or 0), row["type_id"]))


def _model(target: Target) -> dict:
    config = target.config
    attends = [layer for layer in config.layers if layer.delta is None]
    return {
        "n_layers": config.n_layers,
        "hidden_dim": config.hidden_dim,
        "head_dim": config.head_dim,
        "n_heads": _one_or_all([layer.n_heads for layer in attends]),
        "n_kv_heads": _one_or_all([layer.n_kv_heads for layer in attends]),
        "ffn_dim": _one_or_all([layer.ffn_dim for layer in config.layers]),
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "window": next((la.window for la in config.layers if la.window is not None), None),
        "window_pattern": "".join(_kind(layer) for layer in config.layers),
        "rope": _rope(config, sliding=False),
        "rope_sliding": _rope(config, sliding=True),
        "rope_freqs": target.weights.rope_freqs is not None,
        "tied_output": config.tied_output,
        "embedding_scale": config.embedding_scale,
        "attn_scale": config.attn_scale,
        "logit_scale": config.logit_scale,
        "final_softcap": config.final_softcap,
        "rms_eps": config.rms_eps,
        "delta_net": next((vars(la.delta) for la in config.layers if la.delta is not None), None),
        "mtp": config.mtp is not None,
        "defaults_taken": list(config.defaults_taken),
        "extra_tensors": list(target.extra_tensors),
    }


def _kind(layer: LayerConfig) -> str:
    """S sliding, F full attention, D delta net."""
    if layer.delta is not None:
        return "D"
    return "F" if layer.window is None else "S"


def _one_or_all(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


def _rope(config: TargetConfig, sliding: bool) -> dict | None:
    """RoPE of the first sliding or full layer; None when there is no such layer or no RoPE."""
    for layer in config.layers:
        if layer.delta is None and (layer.window is not None) is sliding:
            return None if layer.rope is None else _rope_fields(layer.rope)
    return None


def _rope_fields(rope: RopeConfig) -> dict:
    fields = {
        "style": rope.style,
        "n_dims": rope.n_dims,
        "freq_base": rope.freq_base,
        "freq_scale": rope.freq_scale,
        "attn_factor": rope.attn_factor,
        "yarn": None,
        "sections": None if rope.sections is None else list(rope.sections),
    }
    if rope.yarn is not None:
        fields["yarn"] = dict(vars(rope.yarn))
    return fields


def _tokenizer(gguf: GGUFFile) -> dict:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    template = gguf.metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) and template else None
    prefix = "tokenizer.ggml."
    return {
        "model": _plain(gguf.metadata.get("tokenizer.ggml.model")),
        "pre": _plain(gguf.metadata.get("tokenizer.ggml.pre")),
        "vocab_size": len(tokens) if isinstance(tokens, StringArray) else None,
        "special_ids": {
            key.removeprefix(prefix).removesuffix("_token_id"): _plain(value)
            for key, value in gguf.metadata.items()
            if key.startswith(prefix) and key.endswith("_token_id")
        },
        "chat_template": template is not None,
        "chat_template_sha256": (
            None if template is None else hashlib.sha256(template.encode("utf-8")).hexdigest()
        ),
    }


def _plain(value):
    """Make a metadata value JSON-able; long arrays become a sentence, NaN and infinity text."""
    if isinstance(value, StringArray):
        n = len(value)
        return list(value) if n <= MAX_SHOWN_ITEMS else f"{n} strings"
    if isinstance(value, np.ndarray):
        if len(value) > MAX_SHOWN_ITEMS:
            return f"{len(value)} {value.dtype.name} values"
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
