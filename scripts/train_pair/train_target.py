"""Train a target.

    python -m scripts.train_pair.train_target base --work DIR --cpu-minutes 84
    python -m scripts.train_pair.train_target target --work DIR --cpu-minutes 50
    python -m scripts.train_pair.train_target target --work DIR --cpu-minutes 40 --family hybrid

The embedded target has two parts: ``base`` is a whole training of fewer layers, ``target`` puts the
last ones in and goes on. Owns the mixture of the training windows. Resumes from ``NAME.pt`` when it
is there; writes it every 90 s and appends a line to ``NAME_log.jsonl``. ``--work/NAME_minutes`` (a
number in a file) replaces the CPU budget while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from scripts.train_pair import corpus, hybrid_model, model, optim, shapes

NETWORKS = {"glimmer": model, "hybrid": hybrid_model}


@dataclass(frozen=True)
class Part:
    """A part of a training, with a rise and a fall of the learning rates of its own.

    Parameters
    ----------
    layers : tuple of (int, float)
        Depths, and the share of the part after which each begins: a shallow net sees several times
        as many tokens in the same time, and keeps what it has learnt when others are put in.
    start : str, optional
        The part whose parameters it takes over; without one it begins with random ones.
    rate : float
        Factor on all learning rates.
    flat : float
        Share of the part before the rates fall.
    seed : int
        Of the first parameters and of the windows.
    """

    layers: tuple[tuple[int, float], ...]
    start: str | None = None
    rate: float = 1.0
    flat: float = 0.40
    seed: int = 11

    def depth(self, progress: float) -> int:
        """Layers at a share of the part."""
        return [layers for layers, since in self.layers if progress >= since][-1]


PARTS = {
    "glimmer": {
        "base": Part(((8, 0.0), (32, 0.34))),
        "target": Part(((shapes.TARGET.n_layers, 0.0),), "base", 0.5, 0.15, 1011),
    },
    "hybrid": {"target": Part(((shapes.HYBRID.n_layers, 0.0),))},
}
RATES = {"matrix": 0.02, "embedding": 0.05, "head": 0.006, "vector": 0.006}
DECAY = 0.05
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


class Training:
    """Parameters, optimizer and counters of a part: new, taken over, or as its checkpoint has them.

    Parameters
    ----------
    work : Path
    family, name : str
        A part of ``PARTS``.
    """

    def __init__(self, work, family, name):
        self.work, self.name, self.part = work, name, PARTS[family][name]
        self.shape, self.network = shapes.TARGETS[family], NETWORKS[family]
        self.n = {"step": 0, "tokens": 0, "used": 0.0, "wall": 0.0, "grown_at": 0}
        own = work / f"{name}.pt"
        if own.exists():
            saved = torch.load(own)
            self.n = {k: saved[k] for k in self.n}
            self.use({k: v.requires_grad_() for k, v in saved["params"].items()})
            self.optimizer.load_state_dict(saved["optimizer"])
        elif self.part.start:
            before = torch.load(work / f"{self.part.start}.pt")["params"]
            self.use(model.grow(before, self.shape.period, self.part.depth(0.0)))
        else:
            shape = replace(self.shape, n_layers=self.part.depth(0.0))
            self.use(self.network.init_target(shape, self.part.seed))

    def use(self, params):
        """Train these parameters from here on, with fresh momenta."""
        self.params, self.layers = params, model.n_layers_of(params)
        self.optimizer = optim.Optimizer(params, RATES, DECAY)
        self.loss = self.network.TargetLoss(params, replace(self.shape, n_layers=self.layers))

    def grow_when_due(self, progress):
        """Put in layers once it is time for them."""
        depth = self.part.depth(progress)
        if self.layers < depth:
            self.use(model.grow(self.params, self.shape.period, depth))
            self.n["grown_at"] = self.n["step"]

    def step(self, ids, progress):
        """One step; returns the loss in nats per token."""
        loss = self.loss(ids)
        loss.backward()
        since = self.n["step"] - self.n["grown_at"]  # fresh momenta want their own warm-up
        self.optimizer.step(self.part.rate * optim.rate_factor(progress, since, self.part.flat))
        self.n["step"] += 1
        self.n["tokens"] += ids[:, 1:].numel()
        return float(loss.detach())

    def save(self, clock):
        """Write the checkpoint."""
        save(self.work / f"{self.name}.pt", {
            "params": {k: v.detach() for k, v in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
        } | self.n | {"used": clock.used, "wall": self.n["wall"] + clock.wall})  # fmt: skip


def main():
    """Train until the CPU time is used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=list(PARTS["glimmer"]))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu-minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--family", choices=list(NETWORKS), default="glimmer")
    args = parser.parse_args()
    if args.part not in PARTS[args.family]:
        parser.error(f"{args.family} has no {args.part}")
    torch.set_num_threads(args.threads)
    training = Training(args.work, args.family, args.part)
    n = training.n
    windows = Windows(args.work, training.part.seed + n["step"], LENGTHS[args.family])
    evaluate = Evaluation(args.work)
    clock, last, recent, saves, done = optim.CpuClock(n["used"]), time.monotonic(), [], 0, False
    while not done:
        progress = clock.used / budget(args.work, args.part, args.cpu_minutes)
        done = progress >= 1.0
        training.grow_when_due(progress)
        recent.append(training.step(windows.batch(progress), progress))
        if done or time.monotonic() - last > EVERY_S:
            last, saves = time.monotonic(), saves + 1
            line = {"step": n["step"], "tokens": n["tokens"], "layers": training.layers,
                    "cpu_s": round(clock.used, 1), "wall_s": round(n["wall"] + clock.wall, 1),
                    "progress": round(progress, 4),
                    "train_nats": round(float(np.mean(recent)), 4)}  # fmt: skip
            if done or saves % EVALUATE_EVERY == 0:
                line |= evaluate(training.loss)
            recent = []
            print(json.dumps(line), flush=True)
            with open(args.work / f"{args.part}_log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            training.save(clock)


if __name__ == "__main__":
    main()
