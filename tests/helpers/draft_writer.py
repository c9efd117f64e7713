"""Small sound drafts to be damaged by tests: GGUF in both dialects, and a z-lab directory.

Geometry: 2 layers, hidden 64, 4/2 heads of 32, FFN 96, 7 tokens, block 4, taps 2 and 0 (in that
order), mask token 6; DFlash2 adds 2-tap kernels in groups of 16 channels, rank 32, top 3.
"""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from tests.helpers import gguf_writer as w

N_LAYERS, TAPS, BLOCK, MASK, WINDOW = 2, (2, 0), 4, 6, 24
KERNEL, GROUP, RANK, TOP_K = 2, 16, 32, 3
_N_Q, _N_KV = w.HEADS * w.HEAD_DIM, w.KV_HEADS * w.HEAD_DIM
_PROJ = (2 * KERNEL * (w.HIDDEN // GROUP), w.HIDDEN)

_MATRICES = {
    "attn_q": (_N_Q, w.HIDDEN), "attn_k": (_N_KV, w.HIDDEN), "attn_v": (_N_KV, w.HIDDEN),
    "attn_output": (w.HIDDEN, _N_Q), "ffn_gate": (w.FFN, w.HIDDEN), "ffn_up": (w.FFN, w.HIDDEN),
    "ffn_down": (w.HIDDEN, w.FFN),
}  # fmt: skip
_VECTORS = {
    "attn_norm": w.HIDDEN, "ffn_norm": w.HIDDEN, "attn_q_norm": w.HEAD_DIM,
    "attn_k_norm": w.HEAD_DIM,
}  # fmt: skip
_HF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip


def tiny_draft(kind: str = "dflash", arch: str = "dflash") -> w.GGUFBuilder:
    """Build a sound GGUF draft; any ``arch`` but "dflash" is written in the fork dialect."""
    fork = arch != "dflash"
    b = w.GGUFBuilder().add("general.architecture", w.STRING, arch)
    b.add("general.name", w.STRING, "tiny draft")
    for suffix, value in (
        ("block_count", N_LAYERS), ("context_length", 512), ("embedding_length", w.HIDDEN),
        ("feed_forward_length", w.FFN), ("attention.head_count", w.HEADS),
        ("attention.head_count_kv", w.KV_HEADS), ("attention.key_length", w.HEAD_DIM),
        ("attention.value_length", w.HEAD_DIM), ("attention.sliding_window", WINDOW),
        ("rope.dimension_count", w.HEAD_DIM),
    ):  # fmt: skip
        b.add(f"{arch}.{suffix}", w.U32, value)
    b.add(f"{arch}.attention.layer_norm_rms_epsilon", w.F32, 1e-5)
    b.add(f"{arch}.rope.freq_base", w.F32, 7000.0)
    b.add_array(f"{arch}.attention.sliding_window_pattern", w.BOOL, [1, 0])
    b.add_array("tokenizer.ggml.tokens", w.STRING, [f"t{i}" for i in range(w.VOCAB)])
    if fork:
        b.add(f"{arch}.dflash.block_size", w.U32, BLOCK)
        b.add(f"{arch}.dflash.mask_token_id", w.U32, MASK)
        b.add_array(f"{arch}.dflash.target_layer_ids", w.I32, TAPS)
        b.add(f"{arch}.dflash.n_target_features", w.U32, len(TAPS) * w.HIDDEN)
        b.add(f"{arch}.attention.causal", w.BOOL, 0)
    else:
        b.add("dflash.block_size", w.U32, BLOCK)
        b.add("tokenizer.ggml.mask_token_id", w.U32, MASK)
        b.add_array("dflash.target_layers", w.I32, [tap + 1 for tap in TAPS])
    _add_tensors(b, kind, fork)
    if kind == "dflash2":
        for suffix, value in (
            ("conv_kernel_size", KERNEL), ("conv_group_size", GROUP), ("selector_rank", RANK),
            ("selector_top_k", TOP_K),
        ):  # fmt: skip
            b.add(f"{arch}.{suffix}", w.U32, value)
    return b


def _add_tensors(b: w.GGUFBuilder, kind: str, fork: bool) -> None:
    fc, norm = ("dflash.fc", "dflash.hidden_norm") if fork else ("fc", "enc.output_norm")
    b.add_q8_0(f"{fc}.weight", w.HIDDEN, len(TAPS) * w.HIDDEN, 1)
    b.add_f32(f"{norm}.weight", np.ones(w.HIDDEN)).add_f32("output_norm.weight", np.ones(w.HIDDEN))
    for layer in range(N_LAYERS):
        prefix = f"blk.{layer}."
        for name, n in _VECTORS.items():
            stored = "post_attention_norm" if fork and name == "ffn_norm" else name
            b.add_f32(f"{prefix}{stored}.weight", np.ones(n))
        for seed, (name, shape) in enumerate(_MATRICES.items()):
            b.add_q8_0(f"{prefix}{name}.weight", *shape, 10 * layer + seed)
        if kind == "dflash2":
            for part in ("attn", "ffn"):
                b.add_f32(f"{prefix}{part}_conv_base", np.ones((2, KERNEL, w.HIDDEN)))
                b.add_q8_0(f"{prefix}{part}_conv_proj.weight", *_PROJ, 20 + layer)
    if kind == "dflash2":
        for name in ("predecessor", "successor"):
            b.add_q8_0(f"selector_{name}.weight", w.VOCAB, RANK, 30)
        b.add_q8_0("selector_hidden.weight", RANK, w.HIDDEN, 31)


def hf_config(kind: str = "dflash") -> dict:
    """Build ``config.json`` of the same draft."""
    v2 = kind == "dflash2"
    inner = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    if v2:
        inner |= {"block_size": BLOCK, "conv_kernel_size": KERNEL, "conv_group_size": GROUP}
        inner |= {"selector_rank": RANK, "selector_top_k": TOP_K}
    config = {
        "architectures": ["DFlash2DraftModel" if v2 else "DFlashDraftModel"],
        "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "hidden_size": w.HIDDEN, "intermediate_size": w.FFN, "num_hidden_layers": N_LAYERS,
        "num_attention_heads": w.HEADS, "num_key_value_heads": w.KV_HEADS, "head_dim": w.HEAD_DIM,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": w.VOCAB,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0},
        "tie_word_embeddings": False, "num_target_layers": 3, "dflash_config": inner,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW,
        "use_sliding_window": True,
    }  # fmt: skip
    return config if v2 else config | {"block_size": BLOCK}


def hf_tensors(kind: str = "dflash") -> dict:
    """Build its tensors, float16 matrices and float32 vectors."""
    rng = np.random.default_rng(5)

    def matrix(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    tensors = {
        "fc.weight": matrix(w.HIDDEN, len(TAPS) * w.HIDDEN),
        "hidden_norm.weight": np.ones(w.HIDDEN, np.float32),
        "norm.weight": np.ones(w.HIDDEN, np.float32),
    }
    for layer in range(N_LAYERS):
        for name, shape in _MATRICES.items():
            tensors[f"layers.{layer}.{_HF_NAMES[name]}.weight"] = matrix(*shape)
        for name, n in _VECTORS.items():
            tensors[f"layers.{layer}.{_HF_NAMES[name]}.weight"] = np.ones(n, np.float32)
        if kind == "dflash2":
            for part in ("attention_conv", "mlp_conv"):
                prefix = f"layers.{layer}.{part}."
                tensors[prefix + "base_kernel"] = matrix(2, KERNEL, w.HIDDEN)
                tensors[prefix + "kernel_projection.weight"] = matrix(*_PROJ)
    if kind == "dflash2":
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = matrix(w.VOCAB, RANK)
        tensors["candidate_selector.hidden_projection.weight"] = matrix(RANK, w.HIDDEN)
    return tensors


def write_hf(folder, config: dict, tensors: dict, shards: int = 1) -> str:
    """Write a z-lab directory and return its path as text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for index in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{index + 1:05}.safetensors"
        save_file({name: tensors[name] for name in names[index::shards]}, folder / file)
    return str(folder)
