"""Let the target write, and keep what a draft is trained on: tokens, tapped rows, final rows.

    python -m scripts.train_pair.sample --work DIR [--family hybrid]

Writes ``seq_NAME_{tokens,taps,hidden}.npy`` for NAME in own (the target's continuations of training
prompts), corpus (windows as the target was trained on), val (continuations of held-out prompts), and
``sample.json`` with what each holds. Resumable by name: a finished set is left alone. The embedded
target writes with the weights of its file, packed and unpacked: its drafts will read that file's rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from scripts.train_pair import export, model, shapes, train_target

SEED = 23
LENGTH, PROMPT = 512, 256  # tokens of a sequence, of them prompt
BATCH = 256
TEMPERATURE = 0.7  # of the trained drafts, and of the teacher's distribution
GREEDY_SHARE = 0.35
KIND_SHARES = {"docs": 0.43, "code": 0.43, "records": 0.14}
SIZES = {
    "glimmer": {"own": 1280, "corpus": 512, "val": 96},
    "hybrid": {"own": 768, "corpus": 384, "val": 48},
}


class Writer:
    """The target with caches, for many sequences of one length at once.

    Parameters
    ----------
    params : dict of str to Tensor
    shape : TargetShape
    taps : sequence of int
        Layers whose outputs are kept.
    """

    def __init__(self, params, shape, taps):
        # matrices once in the type they are multiplied in
        self.params = {k: v.bfloat16() if v.ndim == 2 else v for k, v in params.items()}
        self.shape, self.taps = shape, taps
        self.rope = model.rope_table(shape.context_length, shape.head_dim, shape.rope_base)
        self.layers = [model.layer_weights(self.params, i) for i in range(shape.n_layers)]

    def caches(self, n, length):
        """Empty caches of ``n`` sequences of at most ``length`` tokens, by layer."""
        size = (n, self.shape.n_kv_heads, length, self.shape.head_dim)
        return [[torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(self.shape.n_layers)]  # fmt: skip

    @torch.no_grad()
    def run(self, ids, caches=None):
        """Final rows (B, S, C) and tapped rows (B, S, n, C) of whole sequences.

        ``caches``, one (k, v) per layer, each (B, G, positions, D), are filled when given.
        """
        shape, S = self.shape, ids.shape[1]
        cos_sin = tuple(t[:S, None, :] for t in self.rope)
        x = model.rms(self.params["embedding"][ids], None, shape.rms_eps)
        tapped = []
        for layer, w in enumerate(self.layers):
            full = shape.is_full(layer)
            y = model.rms(x, w["attn_norm"], shape.rms_eps)
            q, k, v = model.attention_inputs(w, shape, y, None if full else cos_sin)
            if caches is not None:
                for cache, rows in zip(caches[layer], (k, v)):
                    cache[:, :, :S] = rows.transpose(1, 2)
            a = (model.full_attention(q, k, v) if full
                 else model.sliding_attention(q, k, v, shape.window))  # fmt: skip
            x = model.after_attention(w, shape, x, y, a)
            if layer in self.taps:
                tapped.append(x)
        hidden = model.rms(x, self.params["output_norm"], shape.rms_eps)
        return hidden, torch.stack(tapped, 2)

    @torch.no_grad()
    def step(self, ids, at, caches):
        """Logits (B, V) after one more token per sequence, at position ``at``."""
        shape = self.shape
        B, G, D = len(ids), shape.n_kv_heads, shape.head_dim
        cos_sin = tuple(t[at : at + 1, None, :] for t in self.rope)
        x = model.rms(self.params["embedding"][ids], None, shape.rms_eps)[:, None]
        for layer, w in enumerate(self.layers):
            full = shape.is_full(layer)
            y = model.rms(x, w["attn_norm"], shape.rms_eps)
            q, k, v = model.attention_inputs(w, shape, y, None if full else cos_sin)
            first = 0 if full else max(0, at + 1 - shape.window)
            for cache, row in zip(caches[layer], (k, v)):
                cache[:, :, at] = row[:, 0]
            keys, values = (cache[:, :, first : at + 1] for cache in caches[layer])
            q = q.view(B, G, -1, D).bfloat16()
            weights = ((q @ keys.mT).float() * D**-0.5).softmax(-1).bfloat16()
            x = model.after_attention(w, shape, x, y, (weights @ values).reshape(B, 1, -1))
        hidden = model.rms(x[:, 0], self.params["output_norm"], shape.rms_eps)
        return model.head_logits(hidden, self.params["head"], shape)

    def write(self, prompts, n_tokens, temperatures, generator):
        """Continue prompts.

        Parameters
        ----------
        prompts : Tensor of shape (B, P), int64
        n_tokens : int
        temperatures : Tensor of shape (B,)
            0: greedy.
        generator : torch.Generator

        Returns
        -------
        Tensor of shape (B, P + n_tokens), int64
        """
        shape, (B, P) = self.shape, prompts.shape
        caches = self.caches(B, P + n_tokens)
        hidden, _ = self.run(prompts, caches)
        logits = model.head_logits(hidden[:, -1], self.params["head"], shape)
        ids = [prompts]
        greedy = temperatures == 0
        scale = torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
        for i in range(n_tokens):
            logits[:, : len(shapes.SPECIAL_TOKENS)] = float("-inf")  # keep writing
            drawn = torch.multinomial((logits / scale).softmax(-1), 1, generator=generator)[:, 0]
            token = torch.where(greedy, logits.argmax(-1), drawn)
            ids.append(token[:, None])
            if i + 1 < n_tokens:
                logits = self.step(token, P + i, caches)
        return torch.cat(ids, 1)


def draw_prompts(rng, arrays, part, n):
    """Prompts (n, PROMPT) of the three kinds, and their kinds."""
    kinds = rng.choice(list(KIND_SHARES), n, p=list(KIND_SHARES.values()))
    found = []
    for kind in kinds:
        ids = arrays[f"{part}_{kind}"]
        start = rng.integers(len(ids) - PROMPT)
        found.append(ids[start : start + PROMPT].astype(np.int64))
    return torch.from_numpy(np.stack(found)), list(kinds)


def sequences(name, n, writer, work, rng, generator):
    """Batches of (ids (B, LENGTH), kinds, temperatures) of one set."""
    arrays = np.load(work / "tokens.npz")
    windows = train_target.Windows(work, SEED)
    for start in range(0, n, BATCH):
        size = min(BATCH, n - start)
        if name == "corpus":
            ids = np.stack([windows.draw(LENGTH, 1.0) for _ in range(size)])
            yield torch.from_numpy(ids), ["corpus"] * size, [None] * size
        else:
            part = "train" if name == "own" else "heldout"
            prompts, kinds = draw_prompts(rng, arrays, part, size)
            share = GREEDY_SHARE if name == "own" else 0.5
            temperatures = np.where(rng.random(size) < share, 0.0, TEMPERATURE)
            ids = writer.write(prompts, LENGTH - PROMPT, torch.tensor(temperatures), generator)
            yield ids, kinds, temperatures.tolist()


def read_target(work, family):
    """Parameters of the trained target, those of the embedded one as its file has them."""
    params = torch.load(work / "target.pt")["params"]
    if family != "glimmer":
        return params
    arrays = {name: value.float().numpy() for name, value in params.items()}
    found = export.packed(arrays, shapes.TARGET)
    return {name: torch.from_numpy(value) for name, value in found.items()}


def make_writer(family, params, taps):
    """Return the Writer of a family."""
    if family == "glimmer":
        return Writer(params, shapes.TARGET, taps)
    from scripts.train_pair import hybrid_sample

    return hybrid_sample.Writer(params, shapes.HYBRID, taps)


def main():
    """Write all sets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sets", nargs="*", default=list(SIZES["glimmer"]))
    parser.add_argument("--family", choices=list(shapes.TARGETS), default="glimmer")
    args = parser.parse_args()
    work, shape = args.work, shapes.TARGETS[args.family]
    torch.set_num_threads(args.threads)
    taps = shapes.DRAFTS[args.family]["dflash2"].taps
    writer = make_writer(args.family, read_target(work, args.family), taps)
    facts_file = work / "sample.json"
    facts = json.loads(facts_file.read_text()) if facts_file.exists() else {}
    C, n_taps = shape.hidden_dim, len(taps)
    for number, (name, n) in enumerate(SIZES[args.family].items()):
        if name in facts or name not in args.sets:
            continue
        started, cpu = time.monotonic(), time.process_time()
        rng = np.random.default_rng(SEED + number)
        generator = torch.Generator().manual_seed(SEED + number)
        at = 0
        widths = {"taps": n_taps * C, "hidden": C}
        maps = {k: np.lib.format.open_memmap(work / f"seq_{name}_{k}.npy", "w+", np.int16,
                                             (n, LENGTH, width)) for k, width in widths.items()}
        tokens, kinds, temperatures = [], [], []
        for ids, some_kinds, some_temperatures in sequences(name, n, writer, work, rng, generator):
            for part in ids.split(32):
                hidden, tapped = writer.run(part)
                for k, rows in (("taps", tapped.flatten(2)), ("hidden", hidden)):
                    maps[k][at : at + len(part)] = rows.bfloat16().view(torch.int16).numpy()
                at += len(part)
            tokens.append(ids.numpy().astype(np.uint16))
            kinds += some_kinds
            temperatures += some_temperatures
            print(name, at, round(time.monotonic() - started, 1), flush=True)
        np.save(work / f"seq_{name}_tokens.npy", np.concatenate(tokens))
        facts[name] = {"sequences": n, "kinds": kinds, "temperatures": temperatures,
                       "wall_s": round(time.monotonic() - started, 1),
                       "cpu_s": round(time.process_time() - cpu, 1)}  # fmt: skip
        facts_file.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
