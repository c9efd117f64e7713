"""Train a target.

    python -m scripts.train_pair.train_target --work DIR --cpu-minutes 50 [--family hybrid]

Owns the mixture of the training windows. Resumes from ``target.pt`` when it is there; writes it
every 90 s and appends a line to ``target_log.jsonl``. ``--work/target_minutes`` (a number in a file)
replaces the CPU budget while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from scripts.train_pair import corpus, hybrid_model, model, optim, shapes

SEED = 11
NETWORKS = {"glimmer": model, "hybrid": hybrid_model}
RATES = {"matrix": 0.02, "embedding": 0.05, "head": 0.006, "vector": 0.006}
DECAY = 0.05
FLAT = 0.35  # share of the training before the rates fall
LENGTHS = {  # tokens, sequences, share of the steps
    "glimmer": ((512, 9, 0.94), (1536, 3, 0.06)),
    "hybrid": ((512, 5, 1.0),),  # a short training: more steps
}
RECORD_SHARE, RECORD_PART = 0.25, 0.5  # of the windows carry records, in this part of them
REPEAT_SHARE, REPEAT_UNTIL = 0.15, 0.5  # early windows with a pasted repeat, to teach copying
EVERY_S = 90.0  # between checkpoints
EVALUATE_EVERY = 3  # checkpoints; an evaluation costs as much as a dozen steps


class Windows:
    """Random training windows.

    Parameters
    ----------
    work : Path
    seed : int
    lengths : tuple
        One of ``LENGTHS``.
    """

    def __init__(self, work, seed, lengths=LENGTHS["glimmer"]):
        arrays = np.load(work / "tokens.npz")
        self.text = np.concatenate([arrays[f"train_{kind}"] for kind in corpus.KINDS])
        self.records = arrays["train_records"]
        self.rng, self.lengths = np.random.default_rng(seed), lengths

    def natural(self, n):
        """A window of the corpus."""
        start = self.rng.integers(len(self.text) - n)
        return self.text[start : start + n].astype(np.int64)

    def draw(self, n, progress):
        """One window of ``n`` tokens."""
        rng, ids = self.rng, self.natural(n)
        if rng.random() < RECORD_SHARE:
            size = int(n * RECORD_PART)
            start, at = rng.integers(len(self.records) - size), rng.integers(n - size)
            ids[at : at + size] = self.records[start : start + size]
        elif progress < REPEAT_UNTIL and rng.random() < REPEAT_SHARE:
            size = rng.integers(24, 100)
            a = rng.integers(0, n - 2 * size)
            b = rng.integers(a + size, n - size + 1)
            ids[b : b + size] = ids[a : a + size].copy()
        return ids

    def batch(self, progress):
        """Token ids (B, S + 1) of one of the lengths."""
        shares = [share for _, _, share in self.lengths]
        n, rows, _ = self.lengths[self.rng.choice(len(self.lengths), p=shares)]
        return torch.from_numpy(np.stack([self.draw(n + 1, progress) for _ in range(rows)]))


def heldout_windows(work, kind, n=24, length=512):
    """Evenly spaced held-out windows (n, length + 1)."""
    ids = np.load(work / "tokens.npz")[f"heldout_{kind}"].astype(np.int64)
    starts = np.linspace(0, len(ids) - length - 1, n).astype(int)
    return torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts]))


class Evaluation:
    """Held-out loss in nats per token and bits per byte, by kind and pooled."""

    def __init__(self, work):
        facts = json.loads((work / "tokens.json").read_text())
        kinds = (*corpus.KINDS, "records")
        self.windows = {kind: heldout_windows(work, kind) for kind in kinds}
        self.per_token = {k: facts[f"heldout_{k}"]["bytes"] / facts[f"heldout_{k}"]["tokens"]
                          for k in kinds}  # fmt: skip

    @torch.no_grad()
    def __call__(self, loss):
        """``loss(ids)`` -> nats per token."""
        nats = {k: float(np.mean([float(loss(part)) for part in w.split(12)]))
                for k, w in self.windows.items()}  # fmt: skip
        bits = {k: nats[k] / np.log(2) / self.per_token[k] for k in nats}
        pooled = (sum(nats[k] for k in corpus.KINDS) / np.log(2)
                  / sum(self.per_token[k] for k in corpus.KINDS))  # fmt: skip
        return {"bpb": round(pooled, 4)} | {f"bpb_{k}": round(v, 4) for k, v in bits.items()}


def save(path, content):
    """Write a checkpoint whole or not at all."""
    torch.save(content, f"{path}.part")
    os.replace(f"{path}.part", path)


def budget(work, name, minutes):
    """CPU seconds allowed; the file ``NAME_minutes`` overrules the argument."""
    file = work / f"{name}_minutes"
    return 60.0 * (float(file.read_text()) if file.exists() else minutes)


def main():
    """Train until the CPU time is used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu-minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--family", choices=list(NETWORKS), default="glimmer")
    args = parser.parse_args()
    work, shape, network = args.work, shapes.TARGETS[args.family], NETWORKS[args.family]
    torch.set_num_threads(args.threads)
    params = network.init_target(shape, SEED)
    optimizer = optim.Optimizer(params, RATES, DECAY)
    step, used, tokens, wall = 0, 0.0, 0, 0.0
    if (work / "target.pt").exists():
        saved = torch.load(work / "target.pt")
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(saved["params"][name])
        optimizer.load_state_dict(saved["optimizer"])
        step, used, tokens, wall = (saved[k] for k in ("step", "used", "tokens", "wall"))
    windows = Windows(work, SEED + step, LENGTHS[args.family])
    loss_of = network.TargetLoss(params, shape)
    evaluate = Evaluation(work)
    clock, last, recent, saves, done = optim.CpuClock(used), time.monotonic(), [], 0, False
    while not done:
        progress = clock.used / budget(work, "target", args.cpu_minutes)
        done = progress >= 1.0
        ids = windows.batch(progress)
        loss = loss_of(ids)
        loss.backward()
        optimizer.step(optim.rate_factor(progress, step, FLAT))
        step, tokens = step + 1, tokens + ids[:, 1:].numel()
        recent.append(float(loss.detach()))
        if done or time.monotonic() - last > EVERY_S:
            last, saves = time.monotonic(), saves + 1
            line = {"step": step, "tokens": tokens, "cpu_s": round(clock.used, 1),
                    "wall_s": round(wall + clock.wall, 1), "progress": round(progress, 4),
                    "train_nats": round(float(np.mean(recent)), 4)}  # fmt: skip
            if done or saves % EVALUATE_EVERY == 0:
                line |= evaluate(loss_of)
            recent = []
            print(json.dumps(line), flush=True)
            with open(work / "target_log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            save(work / "target.pt", {
                "params": {k: v.detach() for k, v in params.items()}, "step": step,
                "optimizer": optimizer.state_dict(), "used": clock.used, "tokens": tokens,
                "wall": wall + clock.wall,
            })  # fmt: skip


if __name__ == "__main__":
    main()
