"""Make tests/vectors/sampling/extra.npz (llama.cpp's samplers) and cpp.npz (g++ and glibc).

Usage: python scripts/make_sampling_vectors.py OUTPUT_DIR [--vocab FILE.gguf]

Needs llama-cpp-python and, for cpp.npz, g++ 12 on Linux with the GNU C library. FILE.gguf is a file
with a byte-level BPE vocabulary (llama.cpp's models/ggml-vocab-gpt-2.gguf), for DRY's sequence
breakers. The outputs are what those programs computed, not what this project computes: the tests
compare the two. Not part of the test run; keep it working when a case is added.
"""

import argparse
import ctypes
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

STEPS = 60

CPP = r"""
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>
struct Item { int id; float v; };
static bool greater(const Item & a, const Item & b) { return a.v > b.v; }
int main(int argc, char ** argv) {
    FILE * in = fopen(argv[1], "rb"); FILE * out = fopen(argv[2], "wb");
    int op, n, k;
    while (fread(&op, 4, 1, in) == 1 && fread(&n, 4, 1, in) == 1 && fread(&k, 4, 1, in) == 1) {
        std::vector<float> v(n); std::vector<Item> a(n);
        if (fread(v.data(), 4, n, in) != (size_t) n) return 1;
        for (int i = 0; i < n; ++i) a[i] = { i, v[i] };
        if (op == 0) std::sort(a.begin(), a.end(), greater);
        if (op == 1) std::partial_sort(a.begin(), a.begin() + k, a.end(), greater);
        for (int i = 0; i < k; ++i) {
            float f = op == 2 ? expf(v[i]) : logf(v[i]);
            fwrite(op < 2 ? (void *) &a[i].id : (void *) &f, 4, 1, out);
        }
    }
}
"""


