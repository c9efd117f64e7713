"""Train a draft on what ``sample`` wrote.

    python -m scripts.train_pair.train_draft dflash --work DIR --cpu-minutes 21 40
    python -m scripts.train_pair.train_draft dflash2 --work DIR --cpu-minutes 12 22
    python -m scripts.train_pair.train_draft dflash2 --work DIR --cpu-minutes 15 --family hybrid

The loss of row i is the cross entropy against the target's distribution given the true tokens
before it, both at the temperature of the sampled text, with a weight that falls with i. DFlash2
starts from the trained DFlash, the hybrid's from nothing. Of several cycles, each with rates that fall
to nothing at its end, the result is the mean of the weights at these ends (stochastic weight averaging,
Izmailov and others 2018): the second of two alone is hardly better than the first, and their mean is.
Checkpoints, budget file (of the last cycle) and resuming as in ``train_target``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from scripts.train_pair import draft_model, model, optim, sample, shapes
from scripts.train_pair.train_target import budget, save

SEED = 37
SETTINGS = {
    # rows of the blocks of a step with their shares; rate is a factor on all learning rates
    "glimmer": {
        "dflash": {"rows": {9: 0.8, 16: 0.2}, "rate": 1.0, "flat": 0.4, "start": None},
        "dflash2": {"rows": {8: 1.0}, "rate": 0.4, "flat": 0.3, "start": "dflash"},
    },
    "hybrid": {"dflash2": {"rows": {8: 1.0}, "rate": 1.0, "flat": 0.4, "start": None}},
}
RATES = {"matrix": 0.02, "embedding": 0.01, "head": 0.0, "vector": 0.006}
HALF_LIFE = 2.2  # rows over which the weight of a row falls to 1 / e: few blocks get further
SEQUENCES, BLOCKS = 12, 30  # of a step, and per sequence
CORPUS_SHARE = 0.3  # of the steps
# Steps that pin the first rows, among those with short blocks: cudflash can, llama.cpp does not, and
# a draft that has seen both works with both.
SINK_SHARE = 0.33
EVERY_S, EVALUATE_EVERY = 90.0, 3


class Sequences:
    """One set of ``sample``, memory-mapped."""

    def __init__(self, work, name):
        self.tokens = np.load(work / f"seq_{name}_tokens.npy", mmap_mode="r")
        self.taps, self.hidden = (
            np.load(work / f"seq_{name}_{k}.npy", mmap_mode="r") for k in ("taps", "hidden")
        )

    def take(self, index):
        """Tokens (B, S) int64, taps (B, S, n * C) and final rows (B, S, C) bfloat16."""
        taps, hidden = (torch.from_numpy(np.ascontiguousarray(a[index])).view(torch.bfloat16)
                        for a in (self.taps, self.hidden))  # fmt: skip
        return torch.from_numpy(self.tokens[index].astype(np.int64)), taps, hidden


class Blocks:
    """Loss and choices of the blocks of some sequences.

    Parameters
    ----------
    params, shape
        Of the draft.
    target : dict of str to Tensor
    """

    def __init__(self, params, shape, target, compiled=True):
        self.params, self.shape = params, shape
        rope = model.rope_table(shape.context_length, shape.head_dim, shape.rope_base)
        self.forward = draft_model.DraftForward(params, shape, target["embedding"], rope, compiled)
        self.head = target["head"].bfloat16()
        loss = draft_model.selector_loss if shape.is_dflash2 else draft_model.soft_loss
        self.loss = torch.compile(loss, dynamic=False) if compiled else loss

    def __call__(self, batch, first, n_rows, n_sink, n_blocks=BLOCKS):
        """Loss, and accepted rows per block (B, N) against the text."""
        tokens, taps, hidden = batch
        anchors = first + draft_model.STRIDE * torch.arange(n_blocks)
        places = anchors[:, None] + torch.arange(n_rows - 1)  # (N, R - 1): the row before each
        temperature = sample.TEMPERATURE
        with torch.no_grad():
            z = model.head_logits(hidden[:, places], self.head, self.shape)
            teacher = (z / temperature).softmax(-1)
        x = self.forward(taps, tokens, first, n_blocks, n_rows, n_sink, shapes.MASK_TOKEN)
        x = x[:, :, 1:].contiguous()
        weights = torch.exp(-torch.arange(n_rows - 1) / HALF_LIFE)
        rest = (self.head, teacher, weights, self.shape, temperature)
        if self.shape.is_dflash2:
            w = {k: v for k, v in self.params.items() if k.startswith(("selector", "output_"))}
            loss, choice = self.loss(x, w, rest[0], tokens[:, places], *rest[1:])
        else:
            loss, choice = self.loss(x, self.params["output_norm"], *rest)
        same = choice.detach() == tokens[:, places + 1]
        return loss, same.long().cumprod(-1).sum(-1)


def draw(rng, sets, settings, shape):
    """One step's batch, first anchor, rows and sink."""
    rows = int(rng.choice(list(settings["rows"]), p=list(settings["rows"].values())))
    name = "corpus" if rng.random() < CORPUS_SHARE else "own"
    least = shapes.SINK + shape.window if name == "corpus" else sample.PROMPT
    last = sample.LENGTH - (BLOCKS - 1) * draft_model.STRIDE - rows
    first = int(rng.integers(least, last + 1))
    sink = shapes.SINK if rows < 16 and rng.random() < SINK_SHARE else 0
    chosen = sets[name]
    index = np.sort(rng.choice(len(chosen.tokens), SEQUENCES, replace=False))
    return chosen.take(index), first, rows, sink


