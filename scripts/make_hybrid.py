"""Write qwen35 models with random weights: right shapes and formats, for speed and for tests.

    python scripts/make_hybrid.py --shape tiny --out tiny-hybrid.gguf
    python scripts/make_hybrid.py --shape 0.6b --out hybrid-0.6b.gguf

Projections are Q4_K, the down projections and the output head Q6_K; what converters leave as F32 is
F32. K-quant blocks are written directly: random quants under constant scales, so that no quantiser
is needed and a large file takes seconds. A weight has mean near 0 and the standard deviation
``gain / sqrt(inputs)``; the gains are chosen so that the residual stream stays sound and a greedy
answer does not fall into a short cycle (``tests/test_make_hybrid.py`` holds that against 40 distinct
tokens in 200 steps). The file can be loaded by llama.cpp, too.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np

Q4_K_BYTES, Q6_K_BYTES, BLOCK = 144, 210, 256
MIXING, DOWN, HEAD = 1.0, 1.0, 3.0  # gains of what joins the stream, and of the logits
TOKENIZER_BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; every product of rows is a multiple of 256."""

    layers: int
    interval: int  # every so many layers one attends
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dims: int
    sections: tuple
    k_heads: int
    v_heads: int
    delta_dim: int
    vocab: int
    tied: bool
    context: int
    taps: int = 4


SHAPES = {
    "tiny": Shape(8, 4, 256, 512, 8, 2, 32, 16, (3, 3, 2, 0), 4, 8, 32, 512, False, 4096),
    "0.6b": Shape(
        24, 4, 1024, 3072, 8, 2, 256, 64, (11, 11, 10, 0), 16, 16, 128, 151936, True, 8192
    ),
}