def cpp_vectors():
    """Sorted orders of tie-heavy arrays and float functions, by compiled C++."""
    rng = np.random.default_rng(7)
    jobs = []
    for i in range(25):
        n = int(rng.integers(2, 2000))
        levels = int(rng.choice([1, 2, 5, 40, 1000]))
        values = rng.integers(0, levels, n).astype(np.float32)
        jobs.append((f"sort{i}", 0, values, n))
        jobs.append((f"partial{i}", 1, values, int(rng.integers(1, min(n, 128) + 1))))
    jobs.append(("sort_rising", 0, np.arange(2000, dtype=np.float32) // 2, 2000))
    jobs.append(("sort_organ", 0, np.abs(np.arange(-900, 900)).astype(np.float32), 1800))
    jobs.append(("sort_killer", 0, median_killer(2048), 2048))
    for name, op, low in (("expf", 2, 0xC2D00000), ("logf", 3, 0x7F7FFFFF)):
        bits = rng.integers(0x80000000 if op == 2 else 1, low, 8000, dtype=np.uint32)
        jobs.append((name, op, bits.view(np.float32), 8000))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "a.cpp").write_text(CPP)
        subprocess.run(["g++", "-O2", folder / "a.cpp", "-o", folder / "a"], check=True)
        with open(folder / "in", "wb") as file:
            for _, op, values, k in jobs:
                file.write(np.array([op, len(values), k], np.int32).tobytes() + values.tobytes())
        subprocess.run([folder / "a", folder / "in", folder / "out"], check=True)
        words = np.fromfile(folder / "out", np.int32)
    arrays, at = {}, 0
    for name, op, values, k in jobs:
        result = words[at : at + k]
        arrays[f"{name}/in"] = values
        arrays[f"{name}/out"] = result.view(np.float32) if op >= 2 else result.astype(np.int16)
        at += k
    return arrays


def median_killer(n):
    """Values on which a median-of-three quicksort goes deep, so that the heap sort takes over."""
    half = n // 2
    values = np.empty(n, np.float32)
    for i in range(half):
        values[i] = i + 1 if i % 2 == 0 else half + i + (half % 2)
        values[half + i] = 2 * (i + 1)
    return np.minimum(values, 1500)


class Llama:
    """The few calls of llama.cpp's C interface that are needed."""

    def __init__(self, vocab_path):
        import llama_cpp

        self.c = llama_cpp
        llama_cpp.llama_backend_init()
        self.vocab = None
        if vocab_path:
            params = llama_cpp.llama_model_default_params()
            params.vocab_only = True
            self.model = llama_cpp.llama_model_load_from_file(str(vocab_path).encode(), params)
            self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def stage(self, name, *args):
        c = self.c
        if name == "logit_bias":
            n, pairs = args
            bias = (c.llama_logit_bias * len(pairs))(*[c.llama_logit_bias(i, b) for i, b in pairs])
            return c.llama_sampler_init_logit_bias(n, len(pairs), bias)
        if name == "dry":
            multiplier, base, allowed, last_n, texts = args
            array = (ctypes.c_char_p * max(len(texts), 1))(*[t.encode() for t in texts])
            vocab = self.vocab if texts else None
            return c.llama_sampler_init_dry(
                vocab, multiplier, base, allowed, last_n, array if texts else None, len(texts)
            )
        return getattr(c, f"llama_sampler_init_{name}")(*args)

    def run(self, chain, rows, prompt):
        """Draw one token per row; returns tokens and, per step, the final list's head."""
        c = self.c
        stages = [self.stage(*entry) for entry in chain]
        for token in prompt:
            for stage in stages:
                c.llama_sampler_accept(stage, token)
        tokens, sizes, ids, probs = [], [], [], []
        for row in rows:
            n = len(row)
            data = (c.llama_token_data * n)(
                *[c.llama_token_data(i, float(x), 0.0) for i, x in enumerate(row)]
            )
            array = c.llama_token_data_array(
                ctypes.cast(data, ctypes.POINTER(c.llama_token_data)), n, -1, False
            )
            for stage in stages:
                c.llama_sampler_apply(stage, ctypes.byref(array))
            token = array.data[array.selected].id
            for stage in stages:
                c.llama_sampler_accept(stage, token)
            tokens.append(token)
            sizes.append(array.size)
            head = range(min(array.size, 8))
            ids.append([array.data[i].id for i in head] + [-1] * (8 - len(head)))
            probs.append([array.data[i].p for i in head] + [0.0] * (8 - len(head)))
        for stage in stages:
            c.llama_sampler_free(stage)
        return {
            "tokens": np.array(tokens, np.int32),
            "sizes": np.array(sizes, np.int32),
            "ids": np.array(ids, np.int32),
            "probs": np.array(probs, np.float32),
        }

    def pieces(self, firsts):
        """Token texts that contain one of the bytes ``firsts``: id -> bytes."""
        buffer = ctypes.create_string_buffer(512)
        found = {}
        for ident in range(self.c.llama_vocab_n_tokens(self.vocab)):
            size = self.c.llama_token_to_piece(self.vocab, ident, buffer, 512, 0, True)
            piece = buffer.raw[:size]
            if any(first in piece for first in firsts):
                found[ident] = piece
        return found

    def encode(self, text):
        out = (ctypes.c_int32 * 64)()
        data = text.encode()
        n = self.c.llama_tokenize(self.vocab, data, len(data), out, 64, False, False)
        return list(out[:n])


def extra_cases(with_vocab):
    """(key, logits name, chain, prompt) of each case."""
    dist = ["dist", 42]
    dry_prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3]
    for seed in (1, 42):
        for n in ("n12", "n300", "n3000", "n3000_ties"):
            size = int(n[1:].split("_")[0])
            for tau, eta in ((5.0, 0.1), (3.0, 0.5)):
                v1 = ["mirostat", size, seed, tau, eta, 100]
                yield f"{n}/mirostat/{seed}/{tau}", n, [["temp", 0.8], v1], []
                v2 = ["mirostat_v2", seed, tau, eta]
                yield f"{n}/mirostat_v2/{seed}/{tau}", n, [["temp", 0.8], v2], []
    for m, base, allowed, last_n in (
        (0.8, 1.75, 2, 64),
        (2.5, 1.1, 1, 8),
        (0.3, 3.0, 0, 32),
        (1.0, 1.0, 3, 200),
    ):
        chain = [["dry", m, base, allowed, last_n, []], dist]
        yield f"n12/dry/{m}", "n12", chain, dry_prompt
        chain = [["dry", m, base, allowed, last_n, []], ["top_k", 5], ["temp", 0.5], dist]
        yield f"n12/dry_k/{m}", "n12", chain, dry_prompt
        yield f"n12/dry_greedy/{m}", "n12", [["dry", m, base, allowed, last_n, []], ["greedy"]], []
    infinite = float("-inf")
    bias = [[0, 1.5], [3, -2.25], [7, infinite], [11, 0.1]]
    yield "n12/bias", "n12", [["logit_bias", 12, bias], dist], []
    for n in ("n3000", "n3000_ties"):
        pen = ["penalties", 3000, 32, 1.2, 0.3, 0.1]
        yield f"{n}/k200", n, [pen, ["top_k", 200], dist], []
        yield f"{n}/k200_p", n, [["top_k", 200], ["top_p", 0.7, 0], ["temp", 0.8], dist], []
        yield f"{n}/xtc_all", n, [["xtc", 0.6, 0.01, 0, 5], ["top_k", 30], dist], []
        yield f"{n}/keep300", n, [["top_p", 0.1, 300], dist], []
        yield f"{n}/min_p_keep", n, [["min_p", 0.9, 50], dist], []
        yield f"{n}/typical", n, [["typical", 0.4, 0], ["top_p", 0.5, 0], dist], []
        yield f"{n}/sigma", n, [["top_n_sigma", 1.5], ["top_k", 100], ["top_p", 0.9, 0], dist], []
        yield f"{n}/dynatemp", n, [["temp_ext", 0.8, 0.5, 0.7], ["top_k", 40], dist], []
    if with_vocab:
        for i, texts in enumerate(([], ["\n", ":", '"', "*"], ["Qxz", "\n"])):
            chain = [["dry", 3.0, 1.75, 1, 64, texts], ["top_k", 8], dist]
            yield f"vocab/dry/{i}", "vocab", chain, []


