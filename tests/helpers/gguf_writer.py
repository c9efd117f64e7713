"""A small GGUF writer for tests, able to write files that are wrong on purpose.

Own code on purpose: the ``gguf`` package refuses most of the damage tested here, and a second
reading of the layout is worth having.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B",
    U64: "<Q", I64: "<q", F64: "<d",
}  # fmt: skip
TYPE_F32, TYPE_Q8_0 = 0, 8


def string(text: str | bytes) -> bytes:
    """Length-prefixed string."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def scalar(tag: int, value) -> bytes:
    """One number, bool or string."""
    return string(value) if tag == STRING else struct.pack(_FORMATS[tag], value)


def array(tag: int, values, count: int | None = None) -> bytes:
    """Array body; ``count`` overrides the stored length."""
    head = struct.pack("<IQ", tag, len(values) if count is None else count)
    return head + b"".join(scalar(tag, value) for value in values)


@dataclass
class TensorSpec:
    """One tensor to write; ``offset`` overrides the place in the data section."""

    name: str | bytes
    ne: tuple[int, ...]  # ggml order
    type_id: int
    data: bytes
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class GGUFBuilder:
    """Collects keys and tensors; ``build`` makes the bytes. No padding after the last tensor."""

    version: int = 3
    magic: bytes = b"GGUF"
    keys: list[tuple[str | bytes, int, bytes]] = field(default_factory=list)  # name, tag, body
    tensors: list[TensorSpec] = field(default_factory=list)
    alignment: int = 32
    n_keys: int | None = None
    n_tensors: int | None = None

    def add(self, key: str | bytes, tag: int, value) -> GGUFBuilder:
        """Add a scalar or string key."""
        self.keys.append((key, tag, scalar(tag, value)))
        return self

    def add_array(self, key: str, tag: int, values, count: int | None = None) -> GGUFBuilder:
        """Add an array key."""
        self.keys.append((key, ARRAY, array(tag, values, count)))
        return self

    def set(self, key: str, tag: int, value) -> GGUFBuilder:
        """Replace (or add) a key; a list or tuple makes an array."""
        self.drop(key)
        if isinstance(value, list | tuple):
            return self.add_array(key, tag, value)
        return self.add(key, tag, value)

    def drop(self, key: str) -> GGUFBuilder:
        """Remove a key if present."""
        self.keys = [entry for entry in self.keys if entry[0] != key]
        return self

    def tensor(self, name: str) -> TensorSpec:
        """Return the tensor of this name, to be changed in place."""
        return next(t for t in self.tensors if t.name == name)

    def drop_tensor(self, name: str) -> GGUFBuilder:
        """Remove a tensor."""
        self.tensors.remove(self.tensor(name))
        return self

    def add_f32(self, name: str, values) -> GGUFBuilder:
        """Add an F32 tensor of any rank."""
        values = np.asarray(values, "<f4")
        self.tensors.append(TensorSpec(name, values.shape[::-1], TYPE_F32, values.tobytes()))
        return self

    def add_q8_0(self, name: str, n_out: int, n_in: int, seed: int) -> GGUFBuilder:
        """Add a Q8_0 matrix of random blocks."""
        rng = np.random.default_rng(seed)
        blocks = np.empty((n_out, n_in // 32, 34), np.uint8)
        blocks[..., :2] = np.array([0.01], "<f2").view(np.uint8)
        blocks[..., 2:] = rng.integers(0, 256, (n_out, n_in // 32, 32), np.uint8)
        self.tensors.append(TensorSpec(name, (n_in, n_out), TYPE_Q8_0, blocks.tobytes()))
        return self

    def build(self) -> bytes:
        """Make the file."""
        directory, data = [], b""
        for spec in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = len(data) if spec.offset is None else spec.offset
            n_dims = len(spec.ne) if spec.n_dims is None else spec.n_dims
            directory.append(
                string(spec.name)
                + struct.pack("<I", n_dims)
                + struct.pack(f"<{len(spec.ne)}Q", *spec.ne)
                + struct.pack("<IQ", spec.type_id, offset)
            )
            data += spec.data
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        for key, tag, body in self.keys:
            head += string(key) + struct.pack("<I", tag) + body
        head += b"".join(directory)
        return head + b"\0" * (-len(head) % self.alignment) + data

    def write(self, path) -> str:
        """Write the file and return its path as text."""
        path.write_bytes(self.build())
        return str(path)


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 32, 96, 7


def tiny_model(arch: str, n_layers: int = 2) -> GGUFBuilder:
    """Build a sound model of an architecture: hidden 64, 4/2 heads of 32, FFN 96, 7 tokens."""
    b = GGUFBuilder().add("general.architecture", STRING, arch)
    b.add("general.name", STRING, f"tiny {arch}")
    for suffix, value in (
        ("block_count", n_layers), ("context_length", 512), ("embedding_length", HIDDEN),
        ("feed_forward_length", FFN), ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS), ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
    ):  # fmt: skip
        b.add(f"{arch}.{suffix}", U32, value)
    b.add(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5)
    b.add(f"{arch}.rope.freq_base", F32, 500000.0)
    if arch in ("gemma3", "muse-glimmer"):
        b.add(f"{arch}.attention.sliding_window", U32, 24)
    if arch == "muse-glimmer":
        b.add(f"{arch}.logit_scale", F32, 0.4375)
        b.add(f"{arch}.final_logit_softcapping", F32, 12.0)
    b.add("tokenizer.ggml.model", STRING, "gpt2")
    b.add_array("tokenizer.ggml.tokens", STRING, [f"t{i}" for i in range(VOCAB)])
    b.add_q8_0("token_embd.weight", VOCAB, HIDDEN, 1).add_f32("output_norm.weight", _ones(HIDDEN))
    if arch in ("llama", "qwen3", "muse-glimmer"):
        b.add_q8_0("output.weight", VOCAB, HIDDEN, 2)
    for index in range(n_layers):
        _add_layer(b, arch, f"blk.{index}.", 10 * (index + 1))
    return b


def _add_layer(b: GGUFBuilder, arch: str, prefix: str, seed: int) -> None:
    n_q, n_kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    vectors = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    matrices = {
        "attn_q": (n_q, HIDDEN), "attn_k": (n_kv, HIDDEN), "attn_v": (n_kv, HIDDEN),
        "attn_output": (HIDDEN, n_q), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    if arch in ("qwen3", "gemma3", "muse-glimmer"):
        vectors |= {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}
    if arch in ("gemma3", "muse-glimmer"):
        vectors |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
    if arch == "muse-glimmer":
        matrices["attn_gate"] = (n_q, HIDDEN)
    for name, n in vectors.items():
        b.add_f32(f"{prefix}{name}.weight", _ones(n))
    if arch == "qwen2":
        for name, n in (("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)):
            b.add_f32(f"{prefix}{name}.bias", np.arange(n) / n)
    for offset, (name, shape) in enumerate(matrices.items()):
        b.add_q8_0(f"{prefix}{name}.weight", *shape, seed + offset)


def _ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


DELTA_HEADS, DELTA_VALUE_HEADS, DELTA_DIM, DELTA_TAPS = 2, 4, 16, 4


def tiny_hybrid(n_layers: int = 4, interval: int = 2, mtp: bool = True) -> GGUFBuilder:
    """Build a sound qwen35: every ``interval``-th layer attends, an MTP block comes after them."""
    b = GGUFBuilder().add("general.architecture", STRING, "qwen35")
    for suffix, value in (
        ("block_count", n_layers + mtp), ("context_length", 512), ("embedding_length", HIDDEN),
        ("feed_forward_length", FFN), ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS), ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM), ("full_attention_interval", interval),
        ("ssm.conv_kernel", DELTA_TAPS), ("ssm.state_size", DELTA_DIM),
        ("ssm.group_count", DELTA_HEADS), ("ssm.time_step_rank", DELTA_VALUE_HEADS),
        ("ssm.inner_size", DELTA_VALUE_HEADS * DELTA_DIM), ("rope.dimension_count", 8),
    ):  # fmt: skip
        b.add(f"qwen35.{suffix}", U32, value)
    if mtp:
        b.add("qwen35.nextn_predict_layers", U32, 1)
    b.add("qwen35.attention.layer_norm_rms_epsilon", F32, 1e-6)
    b.add("qwen35.rope.freq_base", F32, 1e7)
    b.add_array("qwen35.rope.dimension_sections", I32, [2, 1, 1, 0])
    b.add("tokenizer.ggml.model", STRING, "gpt2")
    b.add_array("tokenizer.ggml.tokens", STRING, [f"t{i}" for i in range(VOCAB)])
    b.add_q8_0("token_embd.weight", VOCAB, HIDDEN, 1).add_f32("output_norm.weight", _ones(HIDDEN))
    b.add_q8_0("output.weight", VOCAB, HIDDEN, 2)
    for index in range(n_layers + mtp):
        attends = index == n_layers or (index + 1) % interval == 0
        _add_hybrid_layer(b, f"blk.{index}.", attends, 20 * (index + 1))
    if mtp:
        prefix = f"blk.{n_layers}.nextn."
        b.add_q8_0(prefix + "eh_proj.weight", HIDDEN, 2 * HIDDEN, 3)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            b.add_f32(f"{prefix}{name}.weight", _ones(HIDDEN))
    return b


def _add_hybrid_layer(b: GGUFBuilder, prefix: str, attends: bool, seed: int) -> None:
    n_q, n_kv, n_v = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, DELTA_VALUE_HEADS
    keys, values = DELTA_HEADS * DELTA_DIM, n_v * DELTA_DIM
    vectors = {"attn_norm": HIDDEN, "post_attention_norm": HIDDEN}
    matrices = {
        "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    if attends:
        vectors |= {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}
        matrices |= {
            "attn_q": (2 * n_q, HIDDEN), "attn_k": (n_kv, HIDDEN), "attn_v": (n_kv, HIDDEN),
            "attn_output": (HIDDEN, n_q),
        }  # fmt: skip
    else:
        vectors["ssm_norm"] = DELTA_DIM
        matrices |= {
            "attn_qkv": (2 * keys + values, HIDDEN), "attn_gate": (values, HIDDEN),
            "ssm_alpha": (n_v, HIDDEN), "ssm_beta": (n_v, HIDDEN), "ssm_out": (HIDDEN, values),
        }  # fmt: skip
        rng = np.random.default_rng(seed)
        b.add_f32(f"{prefix}ssm_conv1d.weight", rng.normal(size=(2 * keys + values, DELTA_TAPS)))
        b.add_f32(f"{prefix}ssm_dt.bias", np.zeros(n_v)).add_f32(f"{prefix}ssm_a", -_ones(n_v))
    for name, n in vectors.items():
        b.add_f32(f"{prefix}{name}.weight", _ones(n))
    for offset, (name, shape) in enumerate(matrices.items()):
        b.add_q8_0(f"{prefix}{name}.weight", *shape, seed + offset)
