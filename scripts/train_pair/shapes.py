"""Sizes of the trained models, and everything their trainings must agree on.

Two families: "glimmer" is the embedded pair, "hybrid" the small qwen35 of the tests. Owns every number
that ends up in the metadata of their files. Needs no torch, so that tests and the exporter can read
it.
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
    """A muse-glimmer target.

    Deep and thin: a layer costs time by its steps as much as by its bytes, and the drafts have five
    layers however many the target has.
    """

    n_layers: int = 40
    hidden_dim: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    ffn_dim: int = 512
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
class HybridShape:
    """A qwen35 target: delta nets, every ``interval``-th layer gated attention, one MTP block.

    Letters as in the published model: P key heads and Q value heads of a delta net; value head j
    reads key head j mod P.
    """

    n_layers: int = 4
    interval: int = 4
    hidden_dim: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    rope_dims: int = 32  # of a head; the rest is not rotated
    rope_sections: tuple[int, ...] = (6, 5, 5, 0)  # of its pairs: text moves along all alike
    n_delta_k_heads: int = 4
    n_delta_v_heads: int = 8
    delta_dim: int = 32
    conv_taps: int = 4
    ffn_dim: int = 512
    rope_base: float = 10000.0
    rms_eps: float = 1e-6
    logit_scale: float = 1.0
    softcap: float | None = None
    context_length: int = 2048
    vocab_size: int = VOCAB

    def is_full(self, layer: int) -> bool:
        """Whether a layer attends."""
        return layer % self.interval == self.interval - 1

    @property
    def q_dim(self) -> int:
        """Width of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of attn_k and attn_v."""
        return self.n_kv_heads * self.head_dim

    @property
    def delta_k_width(self) -> int:
        """Width of all key heads of a delta net."""
        return self.n_delta_k_heads * self.delta_dim

    @property
    def delta_v_width(self) -> int:
        """Width of all value heads of a delta net."""
        return self.n_delta_v_heads * self.delta_dim

    @property
    def conv_width(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.delta_k_width + self.delta_v_width


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
    ffn_dim: int = 256
    window: int = 64
    rope_base: float = 10000.0
    rms_eps: float = 1e-5
    # 0-based layers whose output is read; beside each are layers of the first part of the training,
    # so that a tap one layer off reads something else
    taps: tuple[int, ...] = (6, 18, 24, 34, 38)
    logit_scale: float = 0.5  # the target's: the head is borrowed
    softcap: float | None = 30.0
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


def grown_from(shallow: int, deep: int, period: int) -> list[tuple[int, bool]]:
    """Where the layers of a deepened stack come from.

    Groups of ``period`` layers are repeated, so that the kinds of layers keep their order; the first
    of the copies goes on as it was. Where not every group is repeated as often, those are that are
    spread evenly, half a step from the ends.

    Parameters
    ----------
    shallow, deep : int
        Numbers of layers, multiples of ``period``.
    period : int

    Returns
    -------
    list of (int, bool)
        Per layer: the layer whose weights it takes, and whether it adds nothing at first.
    """
    groups, grown = shallow // period, deep // period
    until = [(2 * group * grown + groups) // (2 * groups) for group in range(groups + 1)]
    return [
        (group * period + layer, copy > 0)
        for group in range(groups)
        for copy in range(until[group + 1] - until[group])
        for layer in range(period)
    ]


TARGET = TargetShape()
DFLASH = DraftShape()
# the published DFlash2 drafts see the whole block from every row, DFlash's own rule is causal
DFLASH2 = DraftShape(
    block_size=8, causal=False, conv_kernel=2, conv_group=32, selector_rank=256, selector_top_k=8
)

HYBRID = HybridShape()
HYBRID_DFLASH2 = DraftShape(
    block_size=8, causal=False, n_layers=2, ffn_dim=512,
    taps=(1, 2, 3),  # two delta nets and the attention layer
    rms_eps=1e-6, logit_scale=1.0, softcap=None,
    conv_kernel=2, conv_group=32, selector_rank=256, selector_top_k=8,
)  # fmt: skip

TARGETS = {"glimmer": TARGET, "hybrid": HYBRID}
DRAFTS = {
    "glimmer": {"dflash": DFLASH, "dflash2": DFLASH2},
    "hybrid": {"dflash2": HYBRID_DFLASH2},
}