def logits_of(llama):
    rng = np.random.default_rng(11)
    table = {
        "n12": (rng.standard_normal(12) * 1.5).astype(np.float32),
        "n300": (rng.standard_normal(300) * 3).astype(np.float32),
        "n3000": (rng.standard_normal(3000) * 4).astype(np.float32),
        "n3000_ties": (np.round(rng.standard_normal(3000) * 16) / 4).astype(np.float32),
    }
    if llama.vocab:
        row = np.full(llama.c.llama_vocab_n_tokens(llama.vocab), -30, np.float32)
        for i, text in enumerate(["\n", ":", "Q", "xz", "x", "z", " a", " b", "hello", '"', "*"]):
            row[llama.encode(text)[0]] = 1 + 0.1 * i
        table["vocab"] = row
    return table


def extra_vectors(llama):
    logits = logits_of(llama)
    arrays, cases = {}, []
    for key, name, chain, prompt in extra_cases(llama.vocab is not None):
        base = logits[name]
        steps = 40 if name == "vocab" else STEPS
        shift = 0 if name in ("vocab", "n12") else 7
        rows = [np.roll(base, shift * i) for i in range(steps)]
        for field, values in llama.run(chain, rows, prompt).items():
            arrays[f"{key}/{field}"] = values
        cases.append({"key": key, "logits": name, "chain": chain, "prompt": prompt, "shift": shift})
    for name, row in logits.items():
        arrays[f"logits/{name}"] = row
    document = {"cases": cases}
    if llama.vocab:
        pieces = llama.pieces([b"\n", b":", b'"', b"*", b"Q"])
        document["pieces"] = {str(i): piece.hex() for i, piece in pieces.items()}
        document["n_vocab"] = len(logits["vocab"])
        document["encode"] = {rest: llama.encode(rest) for rest in ("xz", "z")}
    return arrays, document


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--vocab", type=Path)
    args = parser.parse_args()
    np.savez_compressed(args.output / "cpp.npz", **cpp_vectors())
    arrays, document = extra_vectors(Llama(args.vocab))
    np.savez_compressed(args.output / "extra.npz", **arrays)
    (args.output / "extra.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
