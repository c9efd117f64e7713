"""Measure the exported pair with cudflash itself: acceptance, bits per byte, speed.

    python -m scripts.train_pair.measure acceptance --prompts PROMPTS --out results/acceptance.json
    python -m scripts.train_pair.measure bits --work DIR --pair DIR --out results/bits.json
    python -m scripts.train_pair.measure speed --prompts PROMPTS --out results/speed.json
    python -m scripts.train_pair.measure cost --out results/cost.json

Acceptance length is tokens emitted per target pass, the target's own included, over all rounds of
all prompts of a kind. The rule is the default one (match), so the text is that of plain decoding.
Needs cudflash and no torch.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from scripts.train_pair import export

KINDS = ("docs", "code", "records")
NATURAL = ("docs", "code")
LENGTHS = {"dflash": (3, 7, 15), "dflash2": (3, 7)}
TEMPERATURES = (0.0, 0.7)
PAIR = Path(__file__).resolve().parents[2] / "cudflash" / "demo_pair"
LONGEST_PERIOD = 16


def loop_share(tokens, longest=LONGEST_PERIOD):
    """Share of tokens that only continue a loop.

    A token does if the last two turns of some period up to ``longest`` (eight tokens at least)
    already had it coming.

    Parameters
    ----------
    tokens : sequence of int
    longest : int

    Returns
    -------
    float
    """
    tokens = list(tokens)
    looped = 0
    for t in range(len(tokens)):
        for p in range(1, longest + 1):
            back = max(p, 8)
            if t - p - back >= 0 and tokens[t - back : t + 1] == tokens[t - back - p : t + 1 - p]:
                looped += 1
                break
    return looped / len(tokens) if tokens else 0.0


def load(folder, kind, types="shipped", **settings):
    """The pair with one of its drafts, or the target alone."""
    import cudflash

    names = [export.TARGET_FILE] + ([] if kind is None else [export.DRAFT_FILES[kind]])
    paths = [Path(folder) / export.file_name(name, types) for name in names]
    return cudflash.load(*paths, device="cpu", **settings)


def answer(engine, prompt, n_tokens, temperature, seed, untruncated=False, **options):
    """One answer; the end token ends it.

    ``untruncated``: draw from the whole distribution, without top-k, top-p and min-p.
    """
    from cudflash.sampling import SamplingConfig

    ids = engine.tokenizer.encode(prompt["text"])
    kept = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if untruncated else {}
    sampling = SamplingConfig(temperature=temperature, **kept)
    return engine.generate(ids, max_tokens=n_tokens, sampling=sampling, seed=seed, **options)


def pooled(results, kinds):
    """Emitted tokens per target pass, and acceptance by position, of some kinds."""
    rounds = emitted = 0
    accepted, proposed = [], []
    for kind, stats in results:
        if kind in kinds:
            rounds += stats["rounds"]
            emitted += stats["emitted"]
            for total, more in ((accepted, stats["accepted_at"]), (proposed, stats["proposed_at"])):
                total.extend([0] * (len(more) - len(total)))
                for i, n in enumerate(more):
                    total[i] += n
    return {
        "acceptance_length": round(emitted / rounds, 3) if rounds else None,
        "rounds": rounds, "emitted": emitted,
        "accepted_at": [round(a / p, 3) if p else None for a, p in zip(accepted, proposed)],
    }  # fmt: skip


def acceptance(args):
    """Acceptance length by draft, temperature, verify length and kind."""
    prompts = json.loads(args.prompts.read_text())["prompts"]
    table, loops = {}, {}
    for kind in args.drafts:
        lengths = LENGTHS[kind]
        engine = load(args.pair, kind, **args.settings)
        for temperature in TEMPERATURES:
            for length in lengths:
                results = []
                for number, prompt in enumerate(prompts):
                    result = answer(engine, prompt, args.tokens, temperature, number,
                                    args.untruncated, speculative="on",
                                    verify_length=length)  # fmt: skip
                    results.append((prompt["kind"], result.speculation["counts"]))
                    key = f"{prompt['kind']}, temperature {temperature:g}"
                    loops.setdefault(key, {})[number] = loop_share(result.tokens)
                row = {"natural": pooled(results, NATURAL)}
                row |= {k: pooled(results, (k,)) for k in KINDS}
                table[f"{kind}, temperature {temperature:g}, verify {length}"] = row
                print(kind, temperature, length,
                      {k: v["acceptance_length"] for k, v in row.items()}, flush=True)
    return {"prompts": len(prompts), "tokens": args.tokens, "table": table, "loop_share": {
        key: round(float(np.mean(list(v.values()))), 3) for key, v in sorted(loops.items())}}


def bits(args):
    """Bits per byte of the target on held-out text, by the types of its file."""
    return {types: bits_of(args, types) for types in args.types} | {"windows": args.windows}


def bits_of(args, types):
    """Bits per byte of one file, by kind and pooled; windows of 512 tokens."""
    facts = json.loads((args.work / "tokens.json").read_text())
    arrays = np.load(args.work / "tokens.npz")
    engine = load(args.pair, None, types, n_ctx=1024)
    nats, found = {}, {}
    per_token = {k: facts[f"heldout_{k}"]["bytes"] / facts[f"heldout_{k}"]["tokens"] for k in KINDS}
    for kind in KINDS:
        ids = arrays[f"heldout_{kind}"].astype(int)
        losses = []
        for start in np.linspace(0, len(ids) - 513, args.windows).astype(int):
            window = ids[start : start + 513]
            logits = engine.logits(window[:-1].tolist()).astype(np.float64)
            top = logits.max(1)
            log_sum = top + np.log(np.exp(logits - top[:, None]).sum(1))
            losses.append(np.mean(log_sum - logits[np.arange(512), window[1:]]))
        nats[kind] = float(np.mean(losses))
        found[kind] = round(nats[kind] / np.log(2) / per_token[kind], 4)
    pooled = sum(nats[k] for k in NATURAL) / sum(per_token[k] for k in NATURAL)
    return found | {"natural": round(pooled / np.log(2), 4)}


def speed(args):
    """Tokens per second, plain and drafted in turns, natural prompts, temperature 0."""
    prompts = [p for p in json.loads(args.prompts.read_text())["prompts"] if p["kind"] in NATURAL]
    engines = {kind: load(args.pair, kind, **args.settings) for kind in LENGTHS}
    lanes = {"plain": ("dflash", {"speculative": "off"})}
    for kind, lengths in LENGTHS.items():
        for n in lengths:
            lanes[f"{kind}, verify {n}"] = (kind, {"speculative": "on", "verify_length": n})
        lanes[f"{kind}, auto"] = (kind, {"speculative": "auto"})
    found = {name: [] for name in lanes}
    for number, prompt in enumerate(prompts[: args.count]):
        for name, (kind, options) in list(lanes.items())[:: 1 if number % 2 else -1]:
            if number == 0:  # records the passes
                answer(engines[kind], prompt, 32, 0.0, 0, **options)
            started = time.perf_counter()
            result = answer(engines[kind], prompt, args.tokens, 0.0, 0, **options)
            found[name].append(len(result.tokens) / (time.perf_counter() - started))
    plain = found["plain"]
    return {name: {"tokens_per_s": round(median(v), 1),
                   "to_plain": round(median(a / b for a, b in zip(v, plain)), 3)}
            for name, v in found.items()}  # fmt: skip


def cost(args):
    """Milliseconds of target passes of several rows and of draft passes, each in turns with one row.

    After 384 tokens of context: six draft windows, three of the target's. A causal draft runs as many
    rows as are verified, another one its block.
    """
    from cudflash.model.draft_runner import DraftRunner

    found = {}
    for kind in LENGTHS:
        engine = load(args.pair, kind, n_ctx=1024, **args.settings)
        runner = engine.session()._runner
        for _ in range(2):
            runner.prefill_chunk(list(range(10, 202)), False)
        # below the public API: a draft context without a conversation has no name there
        draft = DraftRunner(engine.ops, engine.draft.model, engine.draft.work)
        shape = (128, len(engine.draft_config.taps), engine.config.hidden_dim)
        rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        for _ in range(3):
            draft.observe(engine.ops.upload(rows), len(rows))
        config = engine.draft_config

        def target_pass(n, runner=runner):
            runner.step(list(range(10, 10 + n)), "all")
            runner.rollback()

        def draft_pass(n, draft=draft, config=config):
            draft.propose(5, n, n + 1 if config.causal else config.block_size)

        lanes = {f"target, {n} rows": (target_pass, n) for n in (1, 4, 8, 16)}
        lanes |= {f"draft pass, verify {n}": (draft_pass, n) for n in LENGTHS[kind]}
        found[kind] = {
            name: in_turns(partial(target_pass, 1), partial(act, n), args.count * 50)
            for name, (act, n) in lanes.items()
        }
    return found


def in_turns(one, other, repeats):
    """Median time of a pass, and of its ratio to the one-row pass before it."""
    times = []
    for repeat in range(repeats):
        started = time.perf_counter()
        one()
        between = time.perf_counter()
        other()
        if repeat > 2:  # the first ones record
            times.append((between - started, time.perf_counter() - between))
    return {"ms": round(1e3 * median(b for _, b in times), 3),
            "to_one_row": round(median(b / a for a, b in times), 2)}  # fmt: skip


MEASUREMENTS = {"acceptance": acceptance, "bits": bits, "speed": speed, "cost": cost}


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=list(MEASUREMENTS))
    parser.add_argument("--pair", type=Path, default=PAIR)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--untruncated", action="store_true", help="no top-k, top-p, min-p")
    parser.add_argument("--types", nargs="*", default=["f32", "q6_k", "shipped"])
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--count", type=int, default=6, help="prompts of the speed measurement")
    parser.add_argument("--sink", type=int, default=0, help="pinned rows of the drafts' context")
    parser.add_argument("--drafts", nargs="*", default=list(LENGTHS), choices=list(LENGTHS))
    args = parser.parse_args()
    args.settings = {"draft_sink": args.sink}
    result = MEASUREMENTS[args.what](args)
    text = json.dumps(result, indent=1)
    if args.what != "acceptance":
        print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
