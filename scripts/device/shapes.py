"""Shapes of the models that the card is measured with, and tiny ones for a run without a card.

Muse-Glimmer-30B and Qwen3.8-27B, a hybrid of gated delta net and attention, each with a draft.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Product:
    """One weight matrix."""

    name: str
    type: str
    k: int
    n: int


@dataclass(frozen=True)
class ModelShape:
    """A target and its draft."""

    name: str
    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    window: int | None  # of three layers in four; None: every layer sees everything
    gated: bool
    types: tuple  # of attention, ffn_gate and up, ffn_down, head
    draft_layers: int
    draft_heads: int
    draft_kv_heads: int
    draft_head_dim: int
    block: int
    taps: tuple
    # key heads, value heads, their dimension, taps of the convolution: then one layer in four
    # attends, with its gates in attn_q, and the others are gated delta nets
    delta: tuple | None = None


@dataclass(frozen=True)
class Sizes:
    """What one run does."""

    products: tuple
    models: tuple
    contexts: tuple
    rows: tuple  # M of the measured products
    verified_rows: int  # weight rows that are compared with the CPU
    rotate_bytes: int  # of copies of a matrix that are gone through, so that no cache helps
    copy_bytes: int
    steps: int  # measured steps of a whole model
    pairs: tuple  # recorded tiny pairs for the comparison of whole answers


MUSE = (
    Product("attn_q", "Q4_K", 6656, 4096), Product("attn_k", "Q4_K", 6656, 256),
    Product("attn_v", "Q6_K", 6656, 256), Product("attn_output", "Q4_K", 4096, 6656),
    Product("ffn_gate", "Q4_K", 6656, 19968), Product("ffn_down", "Q4_K", 19968, 6656),
    Product("ffn_down", "Q6_K", 19968, 6656), Product("lm_head", "Q5_K", 6656, 202048),
    Product("draft.k", "Q4_K", 6656, 1024), Product("draft.v", "Q6_K", 6656, 1024),
    Product("draft.fc", "Q4_K", 33280, 6656),
)
QWEN = (
    Product("27B attn_q + gate", "Q4_K", 5120, 12288), Product("27B attn_output", "Q4_K", 6144, 5120),
    Product("27B attn_qkv", "Q4_K", 5120, 10240),
    Product("27B ffn_gate", "Q4_K", 5120, 17408), Product("27B ffn_down", "Q6_K", 17408, 5120),
    Product("27B lm_head", "Q6_K", 5120, 248320),
)
MUSE_30B = ModelShape(
    "Muse-Glimmer-30B shape", 52, 6656, 19968, 32, 2, 128, 202048, 2048, True,
    ("Q4_K", "Q4_K", "Q6_K", "Q5_K"), 5, 32, 8, 128, 16, (1, 13, 25, 37, 49))
HYBRID_27B = ModelShape(
    "Qwen3.8-27B shape", 64, 5120, 17408, 24, 4, 256, 248320, None, False,
    ("Q4_K", "Q4_K", "Q6_K", "Q6_K"), 5, 32, 8, 128, 8, (5, 19, 33, 47, 61), (16, 48, 128, 4))
FULL = Sizes(
    products=MUSE + QWEN, models=(MUSE_30B, HYBRID_27B), contexts=(512, 8192, 32768),
    rows=(1, 2, 4, 8, 16), verified_rows=256, rotate_bytes=600 << 20, copy_bytes=1 << 30, steps=24,
    pairs=("v1-muse-swa", "v2-muse-full", "v2-qwen35-mixed"))
_TINY_MODEL = replace(
    MUSE_30B, name="tiny shape", n_layers=2, hidden=256, ffn=256, n_heads=4, head_dim=64,
    vocab=300, window=40, draft_layers=1, draft_heads=4, draft_kv_heads=2, draft_head_dim=64,
    block=8, taps=(0, 1))
_TINY_HYBRID = replace(
    _TINY_MODEL, name="tiny hybrid shape", n_layers=4, window=None, gated=False, taps=(0, 1, 2, 3),
    delta=(2, 8, 32, 4))
TINY = Sizes(
    products=(Product("q", "Q4_K", 512, 48), Product("v", "Q6_K", 256, 16)),
    models=(_TINY_MODEL, _TINY_HYBRID),
    contexts=(64,), rows=(1, 8), verified_rows=16, rotate_bytes=1 << 14, copy_bytes=1 << 16,
    steps=2, pairs=("v2-muse-full",))
