"""Recorded sampler chains of llama.cpp, and the samplers of this project built from their entries."""

import json
from functools import cache

import numpy as np

from cudflash.sampling import samplers as s
from cudflash.sampling.candidates import Candidates
from cudflash.sampling.dry import Dry, sequence_breakers
from tests.helpers.vectors import vector_path


@cache
def arrays(name):
    """All arrays of `tests/vectors/sampling/NAME.npz`."""
    with np.load(vector_path(f"sampling/{name}.npz")) as npz:
        return {key: npz[key] for key in npz.files}


@cache
def document(name):
    """`tests/vectors/sampling/NAME.json`."""
    return json.loads(vector_path(f"sampling/{name}.json").read_text())


class RecordedTokenizer:
    """The token texts and encodings that were recorded, enough for DRY's sequence breakers."""

    def __init__(self, extra):
        self.vocab_size = extra["n_vocab"]
        self._pieces = {int(i): bytes.fromhex(text) for i, text in extra["pieces"].items()}
        self._encode = extra["encode"]

    def decode_piece(self, ident, special=False):
        return self._pieces.get(ident, b"")

    def encode(self, text, *, add_special=True, parse_special=False):
        return self._encode[text]


def _dry(multiplier, base, allowed, last_n, texts):
    breakers = sequence_breakers(texts, RecordedTokenizer(document("extra")) if texts else None)
    return Dry(multiplier, base, allowed, last_n, breakers)


def _temperature(t):
    return s.Temperature(t) if t != 1 else None


# llama.cpp builds an "empty" sampler where the arguments switch one off: None here
_BUILD = {
    "greedy": s.Greedy,
    "dist": s.Dist,
    "temp": _temperature,
    "temp_ext": lambda t, r, e: s.DynamicTemperature(t, r, e) if r > 0 else _temperature(t),
    "top_k": lambda k: s.TopK(k) if k > 0 else None,
    "top_p": lambda p, keep: s.TopP(p, keep) if p < 1 else None,
    "min_p": lambda p, keep: s.MinP(p, keep) if p > 0 else None,
    "typical": lambda p, keep: s.Typical(p, keep) if p < 1 else None,
    "xtc": lambda p, t, keep, seed: s.Xtc(p, t, keep, seed) if p > 0 and t <= 0.5 else None,
    "top_n_sigma": lambda n: s.TopNSigma(n) if n > 0 else None,
    "penalties": lambda _, n, r, f, p: (
        s.Penalties(n, r, f, p) if n > 0 and (r, f, p) != (1, 0, 0) else None
    ),
    "logit_bias": lambda _, pairs: s.LogitBias(dict(pairs)),
    "dry": _dry,
    "mirostat": lambda n, seed, tau, eta, m: s.MirostatV1(n, seed, tau, eta),
    "mirostat_v2": s.MirostatV2,
}


def build(chain):
    """Samplers of a recorded chain, in order; the last one selects."""
    made = (_BUILD[name](*args) for name, *args in chain)
    return [stage for stage in made if stage is not None]


def fresh(row):
    """A candidate list in id order."""
    return Candidates(row, np.arange(len(row), dtype=np.int32))


def apply_all(stages, row):
    """One draw: the list after it, with `selected` and p set as llama.cpp leaves them."""
    candidates = fresh(row)
    with np.errstate(over="ignore", invalid="ignore"):
        for stage in stages:
            stage.apply(candidates)
        if isinstance(stages[-1], s.Dist):
            s.Dist.set_probabilities(candidates)
    return candidates
