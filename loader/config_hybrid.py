"""Keys of qwen35: which layers are recurrent, what their heads are, and sectioned RoPE.

Owns the meaning of ``qwen35.ssm.*`` and of the pattern of layers. Must not read tensor data.
Invariant: no key that changes numbers has a default here.

Source: llama.cpp 0c1e57098bba, ``src/models/qwen35.cpp``; ``ggml/src/ggml-cpu/ops.cpp``
(interleaved sections); ``conversion/qwen.py`` (what converters write).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from cudflash.loader.arch import KeyReader
from cudflash.loader.config import DeltaConfig, LayerConfig, RopeConfig, TargetConfig

from cudflash.errors import UnsupportedError

N_SECTIONS = 4  # time, height, width, and one that text leaves at 0
MAX_CONV_TAPS = 16
HEAD_STEP = 16  # the recurrence takes heads of a multiple of so many values


def read_qwen35(keys: KeyReader, base: TargetConfig, rope: RopeConfig) -> TargetConfig:
    """Complete the configuration of a qwen35 model.

    Parameters
    ----------
    keys : KeyReader
    base : TargetConfig
        What all architectures share; all its layers are attention.
    rope : RopeConfig
        As read for full attention, without sections.

    Raises
    ------
    FormatError
        For an absent or senseless key.
    UnsupportedError
        For shapes that the recurrence of this version does not have.
    """
    if not keys.has("rope.dimension_count"):
        raise keys.fail("rope.dimension_count", "absent", "the number of rotated dimensions")
    rope = replace(rope, sections=_read_sections(keys))
    delta = _read_delta(keys)
    recurrent = _read_pattern(keys, base.n_layers + (base.mtp is not None))
    layers = tuple(
        replace(layer, n_heads=0, n_kv_heads=0, delta=delta) if slow else replace(layer, rope=rope)
        for layer, slow in zip(base.layers, recurrent, strict=False)
    )
    # zero means "not set" in llama.cpp
    attn_scale = keys.number("attention.scale", 0.0, positive=False, note=False)
    mtp: LayerConfig | None = None if base.mtp is None else replace(base.mtp, rope=rope)
    return replace(
        base,
        layers=layers,
        attn_scale=attn_scale or 1.0 / math.sqrt(base.head_dim),
        qk_norm=True,
        fused_q_gate=True,
        pre_ffn_norm="post_attention_norm",
        mtp=mtp,
    )


def _read_delta(keys: KeyReader) -> DeltaConfig:
    n_k_heads, n_v_heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    k_dim, inner = keys.count("ssm.state_size"), keys.count("ssm.inner_size")
    taps = keys.count("ssm.conv_kernel", least=2)
    if n_v_heads % n_k_heads:
        expected = f"a multiple of the {n_k_heads} key heads (ssm.group_count)"
        raise keys.fail("ssm.time_step_rank", n_v_heads, expected)
    if k_dim % HEAD_STEP:
        expected = f"a multiple of {HEAD_STEP}"
        raise keys.fail("ssm.state_size", k_dim, expected, UnsupportedError)
    if inner != n_v_heads * k_dim:
        expected = f"{n_v_heads * k_dim}, {n_v_heads} value heads as wide as the key heads ({k_dim})"
        raise keys.fail("ssm.inner_size", inner, expected, UnsupportedError)
    if taps > MAX_CONV_TAPS:
        expected = f"2 to {MAX_CONV_TAPS}"
        raise keys.fail("ssm.conv_kernel", taps, expected, UnsupportedError)
    return DeltaConfig(n_k_heads, n_v_heads, k_dim, inner // n_v_heads, taps)


def _read_pattern(keys: KeyReader, n_blocks: int) -> tuple[bool, ...]:
    """Which blocks are recurrent: a bool per block, or every n-th is attention."""
    suffix = "attention.recurrent_layers"
    if not keys.has(suffix):
        interval = keys.count("full_attention_interval")
        return tuple((index + 1) % interval != 0 for index in range(n_blocks))
    value = keys.gguf.get(keys.key(suffix))
    sound = isinstance(value, np.ndarray) and len(value) == n_blocks
    sound = sound and (value.dtype.kind == "b" or set(value.tolist()) <= {0, 1})
    if not sound:
        found = f"{len(value)} values" if isinstance(value, np.ndarray) else "no array"
        raise keys.fail(suffix, found, f"{n_blocks} bools (block_count)")
    return tuple(bool(v) for v in value)


def _read_sections(keys: KeyReader) -> tuple[int, ...]:
    suffix = "rope.dimension_sections"
    value = keys.gguf.get(keys.key(suffix))
    if value is None:
        raise keys.fail(suffix, "absent", f"{N_SECTIONS} numbers of pairs")
    numbers = value.tolist() if isinstance(value, np.ndarray) else [value]
    sound = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
    if not sound or len(numbers) != N_SECTIONS or min(numbers) < 0 or not sum(numbers[:3]):
        raise keys.fail(suffix, numbers[:8], f"{N_SECTIONS} numbers of pairs of at least 0")
    return tuple(int(n) for n in numbers)
