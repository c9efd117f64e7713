"""Models with random packed weights in the right shapes, made on the device.

A few rows of random blocks with finite scales are packed, and their tiles repeated by copies inside
the device: 17 GB take no time on the host, and every byte has an address of its own. What such a
model says is nonsense; what it costs is not.
"""

from dataclasses import fields

import numpy as np

from cudflash.loader.config import DeltaConfig, LayerConfig, RopeConfig, TargetConfig
from cudflash.loader.draft_config import DraftConfig, DraftLayerConfig
from cudflash.model.draft_weights import DeviceDraftLayer, DraftModel
from cudflash.model.rope import rope_table
from cudflash.model.weights import DeviceLayer, TargetModel
from cudflash.ops.cuda.embed import EmbeddingTable
from cudflash.ops.cuda.formats import FORMATS, packed_nbytes
from cudflash.ops.cuda.packed import PackedMatrix

# half-precision scales of a block: byte offsets
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
           "IQ4_XS": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,),
           "Q5_1": (0, 2), "IQ4_NL": (0,)}
SEED_ROWS = 64


def random_rows(name, n, k, seed=0, scale=0.02):
    """Random raw rows (n, row_bytes) of a packed format with finite scales."""
    rng = np.random.default_rng([seed, n, k])
    fmt = FORMATS[name]
    raw = rng.integers(0, 256, (n, k // fmt.block, fmt.block_bytes), dtype=np.uint8)
    for offset in _SCALES[name]:
        values = (rng.standard_normal(raw.shape[:2]) * scale / np.sqrt(k)).astype(np.float16)
        raw[..., offset:offset + 2] = values[..., None].view(np.uint8)
    return raw.reshape(n, -1)


class Maker:
    """Makes matrices on one device; the tiles of a few rows are made once per type and width."""

    def __init__(self, ops):
        self.ops = ops
        self._seeds = {}

    def matrix(self, name, n, k):
        """Packed (n, k) matrix."""
        seed = self._seed(name, k)
        data = self.ops.empty((packed_nbytes(name, n, k),), np.uint8)
        self._repeat(data, seed.data)
        return PackedMatrix(name, n, k, data)

    def table(self, name, n, k):
        """Embedding table of raw rows."""
        seed = self.ops.upload(random_rows(name, min(n, SEED_ROWS), k).reshape(-1))
        raw = self.ops.empty((n, FORMATS[name].block_bytes * (k // FORMATS[name].block)), np.uint8)
        self._repeat(raw.reshape(-1), seed)
        return EmbeddingTable(name, n, k, raw)

    def floats(self, n, k):
        """Packed (n, k) matrix of float32."""
        rows = np.random.default_rng([n, k]).standard_normal((n, k)) / np.sqrt(k)
        return self.ops.pack(rows.astype(np.float32).view(np.uint8), "F32", k)

    def ones(self, n):
        """Norm weights."""
        return self.ops.upload(np.ones(n, np.float32))

    def _seed(self, name, k):
        if (name, k) not in self._seeds:
            self._seeds[name, k] = self.ops.pack(random_rows(name, SEED_ROWS, k), name, k)
        return self._seeds[name, k]

    def _repeat(self, target, source):
        """Fill flat bytes with copies of others; doubles what is there, so few copies do."""
        driver, done = self.ops.driver, min(target.nbytes, source.nbytes)
        driver.copy_within(target.address, source.address, done)
        while done < target.nbytes:
            n = min(done, target.nbytes - done)
            driver.copy_within(target.address + done, target.address, n)
            done += n


def target_config(shape, n_ctx):
    """Configuration of a shape, as the loader would make it."""
    rope = RopeConfig("split_half", shape.head_dim, 1e6, 1.0, None, 1.0)
    layers = tuple(
        LayerConfig(shape.n_heads, shape.n_kv_heads, shape.ffn,
                    None if index % 4 == 3 else shape.window, rope)
        if index % 4 == 3 or shape.delta is None else
        LayerConfig(0, 0, shape.ffn, None, None, delta_config(shape))
        for index in range(shape.n_layers)
    )
    return TargetConfig(
        arch="muse-glimmer", name=shape.name, n_layers=shape.n_layers, hidden_dim=shape.hidden,
        head_dim=shape.head_dim, vocab_size=shape.vocab, context_length=n_ctx, rms_eps=1e-6,
        post_norm_eps=1e-6, layers=layers, embedding_scale=1.0, embedding_norm=False,
        attn_scale=shape.head_dim**-0.5, attn_softcap=None, activation="silu",
        attn_gate=shape.gated, fused_q_gate=shape.delta is not None, qk_norm=True,
        post_norms=False, logit_scale=1.0, final_softcap=None, tied_output=False)


def delta_config(shape):
    """What the layers without attention are."""
    n_k, n_v, dim, taps = shape.delta
    return DeltaConfig(n_k, n_v, dim, dim, taps)


def target_model(maker, shape, n_ctx):
    """TargetModel of a shape."""
    config = target_config(shape, n_ctx)
    rope = next(layer.rope for layer in config.layers if layer.delta is None)
    table = maker.ops.upload(rope_table(rope, n_ctx))
    layers = tuple(
        _attention_layer(maker, shape, table) if layer.delta is None
        else _delta_layer(maker, shape, layer.delta) for layer in config.layers
    )
    return TargetModel(
        config, maker.table("Q4_K", shape.vocab, shape.hidden), maker.ones(shape.hidden),
        maker.matrix(shape.types[3], shape.vocab, shape.hidden), layers)


def _layer(maker, shape, sizes, **given):
    """A layer of packed matrices and what is given; other fields are None."""
    _, gate, down, _ = shape.types
    sizes |= {"ffn_gate": (gate, shape.ffn, shape.hidden), "ffn_up": (gate, shape.ffn, shape.hidden),
              "ffn_down": (down, shape.hidden, shape.ffn)}
    made = {name: maker.matrix(*size) for name, size in sizes.items()} | given
    norms = {name: maker.ones(shape.hidden) for name in ("attn_norm", "ffn_norm")}
    absent = dict.fromkeys(field.name for field in fields(DeviceLayer))
    return DeviceLayer(**(absent | norms | made))


def _attention_layer(maker, shape, table):
    attention, _, down, _ = shape.types
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    sizes = {
        "attn_q": (attention, q if shape.delta is None else 2 * q, shape.hidden),
        "attn_k": (attention, kv, shape.hidden), "attn_v": (down, kv, shape.hidden),
        "attn_output": (attention, shape.hidden, q),
    }
    if shape.gated:
        sizes["attn_gate"] = attention, q, shape.hidden
    norms = {name: maker.ones(shape.head_dim) for name in ("attn_q_norm", "attn_k_norm")}
    return _layer(maker, shape, sizes, rope_table=table, **norms)


def _delta_layer(maker, shape, delta):
    kind, ops = shape.types[0], maker.ops
    sizes = {"attn_qkv": (kind, delta.conv_width, shape.hidden),
             "attn_gate": (kind, delta.v_width, shape.hidden),
             "ssm_out": (kind, shape.hidden, delta.v_width)}
    return _layer(
        maker, shape, sizes, ssm_alpha=maker.floats(delta.n_v_heads, shape.hidden),
        ssm_beta=maker.floats(delta.n_v_heads, shape.hidden), ssm_norm=maker.ones(delta.v_dim),
        ssm_conv=ops.upload(np.full((delta.conv_taps, delta.conv_width), 0.25, np.float32)),
        ssm_dt=maker.ones(delta.n_v_heads),
        ssm_a=ops.upload(np.full(delta.n_v_heads, -0.1, np.float32)))


def draft_model(maker, shape, target, n_ctx):
    """DraftModel of a shape: DFlash, sliding window, head and embedding the target's."""
    rope = RopeConfig("split_half", shape.draft_head_dim, 1e6, 1.0, None, 1.0)
    config = DraftConfig(
        kind="dflash", dialect="gguf", name=f"draft of {shape.name}", n_layers=shape.draft_layers,
        hidden_dim=shape.hidden, head_dim=shape.draft_head_dim, n_heads=shape.draft_heads,
        n_kv_heads=shape.draft_kv_heads, ffn_dim=shape.ffn, vocab_size=shape.vocab,
        context_length=n_ctx, block_size=shape.block, taps=shape.taps, n_target_layers=None,
        mask_token_id=1, rms_eps=1e-6, rope=rope,
        layers=tuple(DraftLayerConfig(2048, False) for _ in range(shape.draft_layers)),
        attn_scale=shape.draft_head_dim**-0.5, value_scale=1.0, embedding_scale=1.0,
        activation="silu", logit_scale=1.0, final_softcap=None, conv_kernel=None, conv_group=None,
        selector_rank=None, selector_top_k=None, own_embedding=False, own_head=False, sink=64,
        **dict.fromkeys(("window_source", "sink_source", "causal_source", "block_size_source",
                         "taps_source", "mask_token_source", "logit_scale_source"), "default"))
    q = shape.draft_heads * shape.draft_head_dim
    kv = shape.draft_kv_heads * shape.draft_head_dim
    attention, gate, down, _ = shape.types
    sizes = {"attn_q": (attention, q, shape.hidden), "attn_k": (attention, kv, shape.hidden),
             "attn_v": (down, kv, shape.hidden), "attn_output": (attention, shape.hidden, q),
             "ffn_gate": (gate, shape.ffn, shape.hidden), "ffn_up": (gate, shape.ffn, shape.hidden),
             "ffn_down": (down, shape.hidden, shape.ffn)}
    absent = dict.fromkeys(("attn_conv_base", "attn_conv_proj", "ffn_conv_base", "ffn_conv_proj"))
    layers = tuple(
        DeviceDraftLayer(
            **{name: maker.matrix(*size) for name, size in sizes.items()}, **absent,
            attn_norm=maker.ones(shape.hidden), ffn_norm=maker.ones(shape.hidden),
            attn_q_norm=maker.ones(shape.draft_head_dim),
            attn_k_norm=maker.ones(shape.draft_head_dim))
        for _ in range(shape.draft_layers)
    )
    return DraftModel(
        config=config, n_ctx=n_ctx,
        fc=maker.matrix(attention, shape.hidden, len(shape.taps) * shape.hidden),
        hidden_norm=maker.ones(shape.hidden), output_norm=maker.ones(shape.hidden), layers=layers,
        rope_table=maker.ops.upload(rope_table(rope, n_ctx + shape.block)),
        embedding=target.embedding, head=target.output, predecessor=None, successor=None,
        selector_hidden=None)

