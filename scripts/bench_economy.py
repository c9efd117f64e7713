"""Measure what `--speculative auto` costs where drafting does not pay: the embedded pair on a CPU.

    python scripts/bench_economy.py
    python scripts/bench_economy.py --pairs 20 --tokens 1000 --threads 1,2 --drafts dflash,dflash2

Two answers of as many tokens to the same prompt take turns, one plain and one under auto; which comes
first changes from pair to pair. A ratio is auto's time over plain's, whole answers from the call to
the result, prompt included. "first" is the first answer of a process of its own, "later" are answers
of fresh sessions on one engine. Wall and processor time (of all threads); their medians, the spread
from the lowest to the highest, and the machine's load before and after. Tokens have to be equal.
Markdown on stdout, one JSON line after it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from statistics import median

from bench_common import machine

MODES = ("off", "auto")


def load(draft, threads, n_prompt):
    """The embedded pair, and the ids of a prompt: the beginning of that of `cudflash demo`."""
    import cudflash
    from cudflash.demo import demo_prompt

    engine = cudflash.load("demo", f"demo:{draft}", device="cpu", threads=threads)
    return engine, list(engine.tokenizer.encode(demo_prompt()))[:n_prompt]


def measure(engine, ids, n_tokens, mode):
    """One answer of a fresh session: wall and processor milliseconds, tokens, drafting rounds."""
    import cudflash

    session = engine.session()
    wall, cpu = time.perf_counter(), time.process_time()
    result = session.generate(
        ids, max_tokens=n_tokens, sampling=cudflash.SamplingConfig(temperature=0), seed=1,
        ignore_eos=True, speculative=mode,
    ).result()  # fmt: skip
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    stats = result.stats["speculative"] or {}
    economy = stats.get("economy") or {}
    told = [event["reason"] for event in economy.get("events", ())]
    session.close()
    return {
        "mode": mode, "wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu, "tokens": list(result.tokens),
        "prompt_ms": result.stats["prompt_ms"], "decode_ms": result.stats["decode_ms"],
        "draft_rounds": stats.get("draft_rounds", 0), "told": told,
    }  # fmt: skip


def child(draft, threads, n_prompt, n_tokens, mode):
    """The first answer of this process."""
    engine, ids = load(draft, threads, n_prompt)
    print(json.dumps(measure(engine, ids, n_tokens, mode)))


def first_answer(draft, threads, n_prompt, n_tokens, mode):
    """The first answer of a process of its own."""
    command = [sys.executable, __file__, "--child", mode, "--drafts", draft]
    command += ["--threads", str(threads), "--tokens", str(n_tokens), "--prompt", str(n_prompt)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def pairs(answer, n_pairs):
    """Pairs of answers by turns; raises SystemExit where tokens differ."""
    found = []
    for index in range(n_pairs):
        order = MODES if index % 2 == 0 else MODES[::-1]
        pair = {mode: answer(mode) for mode in order}
        if pair["off"]["tokens"] != pair["auto"]["tokens"]:
            raise SystemExit("tokens under auto are not those of plain decoding")
        found.append(pair)
    return found


def spread(values):
    """Median and range."""
    return f"{median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def row(draft, threads, kind, found):
    """A line of the table, and the same as numbers."""
    ratios = {
        unit: [pair["auto"][unit] / pair["off"][unit] for pair in found]
        for unit in ("wall_ms", "cpu_ms", "decode_ms")
    }
    plain = median(pair["off"]["wall_ms"] for pair in found)
    rounds = [pair["auto"]["draft_rounds"] for pair in found]
    print(
        f"| {draft} | {threads} | {kind} | {len(found)} | {plain:.0f} | {spread(ratios['wall_ms'])} "
        f"| {spread(ratios['cpu_ms'])} | {spread(ratios['decode_ms'])} | {max(rounds)} |", flush=True
    )
    return {"draft": draft, "threads": threads, "kind": kind, "ratios": ratios, "plain_ms": plain,
            "told": found[-1]["auto"]["told"]}  # fmt: skip


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--drafts", default="dflash,dflash2")
    parser.add_argument("--kinds", default="first,later")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    drafts, threads = options.drafts.split(","), [int(n) for n in options.threads.split(",")]
    if options.child:
        child(drafts[0], threads[0], options.prompt, options.tokens, options.child)
        return
    before, records = os.getloadavg(), []
    print("| draft | threads | answer | pairs | plain, ms | auto / plain, wall | processor | "
          "decoding, wall | rounds that drafted, at most |")  # fmt: skip
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for draft in drafts:
        for n_threads in threads:
            if "first" in options.kinds:
                answer = partial(
                    first_answer, draft, n_threads, options.prompt, options.tokens
                )
                found = pairs(answer, options.pairs)
                records.append(row(draft, n_threads, "first", found))
            if "later" in options.kinds:
                engine, ids = load(draft, n_threads, options.prompt)
                measure(engine, ids, options.tokens, "off")
                found = pairs(partial(measure, engine, ids, options.tokens), options.pairs)
                engine.close()
                records.append(row(draft, n_threads, "later", found))
    loads = ", ".join(f"{load[0]:.1f}" for load in (before, os.getloadavg()))
    print(f"\nLoad before and after: {loads}; {os.cpu_count()} processors.")
    print(json.dumps({**machine(), "load": [before, os.getloadavg()], "tokens": options.tokens,
                      "prompt": options.prompt, "rows": records}))  # fmt: skip


if __name__ == "__main__":
    main()
