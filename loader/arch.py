"""Which architecture a file has, what to answer, and strict reading of its metadata keys.

Owns recognition by metadata (never by file name) and the rules for absent keys: a key whose value
changes numbers is required, unless llama.cpp defines a default that files in the wild rely on, and
then the default is recorded. Must not know tensors.

Source: key names and defaults, llama.cpp 0c1e57098bba, ``src/llama-arch.cpp`` 194-341 and
``src/llama-model.cpp`` 1321-1470.
"""

from __future__ import annotations

import math

import numpy as np
from cudflash.loader.gguf import GGUFFile
from cudflash.loader.gguf_values import StringArray

from cudflash import __version__
from cudflash.errors import FormatError, UnsupportedError, UsageError

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "muse-glimmer", "qwen35")
DRAFT_ARCHITECTURES = ("dflash", "dflash-draft")
# relatives of qwen35 whose files look alike, and what their graphs have that this version does not
FOREIGN_HYBRIDS = {
    "qwen35moe": "a mixture of experts",
    "qwen3next": "a mixture of experts and another layout of the delta net",
    "qwen4exp": "experts and other layers",
}

MAX_LAYERS = 512  # llama.cpp's own limit; keeps a bogus block_count from being expanded
MAX_COUNT = (1 << 31) - 1  # positions and sizes are int32 on the devices

# Keys that change numbers in other architectures, with the value that switches them off. A file of
# an architecture that does not define the key must not carry another value.
_NEUTRAL = {
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "nextn_predict_layers": 0,
}

_REQUIRED = object()


def architecture(gguf: GGUFFile) -> str:
    """Return ``general.architecture``.

    Raises
    ------
    FormatError
        If the key is missing, empty or not a string.
    """
    name = gguf.require("general.architecture", str)
    if not name:
        raise FormatError(
            f"{gguf.path}: general.architecture is empty, expected a name such as "
            f"{SUPPORTED_ARCHITECTURES[0]}; convert the model again"
        )
    return name


def is_draft(gguf: GGUFFile) -> bool:
    """Whether the metadata describes a DFlash draft: its architecture, or a list of taps."""
    name = architecture(gguf)
    # forks put the target's name in front: qwen35-dflash-draft
    return (
        name in DRAFT_ARCHITECTURES
        or name.endswith("-dflash-draft")
        or any(
            f"{name}.{suffix}" in gguf.metadata
            for suffix in ("target_layers", "target_layer_ids", "dflash.target_layer_ids")
        )
    )


def draft_architecture(gguf: GGUFFile) -> str:
    """Return the architecture of a file that can be used as the draft.

    Raises
    ------
    UsageError
        If the file is a target.
    UnsupportedError
        If it is a draft of a kind this version does not have.
    """
    name = architecture(gguf)
    if not is_draft(gguf):
        raise UsageError(
            f"{gguf.path}: this is a target (architecture {name}), expected a DFlash draft; pass "
            "it with --model and give the draft with --draft"
        )
    if name in DRAFT_ARCHITECTURES or name.endswith("-dflash-draft"):
        return name
    raise UnsupportedError(
        f"{gguf.path}: a draft of architecture {name!r}, which cudflash {__version__} does not "
        f"know, expected one of {', '.join(DRAFT_ARCHITECTURES)}; convert the draft again with "
        "llama.cpp's converter"
    )


def target_architecture(gguf: GGUFFile) -> str:
    """Return the architecture of a file that can be run as the target.

    Raises
    ------
    UsageError
        If the file is a draft.
    UnsupportedError
        If the architecture is not supported by this version.
    """
    name = architecture(gguf)
    if is_draft(gguf):
        raise UsageError(
            f"{gguf.path}: this is a draft (architecture {name}), expected a target model; pass "
            "it with --draft and give the target with --model"
        )
    if name in SUPPORTED_ARCHITECTURES:
        return name
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if name in FOREIGN_HYBRIDS:
        raise UnsupportedError(
            f"{gguf.path}: architecture {name} ({FOREIGN_HYBRIDS[name]}) is not supported by "
            f"cudflash {__version__}, expected one of {supported}; use a dense qwen35 model"
        )
    raise UnsupportedError(
        f"{gguf.path}: architecture {name!r} is unknown to cudflash {__version__}, expected one of "
        f"{supported}; use a model of these or a newer cudflash"
    )


