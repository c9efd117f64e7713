"""Write the trained hybrid as a GGUF file, with its MTP block where that is trained, and its draft.

    python -m scripts.train_pair.hybrid_export --work DIR --out DIR [--types f32]

Owns the mapping from the trainer's names to llama.cpp's ``qwen35``. Norms are written as they are:
the 1 that converters fold in is in the trained weights already. Names and shapes: llama.cpp
0c1e57098bba ``src/models/qwen35.cpp``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from scripts.train_pair import export, shapes

NAME = "Hybrid Tiny"
FILE = "hybrid-tiny-q4_k_m.gguf"
DRAFT_FILE = "dflash2-hybrid-tiny-q4_k_m.gguf"
BOTH = ("attn_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm")
DELTA = ("attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta", "ssm_norm")
JOINT = ("eh_proj", "enorm", "hnorm", "shared_head_norm")

# gates of a recurrence stay float32, as converters leave them
MIXES = {
    "f32": (("", "F32"),),
    "q4_k_m": (
        ("ssm_alpha", "F32"), ("ssm_beta", "F32"), ("ssm_conv1d", "F32"),
        ("token_embd", "Q6_K"), ("output.weight", "Q6_K"), ("attn_output", "Q6_K"),
        ("attn_v", "Q6_K"), ("ffn_down", "Q6_K"), ("", "Q4_K"),
    ),
}  # fmt: skip
DRAFT_MIXES = {
    "f32": (("", "F32"),),
    "q4_k_m": (("attn_v", "Q6_K"), ("ffn_down", "Q6_K"), ("", "Q4_K")),
}


def tensors(weights, shape, mtp=None):
    """Rename the trainer's weights.

    Parameters
    ----------
    weights : dict of str to ndarray, float32
    shape : HybridShape
    mtp : dict of str to ndarray, optional
        The MTP block's.

    Returns
    -------
    dict of str to ndarray
    """
    out = {
        "token_embd.weight": weights["embedding"],
        "output_norm.weight": weights["output_norm"],
        "output.weight": weights["head"],
    }
    for layer in range(shape.n_layers):
        mine, theirs = f"layers.{layer}.", f"blk.{layer}."
        full = shape.is_full(layer)
        for name in BOTH + (ATTENTION if full else DELTA):
            out[f"{theirs}{name}.weight"] = weights[mine + name]
        if not full:
            out[theirs + "ssm_conv1d.weight"] = weights[mine + "ssm_conv"]
            out[theirs + "ssm_dt.bias"] = weights[mine + "ssm_dt"]
            out[theirs + "ssm_a"] = -np.exp(weights[mine + "log_a"])
    if mtp is not None:
        theirs = f"blk.{shape.n_layers}."
        for name in BOTH + ATTENTION:
            out[f"{theirs}{name}.weight"] = mtp[name]
        for name in JOINT:
            out[f"{theirs}nextn.{name}.weight"] = mtp[name]
    return out


def write_target(path, weights, shape, tokens, merges, mix="q4_k_m", mtp=None):
    """Write the target; parameters as in ``export.write_target``.

    Parameters
    ----------
    mtp : dict of str to ndarray, optional
        Weights of the MTP block; without them the file has none.
    """
    import gguf

    arch = "qwen35"
    out = gguf.GGUFWriter(path, arch)
    out.add_name(NAME)
    out.add_author(export.AUTHOR)
    out.add_license(export.LICENSE)
    export.add_widths(out, shape, shape.n_layers + (mtp is not None))
    out.add_rope_freq_base(shape.rope_base)
    for key, value in (
        ("full_attention_interval", shape.interval), ("ssm.conv_kernel", shape.conv_taps),
        ("ssm.state_size", shape.delta_dim), ("ssm.group_count", shape.n_delta_k_heads),
        ("ssm.time_step_rank", shape.n_delta_v_heads), ("ssm.inner_size", shape.delta_v_width),
        ("rope.dimension_count", shape.rope_dims), ("vocab_size", shape.vocab_size),
    ):  # fmt: skip
        out.add_uint32(f"{arch}.{key}", value)
    if mtp is not None:
        out.add_uint32(f"{arch}.nextn_predict_layers", 1)
    out.add_array(f"{arch}.rope.dimension_sections", list(shape.rope_sections))
    export.add_tokenizer(out, tokens, merges)
    export.add_tensors(out, tensors(weights, shape, mtp), MIXES[mix])
    export.finish(out)


def main():
    """Export what is trained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", choices=list(MIXES), default="q4_k_m")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vocab = json.loads((args.work / "vocab.json").read_text())
    words = vocab["tokens"], vocab["merges"]
    found = {name: export.load_weights(args.work / f"{name}.pt")
             for name in ("target", "mtp", "dflash2") if (args.work / f"{name}.pt").exists()}
    path = args.out / FILE.replace("q4_k_m", args.types)
    write_target(path, found["target"], shapes.HYBRID, *words, args.types, found.get("mtp"))
    print(path.name, path.stat().st_size)
    if "dflash2" in found:
        path = args.out / DRAFT_FILE.replace("q4_k_m", args.types)
        rules = DRAFT_MIXES[args.types]
        export.write_draft(path, found["dflash2"], shapes.HYBRID_DFLASH2, *words, rules, NAME)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
