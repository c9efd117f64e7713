"""Write trained weights as GGUF files: the target, or a draft of it.

    python -m scripts.train_pair.export --work DIR --out DIR [--types shipped]

Owns the mapping from the trainer's names to llama.cpp's, the order of rotated rows, and which
matrix gets which type. Names and shapes: llama.cpp 0c1e57098bba ``src/models/muse-glimmer.cpp``
and ``src/models/dflash.cpp``. Invariant: everything a reader needs is in the file; no default of a
reader is relied on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from scripts.train_pair import shapes

TARGET_FILE = "glimmer-tiny-q3_k_m.gguf"
DRAFT_FILES = {
    "dflash": "dflash-glimmer-tiny-q4_k_s.gguf",
    "dflash2": "dflash2-glimmer-tiny-q4_k_m.gguf",
}
LICENSE = "Apache-2.0 AND PSF-2.0"
AUTHOR = "the cudflash project"

# Which type a matrix gets, first match counts. The three files must fit in 16 MB. Narrow are the
# largest matrices, and those that a norm or a gate follows.
MIXES = {
    "f32": dict.fromkeys(("target", "dflash", "dflash2"), (("", "F32"),)),
    "q6_k": dict.fromkeys(("target", "dflash", "dflash2"), (("", "Q6_K"),)),
    "shipped": {
        "target": (("output.weight", "Q6_K"), ("ffn_", "Q3_K"), ("attn_q.", "Q3_K"),
                   ("attn_gate.", "Q3_K"), ("", "Q4_K")),
        "dflash": (("", "Q4_K"),),
        "dflash2": (("attn_", "Q5_K"), ("fc", "Q5_K"), ("", "Q4_K")),
    },
}  # fmt: skip


def file_name(name: str, mix: str) -> str:
    """Name of a file in a mix: ``name`` itself, or with the mix for the types it ends in."""
    return name if mix == "shipped" else f"{name.rsplit('-', 1)[0]}-{mix}.gguf"


def interleave(rows: np.ndarray, n_heads: int, head_dim: int) -> np.ndarray:
    """Reorder rows of one or more heads from split-half to interleaved rotation.

    Parameters
    ----------
    rows : ndarray of shape (n_heads * head_dim, ...)
        Element i of a head pairs with i + head_dim / 2.

    Returns
    -------
    ndarray of the same shape
        Elements 2i and 2i + 1 of a head are a pair.
    """
    halves = rows.reshape(n_heads, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def target_tensors(weights: dict[str, np.ndarray], shape: shapes.TargetShape) -> dict:
    """Rename and reorder the trainer's target weights.

    Only rotated heads are reordered; a layer without positions may keep any order as long as q
    and k agree, so all layers are treated alike.
    """
    out = {
        "token_embd.weight": weights["embedding"],
        "output_norm.weight": weights["output_norm"],
        "output.weight": weights["head"],
    }
    for layer in range(shape.n_layers):
        mine, theirs = f"layers.{layer}.", f"blk.{layer}."
        for name in ("attn_v", "attn_gate", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
                     "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            out[f"{theirs}{name}.weight"] = weights[mine + name]
        for name, heads in (("attn_q", shape.n_heads), ("attn_k", shape.n_kv_heads)):
            out[f"{theirs}{name}.weight"] = interleave(weights[mine + name], heads, shape.head_dim)
            norm = f"{name}_norm"
            out[f"{theirs}{norm}.weight"] = interleave(weights[mine + norm], 1, shape.head_dim)
    return out


def draft_tensors(weights: dict[str, np.ndarray], shape: shapes.DraftShape) -> dict:
    """Rename the trainer's draft weights; drafts rotate split-half in the file too."""
    out = {
        "fc.weight": weights["fc"],
        "enc.output_norm.weight": weights["hidden_norm"],
        "output_norm.weight": weights["output_norm"],
    }
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
             "attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"]  # fmt: skip
    if shape.is_dflash2:
        names += ["attn_conv_proj", "ffn_conv_proj"]
        for name in ("predecessor", "successor", "hidden"):
            out[f"selector_{name}.weight"] = weights[f"selector_{name}"]
    for layer in range(shape.n_layers):
        for name in names:
            out[f"blk.{layer}.{name}.weight"] = weights[f"layers.{layer}.{name}"]
        if shape.is_dflash2:
            for part in ("attn", "ffn"):
                base = weights[f"layers.{layer}.{part}_conv_base"]
                out[f"blk.{layer}.{part}_conv_base"] = base  # no suffix in the format
    return out


