"""Find, unpack and check the recorded vectors under `tests/vectors/`.

Large files are stored compressed (`NAME.bz2`, `NAME.xz`). `vector_path` unpacks them once into a
temporary folder and compares the SHA-256 of what it hands out with the recorded one, every time a
process first asks: a damaged checkout or a stale temporary file must not look like an engine fault.
"""

import bz2
import hashlib
import lzma
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1] / "vectors"
_UNPACK = {".bz2": bz2.decompress, ".xz": lzma.decompress}

ARCHES = ("llama", "qwen2", "qwen3", "gemma3", "muse-glimmer", "qwen35")
TARGETS = tuple((arch, variant) for arch in ARCHES for variant in ("f32", "kq")) + (
    ("llama", "leg"),
)
N_PROMPTS = 4


@cache
def vector_path(rel):
    """Path of an unpacked, verified vector file.

    Parameters
    ----------
    rel : str
        Path below `tests/vectors/` without the compression suffix, e.g. "targets/llama-f32.gguf".

    Raises
    ------
    FileNotFoundError
        No such file, plain or compressed.
    ValueError
        The content is not what was recorded, or nothing was recorded for it.
    """
    expected = recorded_sha256(rel)
    plain = ROOT / rel
    if plain.exists():
        return _verified(plain, expected)
    packed = next((p for s in _UNPACK if (p := ROOT / (rel + s)).exists()), None)
    if packed is None:
        raise FileNotFoundError(f"{plain}: no such vector file, plain, .bz2 or .xz")
    folder = Path(tempfile.gettempdir()) / f"cudflash-vectors-{os.getuid()}" / expected[:16]
    unpacked = folder / plain.name
    if not unpacked.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(_UNPACK[packed.suffix](packed.read_bytes()))
        os.replace(part.name, unpacked)  # whole or not at all, also with several test processes
    return _verified(unpacked, expected)


def recorded_sha256(rel):
    """SHA-256 of the unpacked file, from SHA256SUMS at the top or in the file's own folder."""
    for sums, name in ((ROOT / "SHA256SUMS", rel), ((ROOT / rel).parent / "SHA256SUMS", None)):
        known = _read_sums(sums)
        found = known.get(name or Path(rel).name)
        if found:
            return found
    raise ValueError(f"{rel} is not listed in {ROOT / 'SHA256SUMS'}; add its unpacked SHA-256")


@cache
def _read_sums(path):
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    return {name: digest for digest, name in (line.split(None, 1) for line in lines if line)}


def _verified(path, expected):
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise ValueError(
            f"{path} has SHA-256 {found}, recorded is {expected}; "
            "restore the file (or delete it, if it is in a temporary folder)"
        )
    return path


@dataclass(frozen=True)
class TargetCase:
    """A tiny target and what llama.cpp computed with its exact (expanded) weights."""

    arch: str
    variant: str  # "f32", "kq" (k-quants) or "leg" (older formats)
    path: Path  # the GGUF file
    data: dict  # arrays of ARCH.npz

    def prompt(self, i):
        """Token ids of prompt i: int32 (T,)."""
        return self.data[f"prompt{i}"]

    def prefill_logits(self, i):
        """Logits after every prompt position: float32 (T, V)."""
        return self._exact(i, "prefill_logits")

    def decode_logits(self, i):
        """Logits after feeding each of the first 16 greedy ids: float32 (16, V), or None."""
        return self._exact(i, "decode_logits")

    def greedy_ids(self, i):
        """Greedy continuation: int32 (17,); [0] follows the prompt."""
        return self.data[f"{self.variant}/p{i}/greedy_ids"]

    def greedy_margin(self, i):
        """Best minus second best logit at each greedy step: float32 (17,)."""
        return self.data[f"{self.variant}/p{i}/greedy_margin"]

    def layer_inputs(self, i):
        """Residual stream entering each layer at the last rows of the prompt: (L, rows, C) or None."""
        prefix = f"{self.variant}/p{i}/layer_inputs"
        return next((self.data[k] for k in self.data if k.startswith(prefix)), None)

    def forced_tokens(self, i):
        """Prompt and the first 16 greedy ids: its logits cover prefill and every decode step."""
        return np.concatenate([self.prompt(i), self.greedy_ids(i)[:16]])

    def _exact(self, i, leaf):
        key = f"{self.variant}/p{i}/{leaf}"
        # llama.cpp reads GELU from a float16 table; where a float64 forward was recorded, use it
        return self.data.get(key + "_f64", self.data.get(key))


@cache
def target_case(arch, variant):
    """Load one of `TARGETS`."""
    path = vector_path(f"targets/{arch}-{variant}.gguf")
    with np.load(vector_path(f"targets/{arch}.npz")) as npz:
        return TargetCase(arch, variant, path, {name: npz[name] for name in npz.files})


def quant_case(type_name):
    """Blocks, expanded values and products of one GGUF type: dict of arrays, see README.md."""
    with np.load(vector_path(f"quants/{type_name}.npz")) as npz:
        return {name: npz[name] for name in npz.files}


def real_case(name):
    """What llama.cpp computed with "smollm2" or "gemma3": dict of arrays, see README.md."""
    with np.load(vector_path(f"real/{name}.npz")) as npz:
        return {key: npz[key] for key in npz.files}
