"""Sampling options: llama.cpp's spellings of the fields of ``SamplingConfig``, and stops.

Owns the names and their help; ranges and defaults are ``SamplingConfig``'s own.
"""

import math
import re
from dataclasses import fields

import click

from cudflash.cli.common import check_text, options, unescape
from cudflash.errors import UsageError
from cudflash.sampling.config import SamplingConfig

# field -> (names, type, help); the default is added from the dataclass
_OPTIONS = {
    "temperature": (("--temp", "--temperature"), float, "Temperature; 0 takes the likeliest token"),
    "top_k": (("--top-k",), int, "Candidates kept; 0 keeps all"),
    "top_p": (("--top-p",), float, "Probability mass kept; 1 is off"),
    "min_p": (("--min-p",), float, "Least probability, relative to the best; 0 is off"),
    "typical_p": (("--typical", "--typical-p"), float, "Locally typical mass; 1 is off"),
    "top_n_sigma": (("--top-n-sigma", "--top-nsigma"), float, "Standard deviations; -1 is off"),
    "xtc_probability": (("--xtc-probability",), float, "Chance of dropping top choices; 0 is off"),
    "xtc_threshold": (("--xtc-threshold",), float, "What counts as a top choice; above 0.5 is off"),
    "dynatemp_range": (("--dynatemp-range",), float, "Temperature varies by this much; 0 is off"),
    "dynatemp_exponent": (("--dynatemp-exp", "--dynatemp-exponent"), float, "How it varies"),
    "repeat_penalty": (
        ("--repeat-penalty", "--repetition-penalty"), float, "Penalty on repeated tokens; 1 is off"
    ),
    "repeat_last_n": (
        ("--repeat-last-n",), int, "Tokens the penalties look back; 0 is off, -1 the context"
    ),
    "frequency_penalty": (("--frequency-penalty",), float, "Penalty per occurrence; 0 is off"),
    "presence_penalty": (("--presence-penalty",), float, "Penalty for having occurred; 0 is off"),
    "dry_multiplier": (("--dry-multiplier",), float, "Strength of DRY; 0 is off"),
    "dry_base": (("--dry-base",), float, "Growth of DRY per token"),
    "dry_allowed_length": (("--dry-allowed-length",), int, "Repetitions this long are free"),
    "dry_penalty_last_n": (
        ("--dry-penalty-last-n",), int, "Tokens DRY looks back; 0 is off, -1 the context"
    ),
    "mirostat": (("--mirostat",), int, "0 off, 1 or 2: replaces the truncating samplers"),
    "mirostat_tau": (("--mirostat-ent", "--mirostat-tau"), float, "Surprise aimed at, in bits"),
    "mirostat_eta": (("--mirostat-lr", "--mirostat-eta"), float, "Learning rate of mirostat"),
    "min_keep": (("--min-keep",), int, "Candidates that truncation leaves at least"),
}  # fmt: skip


def _field_options():
    defaults = {f.name: f.default for f in fields(SamplingConfig)}
    return [
        click.option(*names, field, type=kind, help=f"{text}. Default: {defaults[field]:g}.")
        for field, (names, kind, text) in _OPTIONS.items()
    ]


sampling_options = options(
    click.option(
        "-s", "--seed", type=int, metavar="N", help="Seed; default and -1: drawn from the system."
    ),
    *_field_options(),
    click.option(
        "--dry-sequence-breaker",
        "breakers",
        multiple=True,
        metavar="TEXT",
        help="Text over which DRY does not look, repeatable; 'none' for no such text.",
    ),
    click.option(
        "-l",
        "--logit-bias",
        multiple=True,
        metavar="ID+BIAS",
        help="Add to a token's logit, repeatable: 15043+1, 15043-0.5; 15043-inf bans it.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Ban the tokens that end an answer."),
)

stop_options = options(
    click.option(
        "--stop",
        "-r",
        "--reverse-prompt",
        "stop",
        multiple=True,
        metavar="TEXT",
        help="End before this text, repeatable (with -e: \\n and the like are escapes).",
    ),
    click.option(
        "--stop-token", type=int, multiple=True, metavar="ID", help="End at this token, repeatable."
    ),
)


def take_sampling(params):
    """Take the sampling options out of a command's parameters.

    Returns
    -------
    SamplingConfig

    Raises
    ------
    UsageError
        For a value out of range, in one sentence.
    """
    values = {field: params.pop(field) for field in _OPTIONS}
    breakers = [check_text("--dry-sequence-breaker", text) for text in params.pop("breakers")]
    values["dry_sequence_breakers"] = _breakers(breakers) if breakers else None
    values["logit_bias"] = dict(map(_bias, params.pop("logit_bias"))) or None
    return SamplingConfig(**{name: value for name, value in values.items() if value is not None})


def ban_ends(sampling, tokenizer):
    """``--ignore-eos``: the same settings with every end-of-generation token banned."""
    from dataclasses import replace

    banned = dict.fromkeys(tokenizer.eog_ids, -math.inf)
    return replace(sampling, logit_bias={**sampling.logit_bias, **banned})


def take_seed(params):
    """``-s``: None for a seed drawn from the system."""
    seed = params.pop("seed")
    return None if seed == -1 else seed


def take_stops(params, escape=False):
    """Stop strings and stop tokens, as ``Session.generate`` wants them."""
    strings = [check_text("--stop", text) for text in params.pop("stop")]
    return [*(unescape(s) if escape else s for s in strings), *params.pop("stop_token")]


def _breakers(texts):
    return () if "none" in texts else tuple(map(unescape, texts))


def _bias(text):
    match = re.fullmatch(r"\s*(\d+)\s*=?\s*([+-]?(?:inf|[0-9.]+(?:e[+-]?\d+)?))\s*", text.lower())
    signed = match and (match[2][0] in "+-" or "=" in text)
    try:
        if signed:
            return int(match[1]), float(match[2])
    except ValueError:
        pass
    raise UsageError(
        f"--logit-bias is {text!r}, expected a token id and a signed number such as 15043+1, "
        "15043-0.5 or 15043-inf"
    )
