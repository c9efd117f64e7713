"""Sizes of the embedded pair, and everything its two trainings must agree on.

Owns every number that ends up in the metadata of the three files. Needs no torch, so that tests
and the exporter can read it.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCAB = 1024
END_TOKEN, MASK_TOKEN = 0, 1
SPECIAL_TOKENS = ("<|endoftext|>", "<|mask|>")

SINK = 64  # first context rows that cudflash can pin in a windowed draft; some batches train so
RECORD_DISTANCE = 48  # tokens per line of the synthetic records: between half the window and it


@dataclass(frozen=True)
class TargetShape:
    """A muse-glimmer target."""

    n_layers: int = 8
    hidden_dim: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    ffn_dim: int = 768
    window: int = 128
    period: int = 4  # layer l is full (and without positions) iff l % period == period - 1
    rope_base: float = 10000.0
    rms_eps: float = 1e-5
    post_norm_eps: float = 1e-8  # a constant of the architecture
    logit_scale: float = 0.5
    softcap: float = 30.0
    context_length: int = 2048
    vocab_size: int = VOCAB

    def is_full(self, layer: int) -> bool:
        """Whether a layer sees the whole context."""
        return layer % self.period == self.period - 1

    @property
    def q_dim(self) -> int:
        """Rows of attn_q."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of attn_k and attn_v."""
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class DraftShape:
    """A DFlash draft; with ``selector_rank`` a DFlash2 draft."""

    block_size: int = 16
    causal: bool = True
    n_layers: int = 5
    hidden_dim: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    ffn_dim: int = 512
    window: int = 64
    rope_base: float = 10000.0
    rms_eps: float = 1e-5
    taps: tuple[int, ...] = (1, 3, 4, 5, 6)  # 0-based layers whose output is read
    logit_scale: float = 0.5  # the target's: the head is borrowed
    softcap: float = 30.0
    context_length: int = 2048
    vocab_size: int = VOCAB
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def is_dflash2(self) -> bool:
        """Whether the draft has convolutions and a selector."""
        return self.selector_rank > 0

    @property
    def q_dim(self) -> int:
        """Rows of attn_q."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of attn_k and attn_v."""
        return self.n_kv_heads * self.head_dim


TARGET = TargetShape()
DFLASH = DraftShape()
# the published DFlash2 drafts see the whole block from every row, DFlash's own rule is causal
DFLASH2 = DraftShape(
    block_size=8, causal=False, conv_kernel=2, conv_group=32, selector_rank=256, selector_top_k=8
)