def matrix_type(name: str, mix: tuple) -> str:
    """Return the type of a matrix: the first rule with which its name, less the block's, begins."""
    own = name.split(".", 2)[2] if name.startswith("blk.") else name
    return next(kind for mark, kind in mix if own.startswith(mark))


def write_target(path, weights, shape, tokens, merges, mix="shipped"):
    """Write the target.

    Parameters
    ----------
    path : path-like
    weights : dict of str to ndarray, float32
    shape : TargetShape
    tokens, merges : list of str
        In GPT-2's byte alphabet.
    mix : str
        One of ``MIXES``.
    """
    import gguf

    arch = "muse-glimmer"
    out = gguf.GGUFWriter(path, arch)
    out.add_name("Glimmer Tiny")
    out.add_author(AUTHOR)
    out.add_license(LICENSE)
    add_widths(out, shape)
    out.add_rope_freq_base(shape.rope_base)
    out.add_rope_dimension_count(shape.head_dim)
    out.add_sliding_window(shape.window)
    # a period would do for llama.cpp, the array says the same without a rule
    out.add_array(
        f"{arch}.attention.sliding_window_pattern",
        [not shape.is_full(layer) for layer in range(shape.n_layers)],
    )
    out.add_logit_scale(shape.logit_scale)
    out.add_final_logit_softcapping(shape.softcap)
    out.add_vocab_size(shape.vocab_size)
    add_tokenizer(out, tokens, merges)
    add_tensors(out, target_tensors(weights, shape), MIXES[mix]["target"])
    finish(out)


def write_draft(path, weights, shape, tokens, merges, rules, name="Glimmer Tiny"):
    """Write a draft; parameters as in ``write_target``, ``rules`` of a mix, ``name`` the target's."""
    import gguf

    arch = "dflash"
    out = gguf.GGUFWriter(path, arch)
    out.add_name(f"{name} " + ("DFlash2" if shape.is_dflash2 else "DFlash"))
    out.add_author(AUTHOR)
    out.add_license(LICENSE)
    add_widths(out, shape)
    out.add_rope_freq_base(shape.rope_base)
    out.add_rope_dimension_count(shape.head_dim)
    out.add_sliding_window(shape.window)
    out.add_array(f"{arch}.attention.sliding_window_pattern", [True] * shape.n_layers)
    out.add_causal_attention(shape.causal)
    out.add_uint32(f"{arch}.block_size", shape.block_size)
    out.add_array(f"{arch}.target_layers", [tap + 1 for tap in shape.taps])  # layer inputs
    if shape.softcap is not None:
        out.add_logit_scale(shape.logit_scale)
        out.add_final_logit_softcapping(shape.softcap)
    out.add_vocab_size(shape.vocab_size)
    if shape.is_dflash2:
        for key, value in (("conv_kernel_size", shape.conv_kernel),
                           ("conv_group_size", shape.conv_group),
                           ("selector_rank", shape.selector_rank),
                           ("selector_top_k", shape.selector_top_k)):  # fmt: skip
            out.add_uint32(f"{arch}.{key}", value)
    add_tokenizer(out, tokens, merges)
    add_tensors(out, draft_tensors(weights, shape), rules)
    finish(out)


def add_widths(out, shape, n_blocks=None):
    """Add the keys about sizes; ``n_blocks`` where there are more blocks than layers."""
    out.add_block_count(n_blocks or shape.n_layers)
    out.add_context_length(shape.context_length)
    out.add_embedding_length(shape.hidden_dim)
    out.add_feed_forward_length(shape.ffn_dim)
    out.add_head_count(shape.n_heads)
    out.add_head_count_kv(shape.n_kv_heads)
    out.add_key_length(shape.head_dim)
    out.add_value_length(shape.head_dim)
    out.add_layer_norm_rms_eps(shape.rms_eps)


