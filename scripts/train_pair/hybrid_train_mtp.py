"""Train the hybrid's MTP block on what ``sample`` wrote; the target stays as it is.

    python -m scripts.train_pair.hybrid_train_mtp --work DIR --cpu-minutes 8

Row p of the block learns the target's distribution after the token at p + 1, at the temperature of
the sampled text; then the chain goes on from the block's own rows, ``DEPTHS`` passes in all, each
loss weighing less, so that drafts of several tokens are trained as they are made. Checkpoints,
budget file and resuming as in ``train_target``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from scripts.train_pair import hybrid_model, model, optim, sample, shapes
from scripts.train_pair.train_draft import CORPUS_SHARE, Sequences
from scripts.train_pair.train_target import budget, save

SEED = 53
RATES = {"matrix": 0.02, "embedding": 0.0, "head": 0.0, "vector": 0.006}
FLAT = 0.4
DEPTHS, WEIGHT = 4, 0.7  # passes in a row; a loss weighs so much of the one before
SEQUENCES = 6  # of a step
EVERY_S, EVALUATE_EVERY = 90.0, 3


class Chain:
    """Losses and choices of all chains of some sequences.

    Parameters
    ----------
    params : dict of str to Tensor
        Of the block.
    shape : HybridShape
    target : dict of str to Tensor
    """

    def __init__(self, params, shape, target, compiled=True):
        def wrap(function):
            return torch.compile(function, dynamic=False) if compiled else function

        self.params, self.shape, self.target = params, shape, target
        self.table = hybrid_model.rope(shape)
        self.head = target["head"].bfloat16()
        self.step, self.loss = wrap(hybrid_model.mtp_step), wrap(hybrid_model.mtp_loss)

    def __call__(self, tokens, hidden, depths=DEPTHS):
        """Weighted loss, and accepted tokens per chain (B, S) against the text.

        Parameters
        ----------
        tokens : Tensor of shape (B, S), int64
        hidden : Tensor of shape (B, S, C)
        """
        n = tokens.shape[1] - depths - 1  # rows whose whole chain is in the text
        rows, earlier, total, same = hidden[:, :n].float(), [], 0.0, []
        for depth in range(depths):
            cos_sin = tuple(t[depth : depth + n, None, :] for t in self.table)
            joined = tokens[:, depth + 1 : depth + 1 + n]
            rows, earlier = self.step(
                self.params, self.shape, self.target["embedding"], joined, rows, cos_sin, earlier
            )
            with torch.no_grad():
                z = model.head_logits(hidden[:, depth + 1 : depth + 1 + n], self.head, self.shape)
                teacher = (z / sample.TEMPERATURE).softmax(-1)
            loss, choice = self.loss(rows, self.head, self.shape, teacher, sample.TEMPERATURE)
            total = total + WEIGHT**depth * loss
            same.append(choice.detach() == tokens[:, depth + 2 : depth + 2 + n])
        accepted = torch.stack(same, -1).long().cumprod(-1).sum(-1)
        return total / sum(WEIGHT**d for d in range(depths)), accepted


@torch.no_grad()
def evaluate(chain, val, facts):
    """Mean accepted tokens on continuations of held-out prompts, by kind and temperature."""
    found = {}
    for start in range(0, len(val.tokens), SEQUENCES):
        index = np.arange(start, start + SEQUENCES)
        tokens, _, hidden = val.take(index)
        _, accepted = chain(tokens, hidden)
        means = accepted[:, sample.PROMPT - 2 :].float().mean(1).tolist()
        for i, mean in zip(index, means):
            key = f"{facts['kinds'][i]}_t{facts['temperatures'][i]:g}"
            found.setdefault(key, []).append(mean)
    return {key: round(float(np.mean(v)), 3) for key, v in sorted(found.items())}


def main():
    """Train until the CPU time is used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu-minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work, shape = args.work, shapes.HYBRID
    params = hybrid_model.init_mtp(shape, SEED)
    optimizer = optim.Optimizer(params, RATES)
    step, used = 0, 0.0
    if (work / "mtp.pt").exists():
        saved = torch.load(work / "mtp.pt")
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(saved["params"][name])
        optimizer.load_state_dict(saved["optimizer"])
        step, used = saved["step"], saved["used"]
    chain = Chain(params, shape, torch.load(work / "target.pt")["params"])
    sets = {name: Sequences(work, name) for name in ("own", "corpus", "val")}
    facts = json.loads((work / "sample.json").read_text())["val"]
    rng = np.random.default_rng(SEED + step)
    clock, last, recent, saves, done = optim.CpuClock(used), time.monotonic(), [], 0, False
    while not done:
        progress = clock.used / budget(work, "mtp", args.cpu_minutes)
        done = progress >= 1.0
        chosen = sets["corpus" if rng.random() < CORPUS_SHARE else "own"]
        index = np.sort(rng.choice(len(chosen.tokens), SEQUENCES, replace=False))
        tokens, _, hidden = chosen.take(index)
        loss, accepted = chain(tokens, hidden)
        loss.backward()
        optimizer.step(optim.rate_factor(progress, step, FLAT))
        step += 1
        recent.append((float(loss.detach()), float(accepted.float().mean())))
        if done or time.monotonic() - last > EVERY_S:
            last, saves = time.monotonic(), saves + 1
            means = np.mean(recent, 0)
            line = {"step": step, "cpu_s": round(clock.used, 1), "progress": round(progress, 4),
                    "loss": round(float(means[0]), 4), "accepted": round(float(means[1]), 4)}
            if done or saves % EVALUATE_EVERY == 0:
                line |= evaluate(chain, sets["val"], facts)
            recent = []
            print(json.dumps(line), flush=True)
            with open(work / "mtp_log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            save(work / "mtp.pt", {
                "params": {k: v.detach() for k, v in params.items()}, "step": step,
                "optimizer": optimizer.state_dict(), "used": clock.used,
            })  # fmt: skip


if __name__ == "__main__":
    main()
