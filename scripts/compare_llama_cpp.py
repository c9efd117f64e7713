"""Drafted decoding of the embedded pair here and in llama.cpp, in turns, on the same files and prompts.

    python -m scripts.compare_llama_cpp [--peer PATH] [--drafts dflash,dflash2] [--verify-length 7]
                                        [--per-kind 2] [--tokens 128] [--repeats 3] [--threads 2]

The peer is llama-speculative-simple of a llama.cpp with ``--spec-type draft-dflash``: given, or found
on PATH. Without one that is said, and only cudflash is measured. Both programs decode greedily with the
same verify length; a run is one prompt and one program, and they take turns (ABBA). Printed per prompt
and program: tokens, accepted of drafted, tokens per pass, tokens per second (median), and how much of
the text is the same: activations are rounded differently, so greedy texts part where the model is
undecided. Prints Markdown, then one line of JSON.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import cudflash
from cudflash.demo import demo_files
from scripts.bench_common import machine
from tests.helpers.demo_faults import GREEDY, N_CTX, chosen

NAME = "llama-speculative-simple"
SPEC = "draft-dflash"
ATTEMPTS = 3  # its last lines are lost now and then: they are written by a thread of their own
_NUMBERS = {
    "tokens": r"decoded\s+(\d+) tokens",
    "tps": r"decoded.*speed:\s*([\d.]+) t/s",
    "drafted": r"n_drafted\s*=\s*(\d+)",
    "accepted": r"n_accept\s*=\s*(\d+)",
}


def find_peer(path):
    """Path of a peer that knows the draft's kind, and "" or why there is none."""
    found = path or shutil.which(NAME)
    if found is None:
        return None, f"{NAME} is not on PATH; give it with --peer"
    try:
        text = subprocess.run(
            [found, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as err:
        return None, f"{found}: cannot be run ({err.strerror})"
    if SPEC not in text.stdout + text.stderr:
        return None, f"{found}: has no --spec-type {SPEC}; build a newer llama.cpp"
    return found, ""


def run_peer(peer, draft, text, options):
    """One answer of llama.cpp: dict of ``_NUMBERS`` and its text.

    Raises
    ------
    RuntimeError
        When it fails, or does not say what is expected.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text + "\n")  # it drops one
        file.flush()
        command = [
            peer, "-m", demo_files()[0], "-md", draft, "--spec-type", SPEC, "--spec-draft-n-max",
            str(options.verify_length), "-f", file.name, "-n", str(options.tokens), "--temp", "0",
            "-t", str(options.threads), "-c", str(N_CTX), "-b", str(N_CTX), "--ignore-eos",
        ]  # fmt: skip
        for _ in range(ATTEMPTS):
            run = subprocess.run(
                command, capture_output=True, timeout=options.timeout, check=False
            )
            said = run.stderr.decode("utf-8", "replace") + run.stdout.decode("utf-8", "replace")
            found = {name: re.search(pattern, said) for name, pattern in _NUMBERS.items()}
            if run.returncode or all(found.values()):
                break
    if run.returncode or not all(found.values()):
        raise RuntimeError(f"{peer}: exit code {run.returncode}, expected counts; said {said[-300:]}")
    values = {name: float(match[1]) for name, match in found.items()}
    answer = run.stdout.decode("utf-8", "replace").partition(text)[2]
    return {**values, "text": answer}


def run_own(engine, text, options):
    """One answer here, under the same names."""
    result = engine.session().generate(
        text, max_tokens=options.tokens, sampling=GREEDY, ignore_eos=True, speculative="on",
        verify_length=options.verify_length,
    ).result()  # fmt: skip
    stats = result.stats["speculative"]
    return {
        "tokens": len(result.tokens), "tps": result.stats["decode_tps"],
        "drafted": stats["drafted"], "accepted": stats["accepted"], "text": result.text,
    }  # fmt: skip


def same_start(a, b):
    """Characters at the beginning that two texts share."""
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


def compare(kind, peer, options):
    """Run every prompt in turns; rows of (prompt, program, numbers)."""
    draft = demo_files()[1][kind]
    engine = cudflash.load("demo", draft, device="cpu", n_ctx=N_CTX, threads=options.threads)
    rows = []
    for index, prompt in chosen(options.per_kind):
        text = prompt["text"].removesuffix("\n")
        sides = {"cudflash": lambda text=text: run_own(engine, text, options)}
        if peer is not None:
            sides["llama.cpp"] = lambda text=text: run_peer(peer, draft, text, options)
        run_own(engine, text, options)  # kernels are compiled here, if they must be
        runs = {name: [] for name in sides}
        for repeat in range(options.repeats):
            order = list(sides)
            for name in order if repeat % 2 else order[::-1]:
                runs[name].append(sides[name]())
        for name, of in runs.items():
            last = of[-1]
            rounds = last["tokens"] - last["accepted"]
            rows.append({
                "draft": kind, "prompt": f"{prompt['kind']} {index}", "program": name,
                "tokens": int(last["tokens"]), "drafted": int(last["drafted"]),
                "accepted": int(last["accepted"]),
                "tokens_per_pass": last["tokens"] / rounds if rounds else None,
                "tps": median(run["tps"] for run in of),
                "same_characters": same_start(runs["cudflash"][-1]["text"], last["text"]),
                "characters": len(last["text"]),
            })  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def report(rows):
    """Markdown lines."""
    lines = [
        "| draft | prompt | program | tokens | accepted of drafted | tokens per pass | tokens/s | "
        "same text |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['draft']} | {row['prompt']} | {row['program']} | {row['tokens']} | "
            f"{row['accepted']} of {row['drafted']} | {row['tokens_per_pass']:.2f} | "
            f"{row['tps']:.1f} | {row['same_characters']} of {row['characters']} |"
        )
    own = [r["tps"] for r in rows if r["program"] == "cudflash"]
    other = [r["tps"] for r in rows if r["program"] != "cudflash"]
    if other:
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        lines.append("")
        lines.append(
            f"Drafted speed, cudflash to llama.cpp: {median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) over {len(ratios)} prompts."
        )
    return lines


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help=f"Path of {NAME}.")
    parser.add_argument("--drafts", default="dflash,dflash2")
    parser.add_argument("--verify-length", type=int, default=7, choices=(3, 7, 15))
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="Seconds of one run.")
    options = parser.parse_args()
    peer, why = find_peer(options.peer)
    if peer is None:
        print(f"no peer: {why}; only cudflash is measured\n")
    rows = [r for kind in options.drafts.split(",") for r in compare(kind, peer, options)]
    print("\n".join(report(rows)))
    options.peer = Path(peer).name if peer else None  # a record tells no paths
    print(json.dumps({**machine(), "options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