def add_tokenizer(out, tokens, merges):
    """Add the vocabulary."""
    import gguf

    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[: len(shapes.SPECIAL_TOKENS)] = [gguf.TokenType.CONTROL] * len(shapes.SPECIAL_TOKENS)
    out.add_token_types(kinds)
    out.add_token_merges(merges)
    out.add_bos_token_id(shapes.END_TOKEN)
    out.add_eos_token_id(shapes.END_TOKEN)
    out.add_mask_token_id(shapes.MASK_TOKEN)
    out.add_add_bos_token(False)


def add_tensors(out, tensors, mix):
    """Add tensors, each in the type of the first rule of ``mix`` that matches."""
    for name, values in tensors.items():
        values = np.ascontiguousarray(values, np.float32)
        # vectors, and the base of a convolution, are added and multiplied, never packed
        kind = matrix_type(name, mix) if values.ndim == 2 else "F32"
        if kind == "F32":
            out.add_tensor(name, values)
        else:
            import gguf

            out.add_tensor(name, quantise(values, kind), raw_dtype=gguf.GGMLQuantizationType[kind])


def quantise(values: np.ndarray, kind: str) -> np.ndarray:
    """Pack a matrix with ggml's own quantiser.

    Parameters
    ----------
    values : ndarray of shape (n, k), float32
    kind : str
        Name of a ggml type.

    Returns
    -------
    ndarray of shape (n, bytes per row), uint8
    """
    import gguf
    import libgguf

    return np.asarray(libgguf.quantize_rows(values, gguf.GGMLQuantizationType[kind]))


def packed(weights: dict[str, np.ndarray], shape, mix="shipped") -> dict[str, np.ndarray]:
    """What a reader of the target's file finds: every matrix packed and unpacked again.

    Parameters
    ----------
    weights : dict of str to ndarray, float32
        By the trainer's names.
    shape : TargetShape
    mix : str
        One of ``MIXES``.

    Returns
    -------
    dict of str to ndarray, float32
        By the trainer's names. A row is packed by itself, so the order of rows in the file is no
        matter.
    """
    import gguf

    names = {"token_embd.weight": "embedding", "output_norm.weight": "output_norm",
             "output.weight": "head"}  # fmt: skip
    found = {}
    for theirs in target_tensors(weights, shape):
        mine = names.get(theirs) or theirs.replace("blk.", "layers.").removesuffix(".weight")
        values = np.ascontiguousarray(weights[mine], np.float32)
        kind = matrix_type(theirs, MIXES[mix]["target"]) if values.ndim == 2 else "F32"
        if kind != "F32":
            values = gguf.dequantize(quantise(values, kind), gguf.GGMLQuantizationType[kind])
        found[mine] = values
    return found


def finish(out):
    """Write and close."""
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def load_weights(path: Path) -> dict[str, np.ndarray]:
    """Read the parameters of a checkpoint as float32 arrays."""
    import torch

    saved = torch.load(path, map_location="cpu")["params"]
    return {name: value.float().numpy() for name, value in saved.items()}


def main():
    """Export what is trained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", choices=list(MIXES), default="shipped")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vocab = json.loads((args.work / "vocab.json").read_text())
    words, mix = (vocab["tokens"], vocab["merges"]), MIXES[args.types]
    jobs = [("target", TARGET_FILE, shapes.TARGET, write_target, args.types)]
    jobs += [(kind, DRAFT_FILES[kind], shape, write_draft, mix[kind])
             for kind, shape in (("dflash", shapes.DFLASH), ("dflash2", shapes.DFLASH2))]  # fmt: skip
    for name, file, shape, write, types in jobs:
        checkpoint = args.work / f"{name}.pt"
        if checkpoint.exists():
            path = args.out / file_name(file, args.types)
            write(path, load_weights(checkpoint), shape, *words, types)
            print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
