"""What draft tensors are called in the three dialects.

Owns names only. Must not know shapes. Invariant: a field maps to the same tensor of the graph in
every dialect.

Source: llama.cpp 0c1e57098bba ``gguf-py/gguf/tensor_mapping.py`` 1386-1436 (both spellings);
spiritbuun/buun-llama-cpp and Luce-Org/lucebox (fork names); z-lab dflash 0.1.0 ``dflash/model.py``.
"""

from __future__ import annotations

import re

BESIDE = "dflash-*.gguf"  # name under which a draft is looked for in the model's folder

# field -> names it may have, by dialect; the first is the one a message asks for
TOP = {
    "gguf": {
        "fc": ("fc.weight",),
        "hidden_norm": ("enc.output_norm.weight",),
        "output_norm": ("output_norm.weight",),
        "token_embd": ("token_embd.weight",),
        "output": ("output.weight",),
        "selector_predecessor": ("selector_predecessor.weight",),
        "selector_successor": ("selector_successor.weight",),
        "selector_hidden": ("selector_hidden.weight",),
    },
    "safetensors": {
        "fc": ("fc.weight", "encoder.fc.weight"),
        "hidden_norm": ("hidden_norm.weight", "encoder.output_norm_enc.weight"),
        "output_norm": ("norm.weight",),
        "token_embd": ("embed_tokens.weight",),
        "output": ("lm_head.weight",),
        "selector_predecessor": ("candidate_selector.predecessor_codebook",),
        "selector_successor": ("candidate_selector.successor_codebook",),
        "selector_hidden": ("candidate_selector.hidden_projection.weight",),
    },
}
TOP["gguf-fork"] = TOP["gguf"] | {
    "fc": ("dflash.fc.weight", "dflash_fc.weight", "fc.weight"),
    "hidden_norm": (
        "dflash.hidden_norm.weight", "dflash_hidden_norm.weight", "enc.output_norm.weight",
    ),
}  # fmt: skip

_FIELDS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "attn_conv_proj", "ffn_conv_proj",
)  # fmt: skip
_GGUF_LAYER = {field: (f"{field}.weight",) for field in _FIELDS} | {
    "attn_conv_base": ("attn_conv_base",),  # no suffix
    "ffn_conv_base": ("ffn_conv_base",),
}
LAYER = {
    "gguf": _GGUF_LAYER,
    # forks keep the source's name of the norm before the MLP
    "gguf-fork": _GGUF_LAYER | {"ffn_norm": ("ffn_norm.weight", "post_attention_norm.weight")},
    "safetensors": {
        "attn_norm": ("input_layernorm.weight",),
        "attn_q": ("self_attn.q_proj.weight",),
        "attn_k": ("self_attn.k_proj.weight",),
        "attn_v": ("self_attn.v_proj.weight",),
        "attn_output": ("self_attn.o_proj.weight",),
        "attn_q_norm": ("self_attn.q_norm.weight",),
        "attn_k_norm": ("self_attn.k_norm.weight",),
        "ffn_norm": ("post_attention_layernorm.weight",),
        "ffn_gate": ("mlp.gate_proj.weight",),
        "ffn_up": ("mlp.up_proj.weight",),
        "ffn_down": ("mlp.down_proj.weight",),
        "attn_conv_base": ("attention_conv.base_kernel",),
        "attn_conv_proj": ("attention_conv.kernel_projection.weight",),
        "ffn_conv_base": ("mlp_conv.base_kernel",),
        "ffn_conv_proj": ("mlp_conv.kernel_projection.weight",),
    },
}
LAYER_PREFIX = {"gguf": "blk.{}.", "gguf-fork": "blk.{}.", "safetensors": "layers.{}."}
LAYER_OF = re.compile(r"(?:blk|layers)\.(\d+)\.")

# Parts of names that tell what a leftover tensor is for.
EXTRAS = (
    (("d2t", "t2d", "draft_id_to_target_id"), "a reduced draft vocabulary"),
    (("markov_", "conf_proj", "confidence", "dspark"), "a DSpark head"),
    (("domino",), "a Domino head"),
    (("hc_", "_exps", "attn_q_a", "attn_kv"), "a DSV4-DSpark block"),
    (("attn_sinks", "sinks"), "attention sink logits"),
    (("mask_embedding",), "a mask embedding of its own"),
    (("rope_freqs",), "RoPE frequency factors"),
    ((".bias",), "biases"),
    (("post_attention_norm", "post_ffw_norm", "layer_output_scale"), "sandwich norms"),
)