@torch.no_grad()
def evaluate(blocks, val, facts, shape):
    """Mean accepted rows on continuations of held-out prompts, by kind and temperature."""
    found = {}
    for start in range(0, len(val.tokens), SEQUENCES):
        index = np.arange(start, min(start + SEQUENCES, len(val.tokens)))
        if len(index) < SEQUENCES:
            break  # another size would be compiled anew
        first = sample.PROMPT + start % draft_model.STRIDE
        _, accepted = blocks(val.take(index), first, shape.block_size, 0)
        for i, a in zip(index, accepted.float().mean(1).tolist()):
            kind, temperature = facts["kinds"][i], facts["temperatures"][i]
            found.setdefault(f"{kind}_t{temperature:g}", []).append(a)
    result = {key: round(float(np.mean(v)), 3) for key, v in sorted(found.items())}
    for t in ("0", "0.7"):
        both = found.get(f"docs_t{t}", []) + found.get(f"code_t{t}", [])
        result[f"natural_t{t}"] = round(float(np.mean(both)), 3) if both else None
    return result


def start(args, shape, settings):
    """Parameters, optimizer state and counters: new, warm, or resumed."""
    params = draft_model.init_draft(shape, SEED)
    own, warm = args.work / f"{args.kind}.pt", settings["start"]
    counters = {"step": 0, "used": 0.0, "blocks": 0, "wall": 0.0, "cycles": 0, "mean": None}
    saved = None
    if own.exists():
        saved = torch.load(own)
        counters = {k: saved[k] for k in counters}
    elif warm:
        saved = torch.load(args.work / f"{warm}.pt") | {"optimizer": None}
    if saved:
        take(params, saved["params"])
    return params, saved, counters


def end_cycle(params, n):
    """Note the weights at the end of a cycle in the mean of all ends."""
    n["cycles"] += 1
    ends = {k: v.detach().clone() for k, v in params.items()}
    before = n["mean"] or ends
    n["mean"] = {k: before[k].lerp(v, 1.0 / n["cycles"]) for k, v in ends.items()}


def take(params, values):
    """Overwrite parameters."""
    with torch.no_grad():
        for name, value in values.items():
            params[name].copy_(value)


def main():
    """Train until the CPU time is used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=list(SETTINGS["glimmer"]))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cpu-minutes", type=float, nargs="+", required=True,
                        help="at the end of each cycle, all before included")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--family", choices=list(SETTINGS), default="glimmer")
    args = parser.parse_args()
    if args.kind not in SETTINGS[args.family]:
        parser.error(f"{args.family} has no {args.kind}")
    torch.set_num_threads(args.threads)
    work, settings = args.work, SETTINGS[args.family][args.kind]
    shape = shapes.DRAFTS[args.family][args.kind]
    params, saved, n = start(args, shape, settings)
    optimizer = optim.Optimizer(params, {k: v * settings["rate"] for k, v in RATES.items()})
    if saved and saved["optimizer"]:
        optimizer.load_state_dict(saved["optimizer"])
    target = sample.read_target(work, args.family)
    blocks = Blocks(params, shape, target)
    sets = {name: Sequences(work, name) for name in ("own", "corpus", "val")}
    facts = json.loads((work / "sample.json").read_text())["val"]
    rng = np.random.default_rng(SEED + n["step"])
    clock, last, recent, saves, done = optim.CpuClock(n["used"]), time.monotonic(), [], 0, False
    while not done:
        ends = [60.0 * minutes for minutes in args.cpu_minutes]
        ends[-1] = budget(work, args.kind, args.cpu_minutes[-1])
        progress = clock.used / ends[n["cycles"]]
        loss, accepted = blocks(*draw(rng, sets, settings, shape))
        loss.backward()
        optimizer.step(optim.rate_factor(progress, n["step"], settings["flat"]))
        n["step"], n["blocks"] = n["step"] + 1, n["blocks"] + accepted.numel()
        recent.append((float(loss.detach()), float(accepted.float().mean())))
        if progress >= 1.0:
            end_cycle(params, n)
            done = n["cycles"] == len(ends)
            if done:
                take(params, n["mean"])
        if done or time.monotonic() - last > EVERY_S:
            last, saves = time.monotonic(), saves + 1
            means = np.mean(recent, 0)
            line = {"step": n["step"], "blocks": n["blocks"], "cycles": n["cycles"],
                    "cpu_s": round(clock.used, 1), "wall_s": round(n["wall"] + clock.wall, 1),
                    "progress": round(progress, 4), "loss": round(float(means[0]), 4),
                    "accepted": round(float(means[1]), 4)}  # fmt: skip
            if done or saves % EVALUATE_EVERY == 0:
                line |= evaluate(blocks, sets["val"], facts, shape)
            recent = []
            print(json.dumps(line), flush=True)
            with open(work / f"{args.kind}_log.jsonl", "a") as log:
                log.write(json.dumps(line) + "\n")
            save(work / f"{args.kind}.pt", {
                "params": {k: v.detach() for k, v in params.items()},
                "optimizer": optimizer.state_dict(), "step": n["step"], "used": clock.used,
                "blocks": n["blocks"], "wall": n["wall"] + clock.wall, "cycles": n["cycles"],
                "mean": n["mean"],
            })  # fmt: skip


if __name__ == "__main__":
    main()
