"""A draft as frozen configuration: every number its forward pass needs, and where each came from.

Owns the contract that both artifacts (a GGUF file, a directory of safetensors) are read into, the
checks that hold for both, and the two settings a user may override (window and sink). Must not
know files or tensors. Invariant: nothing in it is a constant of a model family; a value the
artifact does not state is refused, or taken loudly and recorded.

Source: llama.cpp 0c1e57098bba ``src/models/dflash.cpp`` and z-lab dflash 0.1.0 ``dflash/model.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cudflash.loader.arch import MAX_COUNT
from cudflash.loader.config import RopeConfig

from cudflash.errors import FormatError, UnsupportedError, UsageError

DEFAULT_SINK = 64  # pinned first rows of a windowed draft's context, when nothing else is asked for
MIN_BLOCK = 2  # the anchor and one draft token
QUALIFIED_LANE = (5, 5, 16)  # layers, taps, block: the geometry the published pairs have


@dataclass(frozen=True)
class DraftLayerConfig:
    """What may differ from layer to layer."""

    window: int | None  # a key is hidden once it lies this far behind the query; None = full
    causal: bool  # block rows see no later block row; False = all rows of the block


@dataclass(frozen=True)
class DraftConfig:
    """A draft, complete: nothing outside it changes the numbers but its and the target's weights.

    Sources are ``"file"``, ``"override"``, ``"default"``, or ``"absent"`` with what that stands
    for; they belong into every receipt.
    """

    kind: Literal["dflash", "dflash2"]  # told by the tensors
    dialect: Literal["gguf", "gguf-fork", "safetensors"]
    name: str  # "" when not stated
    n_layers: int
    hidden_dim: int  # residual width; the target's too
    head_dim: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int | None  # None: not stated, so the target's; set by bind_draft
    context_length: int  # positions the draft was trained for
    block_size: int  # rows of the block: anchor and block_size - 1 masks
    taps: tuple[int, ...]  # 0-based layers whose output is read, in the column order of fc
    n_target_layers: int | None  # layers the target must have; None: not stated
    mask_token_id: int
    rms_eps: float
    rope: RopeConfig  # of every layer
    layers: tuple[DraftLayerConfig, ...]
    attn_scale: float  # multiplies q.k
    value_scale: float  # multiplies the attention output after its projection, 1.0 = none
    embedding_scale: float  # multiplies raw embedding rows of the target, 1.0 = none
    activation: Literal["silu", "gelu_tanh"]
    logit_scale: float  # multiplies draft logits before the soft cap, 1.0 = none
    final_softcap: float | None
    conv_kernel: int | None  # taps of the dynamic convolution, None in DFlash
    conv_group: int | None  # channels that share a dynamic coefficient
    selector_rank: int | None  # width of the codebooks
    selector_top_k: int | None  # candidates per row
    own_embedding: bool  # embed with the draft's own table instead of the target's
    own_head: bool  # multiply with the draft's own head (or own table) instead of the target's
    sink: int  # first context rows that never leave a sliding layer; 0 = none
    window_source: str
    sink_source: str
    causal_source: str
    block_size_source: str
    taps_source: str  # the key and how it counts
    mask_token_source: str
    logit_scale_source: str
    defaults_taken: tuple[str, ...] = ()  # one line per absent value that was given a default

    @property
    def window(self) -> int | None:
        """Window of the sliding layers; None when all layers see the whole context."""
        return next((la.window for la in self.layers if la.window is not None), None)

    @property
    def causal(self) -> bool:
        """Whether no row of a block sees a later one, in any layer."""
        return all(layer.causal for layer in self.layers)

    @property
    def window_pattern(self) -> str:
        """One letter per layer: S sliding, F full."""
        return "".join("F" if la.window is None else "S" for la in self.layers)

    @property
    def qualified_lane(self) -> bool:
        """Whether this is the geometry of the published pairs (5 layers, 5 taps, block 16)."""
        return (self.n_layers, len(self.taps), self.block_size) == QUALIFIED_LANE


def make_layers(slides: tuple[bool, ...], window: int | None, causal: bool | None):
    """Build the layers; ``causal`` None means: where a layer slides (z-lab's rule when absent)."""
    return tuple(
        DraftLayerConfig(window if slide else None, slide if causal is None else causal)
        for slide in slides
    )


def has_dflash2_tensors(names) -> bool:
    """Whether any convolution or selector tensor of DFlash2 is among the names."""
    marks = ("selector_", "candidate_selector.", "_conv_base", "_conv_proj", "_conv.")
    return any(mark in name for name in names for mark in marks)


def check_draft_config(path: str, config: DraftConfig) -> None:
    """Check what both artifacts have in common.

    Parameters
    ----------
    path : str
        For messages.
    config : DraftConfig
        As the artifact states it, before overrides.

    Raises
    ------
    FormatError, UnsupportedError
        One sentence per fault, with the number found.
    """

    def fail(what: str, found, expected: str, kind: type = FormatError):
        return kind(
            f"{path}: {what} is {found}, expected {expected}; convert or download the draft again"
        )

    if config.block_size < MIN_BLOCK:
        raise fail("the block size", config.block_size, f"at least {MIN_BLOCK}")
    if config.n_heads % config.n_kv_heads:
        expected = f"a divisor of {config.n_heads} heads"
        raise fail("the number of key/value heads", config.n_kv_heads, expected)
    if config.rope.n_dims % 2 or not 2 <= config.rope.n_dims <= config.head_dim:
        expected = f"an even number from 2 up to the head size {config.head_dim}"
        raise fail("the number of rotated dimensions", config.rope.n_dims, expected)
    _check_taps(path, config)
    if config.vocab_size is not None and config.mask_token_id >= config.vocab_size:
        expected = f"below the vocabulary size {config.vocab_size}"
        raise fail("the mask token id", config.mask_token_id, expected)
    window = config.window
    if window is not None and window < config.block_size:
        expected = f"at least the block size {config.block_size}"
        raise fail("the sliding window", window, expected, UnsupportedError)
    if config.kind == "dflash2":
        if config.hidden_dim % config.conv_group:
            expected = f"a divisor of the hidden size {config.hidden_dim}"
            raise fail("the convolution group size", config.conv_group, expected)
        if config.conv_kernel > config.block_size:
            expected = f"at most the block size {config.block_size}"
            raise fail("the convolution kernel size", config.conv_kernel, expected)
        if config.vocab_size is not None and config.selector_top_k > config.vocab_size:
            expected = f"at most the vocabulary size {config.vocab_size}"
            raise fail("the selector's top k", config.selector_top_k, expected)


def _check_taps(path: str, config: DraftConfig) -> None:
    taps = list(config.taps)
    shown = f"the tap list ({config.taps_source}) resolves to 0-based layers {taps}"
    if not taps:
        raise FormatError(
            f"{path}: the tap list ({config.taps_source}) is empty, expected the target layers the "
            "draft reads; convert the draft again"
        )
    repeated = sorted({tap for tap in taps if taps.count(tap) > 1})
    if repeated:
        raise FormatError(
            f"{path}: {shown} with layer {repeated[0]} twice, expected each once; convert the "
            "draft again"
        )
    if min(taps) < 0:
        raise FormatError(
            f"{path}: {shown}, expected layers from 0 on (the embedding is no layer output); "
            "convert the draft again"
        )
    stated = config.n_target_layers
    if stated is not None and max(taps) >= stated:
        raise FormatError(
            f"{path}: {shown}, expected layers below {stated}, the target layers the draft states; "
            "convert the draft again"
        )


def apply_overrides(
    path: str, config: DraftConfig, window: int | None, sink: int | None
) -> tuple[DraftConfig, tuple[str, ...]]:
    """Put the user's window and sink in place of the file's, loudly.

    Parameters
    ----------
    path : str
    config : DraftConfig
        As read.
    window : int or None
        None: the file's. 0: no window, all layers see the whole context. Else the window of the
        sliding layers, or of all layers when the file has none that slide.
    sink : int or None
        None: ``DEFAULT_SINK`` for a draft that slides, 0 for one that does not.

    Returns
    -------
    config : DraftConfig
    warnings : tuple of str
        Sentences to print.

    Raises
    ------
    UsageError
        If an override makes no sense for this draft.
    """
    warnings = []
    if window is not None:
        stated = config.window
        config = _override_window(path, config, window)
        warnings.append(
            f"{path}: draft window overridden: {config.window or 'none'} instead of "
            f"{stated or 'none'} ({config.window_pattern}); a window other than the trained one "
            "lowers acceptance"
        )
    elif config.window_source == "absent":
        warnings.append(
            f"{path}: no sliding window is stated, so all {config.n_layers} draft layers see the "
            "whole context; if the draft was trained with a window, acceptance collapses past it: "
            "state it with --draft-window N"
        )
    slides = config.window is not None
    if sink is None:
        value, source = (DEFAULT_SINK, "default") if slides else (0, "no window")
        return replace(config, sink=value, sink_source=source), tuple(warnings)
    if isinstance(sink, bool) or not isinstance(sink, int) or not 0 <= sink <= MAX_COUNT:
        raise UsageError(f"--draft-sink is {sink!r}, expected a number of rows from 0 on")
    if sink and not slides:
        raise UsageError(
            f"{path}: --draft-sink is {sink}, but no layer of this draft slides, so there is "
            "nothing to pin; omit it"
        )
    if slides and sink != DEFAULT_SINK:
        warnings.append(f"{path}: draft sink overridden: {sink} rows instead of {DEFAULT_SINK}")
    return replace(config, sink=sink, sink_source="override"), tuple(warnings)


def _override_window(path: str, config: DraftConfig, window: int) -> DraftConfig:
    if isinstance(window, bool) or not isinstance(window, int) or not 0 <= window <= MAX_COUNT:
        raise UsageError(f"--draft-window is {window!r}, expected a number of rows, or 0 for none")
    if window and window < config.block_size:
        raise UsageError(
            f"{path}: --draft-window is {window}, expected at least the block size "
            f"{config.block_size} (or 0 for no window)"
        )
    all_full = config.window is None
    layers = tuple(
        replace(la, window=window if window and (all_full or la.window is not None) else None)
        for la in config.layers
    )
    return replace(config, layers=layers, window_source="override")


def describe_draft_config(config: DraftConfig) -> dict:
    """Describe a configuration as a JSON-able dictionary, for ``inspect`` and receipts."""
    fields = dict(vars(config))
    rope = dict(vars(config.rope))
    rope["yarn"] = None if config.rope.yarn is None else dict(vars(config.rope.yarn))
    fields |= {
        "taps": list(config.taps),
        "defaults_taken": list(config.defaults_taken),
        "rope": rope,
        "window": config.window,
        "window_pattern": config.window_pattern,
        "causal": [la.causal for la in config.layers],
        "qualified_lane": config.qualified_lane,
    }
    del fields["layers"]
    return fields