def q4_k(rng, n_out, n_in, std):
    """Random Q4_K rows: (n_out, row bytes) uint8. Sub-block scale 32, minimum 60 = 4 d x 60."""
    blocks = np.empty((n_out, n_in // BLOCK, Q4_K_BYTES), np.uint8)
    d = np.float16(std / 147.5)  # 32 d times the deviation of 0..15 is 147.5 d
    blocks[..., 0:2] = np.array([d], np.float16).view(np.uint8)
    blocks[..., 2:4] = np.array([4 * d], np.float16).view(np.uint8)
    blocks[..., 4:16] = np.repeat([160, 252, 192], 4)  # eight 6-bit scales of 32, minima of 60
    blocks[..., 16:] = rng.integers(0, 256, blocks.shape[:2] + (128,), np.uint8)
    return blocks.reshape(n_out, -1)


def q6_k(rng, n_out, n_in, std):
    """Random Q6_K rows: (n_out, row bytes) uint8. Sub-block scale 16."""
    blocks = np.empty((n_out, n_in // BLOCK, Q6_K_BYTES), np.uint8)
    blocks[..., :192] = rng.integers(0, 256, blocks.shape[:2] + (192,), np.uint8)
    blocks[..., 192:208] = 16
    d = np.float16(std / 295.5)  # 16 d times the deviation of -32..31
    blocks[..., 208:] = np.array([d], np.float16).view(np.uint8)
    return blocks.reshape(n_out, -1)


class HybridFile:
    """A model being written."""

    def __init__(self, path, shape, seed, mtp):
        import gguf

        self._gguf, self.shape, self.mtp = gguf, shape, mtp
        self.rng = np.random.default_rng(seed)
        self.writer = gguf.GGUFWriter(str(path), "qwen35")

    def write(self):
        """Write everything and close the file."""
        self._keys()
        self._tokenizer()
        s = self.shape
        self._matrix("token_embd", s.vocab, s.hidden, HEAD if s.tied else 16.0, six=s.tied)
        self._vector("output_norm", s.hidden)
        if not s.tied:
            self._matrix("output", s.vocab, s.hidden, HEAD, six=True)
        for index in range(s.layers):
            self._layer(f"blk.{index}.", attends=(index + 1) % s.interval == 0)
        if self.mtp:
            prefix = f"blk.{s.layers}."
            self._layer(prefix, attends=True)
            self._matrix(prefix + "nextn.eh_proj", s.hidden, 2 * s.hidden, 1.0)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                self._vector(f"{prefix}nextn.{name}", s.hidden)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _keys(self):
        s, w = self.shape, self.writer
        w.add_name("random hybrid")
        for key, value in (
            ("block_count", s.layers + self.mtp), ("context_length", s.context),
            ("embedding_length", s.hidden), ("feed_forward_length", s.ffn),
            ("attention.head_count", s.heads), ("attention.head_count_kv", s.kv_heads),
            ("attention.key_length", s.head_dim), ("attention.value_length", s.head_dim),
            ("full_attention_interval", s.interval), ("ssm.conv_kernel", s.taps),
            ("ssm.state_size", s.delta_dim), ("ssm.group_count", s.k_heads),
            ("ssm.time_step_rank", s.v_heads), ("ssm.inner_size", s.v_heads * s.delta_dim),
            ("rope.dimension_count", s.rope_dims), ("nextn_predict_layers", int(self.mtp)),
        ):  # fmt: skip
            w.add_uint32(f"qwen35.{key}", value)
        w.add_array("qwen35.rope.dimension_sections", list(s.sections))
        w.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
        w.add_float32("qwen35.rope.freq_base", 1e7)

    def _tokenizer(self):
        """Bytes, then words that no text is cut into, then the end-of-generation token."""
        w, n = self.writer, self.shape.vocab
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [b for b in range(TOKENIZER_BYTES) if b not in printable]
        names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
        tokens = [names[b] for b in range(TOKENIZER_BYTES)]
        tokens += [f"<t{i}>" for i in range(TOKENIZER_BYTES, n - 1)] + ["<|endoftext|>"]
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen35")
        w.add_token_list(tokens)
        w.add_token_types([1] * (n - 1) + [3])
        w.add_token_merges(["a b"])
        w.add_eos_token_id(n - 1)

    def _layer(self, prefix, attends):
        s = self.shape
        self._vector(prefix + "attn_norm", s.hidden)
        self._vector(prefix + "post_attention_norm", s.hidden)
        if attends:
            n_q, n_kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
            self._matrix(prefix + "attn_q", 2 * n_q, s.hidden, 1.0)
            self._matrix(prefix + "attn_k", n_kv, s.hidden, 1.0)
            self._matrix(prefix + "attn_v", n_kv, s.hidden, 1.0)
            self._matrix(prefix + "attn_output", s.hidden, n_q, MIXING)
            self._vector(prefix + "attn_q_norm", s.head_dim)
            self._vector(prefix + "attn_k_norm", s.head_dim)
        else:
            self._delta_net(prefix)
        self._matrix(prefix + "ffn_gate", s.ffn, s.hidden, 1.0)
        self._matrix(prefix + "ffn_up", s.ffn, s.hidden, 1.0)
        self._matrix(prefix + "ffn_down", s.hidden, s.ffn, DOWN, six=True)

    def _delta_net(self, prefix):
        s, rng = self.shape, self.rng
        values, conv = s.v_heads * s.delta_dim, (2 * s.k_heads + s.v_heads) * s.delta_dim
        self._matrix(prefix + "attn_qkv", conv, s.hidden, 1.0)
        self._matrix(prefix + "attn_gate", values, s.hidden, 1.0)
        self._matrix(prefix + "ssm_out", s.hidden, values, MIXING)
        for name in ("ssm_alpha", "ssm_beta"):
            rows = rng.normal(0, s.hidden**-0.5, (s.v_heads, s.hidden))
            self._f32(f"{prefix}{name}.weight", rows)
        self._f32(prefix + "ssm_conv1d.weight", rng.normal(0, 0.5, (conv, s.taps)))
        self._f32(prefix + "ssm_dt.bias", rng.uniform(-3, 0, s.v_heads))
        self._f32(prefix + "ssm_a", -np.exp(rng.uniform(-3, 1, s.v_heads)))
        self._vector(prefix + "ssm_norm", s.delta_dim)

    def _matrix(self, name, n_out, n_in, gain, six=False):
        std = gain / n_in**0.5
        kind = self._gguf.GGMLQuantizationType
        raw = (q6_k if six else q4_k)(self.rng, n_out, n_in, std)
        self.writer.add_tensor(name + ".weight", raw, raw_dtype=kind.Q6_K if six else kind.Q4_K)

    def _vector(self, name, n):
        self._f32(name + ".weight", 1 + 0.1 * self.rng.normal(size=n))

    def _f32(self, name, values):
        self.writer.add_tensor(name, np.ascontiguousarray(values, np.float32))


def main():
    """Parse arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--no-mtp", action="store_true", help="leave the MTP block out")
    args = parser.parse_args()
    HybridFile(args.out, SHAPES[args.shape], args.seed, not args.no_mtp).write()
    print(f"{args.out}: written", file=sys.stderr)


if __name__ == "__main__":
    main()