class KeyReader:
    """Typed, range-checked reading of ``<arch>.*`` keys with a record of every default taken.

    Parameters
    ----------
    gguf : GGUFFile
    arch : str
        Key prefix.

    Attributes
    ----------
    defaults_taken : list of str
        One line per absent key whose default changes numbers.
    """

    def __init__(self, gguf: GGUFFile, arch: str):
        self.gguf = gguf
        self.arch = arch
        self.defaults_taken: list[str] = []

    def key(self, suffix: str) -> str:
        """Return the full key."""
        return f"{self.arch}.{suffix}"

    def has(self, suffix: str) -> bool:
        """Whether the key is present."""
        return self.key(suffix) in self.gguf.metadata

    def default(self, what: str, value) -> None:
        """Record that ``what`` is absent and stands for ``value``."""
        self.defaults_taken.append(f"{what} absent: {value}")

    def fail(self, suffix: str, found, expected: str, kind: type = FormatError):
        """Return the exception for a key whose value cannot be used."""
        return kind(
            f"{self.gguf.path}: {self.key(suffix)} is {found}, expected {expected}; "
            "convert the model again or use another file"
        )

    def count(self, suffix: str, default=_REQUIRED, least: int = 1, note: bool = True) -> int:
        """Read a whole number of at least ``least``.

        A default is recorded unless ``note`` is false (a default that switches something off).
        """
        if default is not _REQUIRED and not self.has(suffix):
            if note:
                self.default(self.key(suffix), default)
            return default
        value = self.gguf.require(self.key(suffix), int)
        if not least <= value <= MAX_COUNT:
            raise self.fail(suffix, value, f"{least} to {MAX_COUNT}")
        return value

    def number(
        self, suffix: str, default=_REQUIRED, positive: bool = True, note: bool = True
    ) -> float:
        """Read a finite number, above zero if ``positive``, else at least zero."""
        if default is not _REQUIRED and not self.has(suffix):
            if note:
                self.default(self.key(suffix), default)
            return default
        value = self.gguf.require(self.key(suffix), float)
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            expected = "a finite number above 0" if positive else "a finite number of at least 0"
            raise self.fail(suffix, value, expected)
        return value

    def text(self, suffix: str, default: str | None = None) -> str | None:
        """Read a string."""
        return self.gguf.get(self.key(suffix), default, str)

    def per_layer(self, suffix: str, n_layers: int, default=_REQUIRED) -> tuple[int, ...]:
        """Read a whole number per layer: one for all, or an array with one entry per layer."""
        value = self.gguf.get(self.key(suffix))
        if not isinstance(value, np.ndarray):
            if default is not _REQUIRED and value is None:
                return default
            return (self.count(suffix),) * n_layers
        if value.dtype.kind not in "iu" or len(value) != n_layers:
            found = f"an array of {len(value)} {value.dtype.name} values"
            raise self.fail(suffix, found, f"{n_layers} integers (block_count)")
        values = tuple(int(v) for v in value)
        for layer, v in enumerate(values):
            if not 1 <= v <= MAX_COUNT:
                raise self.fail(suffix, f"{v} for layer {layer}", f"1 to {MAX_COUNT}")
        return values

    def sliding_pattern(self, n_layers: int, default_period: int) -> tuple[bool, ...]:
        """Read which layers slide: a bool per layer, or a period n (every n-th layer is full)."""
        suffix = "attention.sliding_window_pattern"
        value = self.gguf.get(self.key(suffix))
        if isinstance(value, np.ndarray):
            flags = value.dtype.kind == "b" or (
                value.dtype.kind in "iu" and all(int(v) in (0, 1) for v in value[:MAX_LAYERS])
            )
            if not flags or len(value) != n_layers:
                found = f"an array of {len(value)} {value.dtype.name} values"
                raise self.fail(suffix, found, f"{n_layers} bools (block_count) or a period")
            return tuple(bool(v) for v in value)
        if value is None:
            period = default_period
            self.default(self.key(suffix), f"period {period}")
        else:
            period = self.count(suffix, least=0)
        return tuple(period == 0 or layer % period < period - 1 for layer in range(n_layers))

    def vocab_size(self) -> int:
        """Return the number of tokens of the vocabulary in the file."""
        tokens = self.gguf.require("tokenizer.ggml.tokens", StringArray)
        if not len(tokens):
            raise FormatError(
                f"{self.gguf.path}: tokenizer.ggml.tokens is empty, expected the vocabulary; "
                "convert the model again with its tokenizer"
            )
        stated = self.count("vocab_size", len(tokens), note=False)
        if stated != len(tokens):
            raise self.fail("vocab_size", stated, f"{len(tokens)}, the tokens in the vocabulary")
        return len(tokens)

    def refuse_foreign(self, defined: frozenset[str]) -> None:
        """Refuse keys that would change the numbers but are not part of this architecture.

        Parameters
        ----------
        defined : frozenset of str
            Suffixes the architecture does read.
        """
        gguf = self.gguf
        n_experts = self.count("expert_count", 0, least=0, note=False)
        if n_experts:
            raise UnsupportedError(
                f"{gguf.path}: {self.key('expert_count')} is {n_experts} (a mixture of experts), "
                "expected a dense model; use a dense model"
            )
        causal = gguf.get(self.key("attention.causal"), True, bool)
        if not causal and "attention.causal" not in defined:
            raise self.fail("attention.causal", False, "true (a decoder)", UnsupportedError)
        for suffix, neutral in _NEUTRAL.items():
            value = gguf.get(self.key(suffix), neutral)
            off = isinstance(value, int | float) and value in (neutral, 0)
            if suffix not in defined and not off:
                raise self.fail(
                    suffix,
                    value if isinstance(value, int | float) else "not a number",
                    f"no such key in a {self.arch} model, because it would change the numbers",
                    UnsupportedError,
                )
