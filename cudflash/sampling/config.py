"""Sampling settings: llama.cpp's names, defaults and ranges in one frozen value."""

import math
import operator
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from cudflash.errors import UsageError


@dataclass(frozen=True)
class SamplingConfig:
    """What the sampler chain does; the defaults are llama.cpp's.

    The chain's order is fixed: logit_bias, penalties, DRY, top_n_sigma, top_k, typical_p, top_p,
    min_p, XTC, temperature, draw. ``mirostat`` 1 or 2 replaces all but logit_bias and temperature.

    Raises
    ------
    UsageError
        For a NaN, a wrong type or a value outside the range given in the field's comment.
    """

    temperature: float = 0.8  # >= 0; 0 takes the largest logit
    top_k: int = 40  # candidates kept; 0 or -1 keeps all
    top_p: float = 0.95  # 0 to 1; 1 is off
    min_p: float = 0.05  # 0 to 1; 0 is off
    typical_p: float = 1.0  # above 0, to 1; 1 is off
    top_n_sigma: float = -1.0  # standard deviations; 0 or below is off
    xtc_probability: float = 0.0  # 0 to 1; 0 is off
    xtc_threshold: float = 0.1  # 0 to 1; above 0.5 is off
    dynatemp_range: float = 0.0  # >= 0; 0 is off
    dynatemp_exponent: float = 1.0  # >= 0
    repeat_penalty: float = 1.0  # above 0; 1 is off
    repeat_last_n: int = 64  # tokens the three penalties look back; 0 is off, -1 the context
    frequency_penalty: float = 0.0  # any finite number; 0 is off
    presence_penalty: float = 0.0  # any finite number; 0 is off
    dry_multiplier: float = 0.0  # >= 0; 0 is off
    dry_base: float = 1.75  # > 0; below 1 is off
    dry_allowed_length: int = 2  # >= 0 tokens
    dry_penalty_last_n: int = 64  # tokens DRY looks back; 0 is off, -1 the context
    dry_sequence_breakers: tuple = ("\n", ":", '"', "*")
    mirostat: int = 0  # 0 (off), 1 or 2
    mirostat_tau: float = 5.0  # >= 0, bits
    mirostat_eta: float = 0.1  # >= 0
    logit_bias: Mapping = field(default_factory=dict, hash=False)  # id -> number or -inf (a ban)
    min_keep: int = 0  # candidates that typical, top_p, min_p and XTC leave at least

    def __post_init__(self):
        for name, (low, high) in _REAL_RANGES.items():
            object.__setattr__(self, name, _real(name, getattr(self, name), low, high))
        for name, (low, high) in _INT_RANGES.items():
            object.__setattr__(self, name, _integer(name, getattr(self, name), low, high))
        for name in ("typical_p", "repeat_penalty", "dry_base"):
            if getattr(self, name) == 0:
                raise UsageError(f"{name}: found 0, expected a number above 0")
        object.__setattr__(self, "dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True when the answer is the largest logit after bias, penalties and DRY: no randomness."""
        return (
            self.temperature == 0
            and self.dynatemp_range == 0
            and self.mirostat == 0
            and self.typical_p >= 1
            and not self.uses_xtc
        )

    @property
    def uses_xtc(self) -> bool:
        """True when XTC can drop candidates."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def uses_penalties(self) -> bool:
        """True when a repeat, frequency or presence penalty has an effect."""
        neutral = self.repeat_penalty == 1 and not self.frequency_penalty
        return self.repeat_last_n != 0 and not (neutral and not self.presence_penalty)

    @property
    def uses_dry(self) -> bool:
        """True when DRY has an effect."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    def to_dict(self) -> dict:
        """Return every field as JSON-ready values, for receipts; a ban's bias is "-inf"."""
        values = asdict(self)
        values["dry_sequence_breakers"] = list(self.dry_sequence_breakers)
        values["logit_bias"] = {
            str(ident): "-inf" if bias == -math.inf else bias
            for ident, bias in self.logit_bias.items()
        }
        return values

    @classmethod
    def from_dict(cls, values: Mapping) -> "SamplingConfig":
        """Return the config that ``to_dict`` was made from; unknown names are an error."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(
                f"sampling: unknown setting {unknown[0]!r}, expected one of the fields"
            )
        values = dict(values)
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = dict(map(_from_json, values["logit_bias"].items()))
        return cls(**values)


_REAL_RANGES = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-math.inf, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, math.inf),
    "dynatemp_exponent": (0, math.inf),
    "repeat_penalty": (0, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "presence_penalty": (-math.inf, math.inf),
    "dry_multiplier": (0, math.inf),
    "dry_base": (0, math.inf),
    "mirostat_tau": (0, 1e38),  # twice that is where it starts
    "mirostat_eta": (0, math.inf),
}
_INT_RANGES = {
    "top_k": (-1, 2**31 - 1),
    "repeat_last_n": (-1, 2**31 - 1),
    "dry_allowed_length": (0, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "mirostat": (0, 2),
    "min_keep": (0, 2**31 - 1),
}


def _range_text(low, high):
    if low == -math.inf:
        return "a finite number"
    return f"a finite number >= {low}" if high == math.inf else f"a number from {low} to {high}"


def _real(name, value, low, high):
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, (bool, str)) or not math.isfinite(number) or not low <= number <= high:
        raise UsageError(f"{name}: found {value!r}, expected {_range_text(low, high)}")
    if not _fits_float32(number):
        raise UsageError(
            f"{name}: found {value!r}, expected a number that float32 holds (0, or 1.5e-45 to "
            "3.4e+38 in size)"
        )
    return number


def _fits_float32(number):
    """Whether rounding to float32, in which the samplers compute, gives neither infinity nor 0."""
    try:
        rounded = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return False
    return (rounded == 0) == (number == 0)


def _integer(name, value, low, high):
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if isinstance(value, (bool, str)) or number != value or not low <= number <= high:
        raise UsageError(f"{name}: found {value!r}, expected an integer from {low} to {high}")
    return number


def _breakers(value):
    if isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise UsageError(
            f"dry_sequence_breakers: found {value!r}, expected a sequence of texts, () for none"
        )
    return tuple(value)


def _bias(value):
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias: found {value!r}, expected a mapping of token id to number")
    bias = {}
    for ident, amount in value.items():
        try:
            key, number = operator.index(ident), float(amount)
        except (TypeError, ValueError, OverflowError):
            key, number = -1, math.nan
        wrong = isinstance(ident, bool) or isinstance(amount, bool | str) or key < 0
        if wrong or not (number == -math.inf or math.isfinite(number)):
            raise UsageError(
                f"logit_bias: found {ident!r}: {amount!r}, "
                "expected a token id >= 0 with a finite number, or -inf to ban it"
            )
        if number != -math.inf and not _fits_float32(number):
            raise UsageError(
                f"logit_bias: found {ident!r}: {amount!r}, expected a number that float32 holds "
                "(0, or 1.5e-45 to 3.4e+38 in size), or -inf to ban it"
            )
        bias[key] = number
    return bias


def _from_json(item):
    """An entry of ``to_dict``'s bias, whose ids are texts and whose bans are "-inf"."""
    ident, amount = item
    if isinstance(ident, str) and ident.isascii() and ident.isdecimal():
        ident = int(ident)
    return ident, -math.inf if amount == "-inf" else amount
