"""Tensors of a gated-delta-net layer and of the MTP block: names, shapes, which are projections.

Owns their table. Must not know how a tensor is multiplied. Value heads stand in tiled order, as
converters write them: value head j uses key head j mod n_k_heads.

Source: llama.cpp 0c1e57098bba, ``src/models/qwen35.cpp``; ``conversion/qwen.py`` (order of heads,
and the 1 that is folded into every norm but the delta net's).
"""

from __future__ import annotations

from cudflash.loader.config import TargetConfig
from cudflash.loader.gguf import GGUFFile

MTP_FIELDS = ("eh_proj", "enorm", "hnorm", "head_norm", "token_embd", "head")


def delta_tensors(config: TargetConfig, index: int) -> dict[str, tuple[str, tuple, bool]]:
    """Tensors of layer ``index`` by field of ``LayerWeights``: (name, shape, projection)."""
    layer, hidden = config.layers[index], config.hidden_dim
    delta, ffn = layer.delta, layer.ffn_dim
    prefix = f"blk.{index}."
    return {
        "attn_norm": (prefix + "attn_norm.weight", (hidden,), False),
        "attn_qkv": (prefix + "attn_qkv.weight", (delta.conv_width, hidden), True),
        "attn_gate": (prefix + "attn_gate.weight", (delta.v_width, hidden), True),
        "ssm_conv": (prefix + "ssm_conv1d.weight", (delta.conv_width, delta.conv_taps), False),
        "ssm_alpha": (prefix + "ssm_alpha.weight", (delta.n_v_heads, hidden), True),
        "ssm_beta": (prefix + "ssm_beta.weight", (delta.n_v_heads, hidden), True),
        "ssm_dt": (prefix + "ssm_dt.bias", (delta.n_v_heads,), False),
        "ssm_a": (prefix + "ssm_a", (delta.n_v_heads,), False),
        "ssm_norm": (prefix + "ssm_norm.weight", (delta.v_dim,), False),
        "ssm_out": (prefix + "ssm_out.weight", (hidden, delta.v_width), True),
        "ffn_norm": (prefix + config.pre_ffn_norm + ".weight", (hidden,), False),
        "ffn_gate": (prefix + "ffn_gate.weight", (ffn, hidden), True),
        "ffn_up": (prefix + "ffn_up.weight", (ffn, hidden), True),
        "ffn_down": (prefix + "ffn_down.weight", (hidden, ffn), True),
    }


def mtp_tensors(
    gguf: GGUFFile, config: TargetConfig, index: int
) -> dict[str, tuple[str, tuple, bool]]:
    """Tensors that join block ``index`` to the target, by field of ``MTPWeights``."""
    prefix, hidden = f"blk.{index}.nextn.", config.hidden_dim
    table = (config.vocab_size, hidden)
    found = {
        "eh_proj": (prefix + "eh_proj.weight", (hidden, 2 * hidden), True),
        "enorm": (prefix + "enorm.weight", (hidden,), False),
        "hnorm": (prefix + "hnorm.weight", (hidden,), False),
    }
    norm = prefix + "shared_head_norm.weight"
    norm = norm if norm in gguf.tensors else "output_norm.weight"
    found["head_norm"] = (norm, (hidden,), False)
    for field, name in (("token_embd", "embed_tokens"), ("head", "shared_head_head")):
        if f"{prefix}{name}.weight" in gguf.tensors:
            found[field] = (f"{prefix}{name}.weight", table, True)
    return found
