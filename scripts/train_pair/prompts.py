"""Cut the held-out prompts that the tests and the measurement use.

    python -m scripts.train_pair.prompts --work DIR --out tests/vectors/demo_pair/prompts.json

Every prompt comes from a file that neither the tokenizer nor a training saw, starts at a line,
and is at least four draft windows long.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from scripts.train_pair import corpus, shapes, tokenizer

SEED = 5
COUNTS = {"docs": 8, "code": 8, "records": 4}
TOKENS = (4 * shapes.DFLASH.window + 16, 6 * shapes.DFLASH.window)
PROVENANCE = (
    "Cut from files of the Python 3.11 documentation (library/*.rst, Debian python3.11-doc) and of "
    "the Python 3.11 standard library, both under the PSF License Version 2, copyright the Python "
    "Software Foundation; no file was trained on. Kind records is made up by the trainer. "
    "Written by scripts/train_pair/prompts.py."
)


def cut(rng, text, encode, tokens):
    """Cut whole lines of a text, about as long as wanted, or return None where it is too short.

    Parameters
    ----------
    rng : random.Random
    text : str
    encode : callable
        str -> list of ids.
    tokens : (int, int)
        Least and most.
    """
    lines = text.splitlines(keepends=True)
    for _ in range(20):
        start = rng.randrange(max(1, len(lines) * 2 // 3))
        if not lines[start].strip():
            continue
        part, size = "", 0
        for line in lines[start:]:
            size += len(encode(line))
            if size > tokens[1]:
                break
            part += line
        if tokens[0] <= len(encode(part)) <= tokens[1]:
            return part
    return None


def main():
    """Cut and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=1, help="multiple of the counts, for measuring")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    bpe = Tokenizer.from_file(str(args.work / "tokenizer.json"))

    def encode(text):
        return bpe.encode(text).ids

    heldout = json.loads((args.work / "heldout.json").read_text())
    words = tokenizer.single_words(json.loads((args.work / "vocab.json").read_text())["tokens"])
    rng, found = random.Random(SEED), []
    for kind in corpus.KINDS:
        files = sorted((h for h in heldout if h["kind"] == kind), key=lambda h: h["name"])
        rng.shuffle(files)
        wanted = COUNTS[kind] * args.times
        for file in files * args.times:
            part = cut(rng, file["text"], encode, TOKENS)
            if part and sum(p["kind"] == kind for p in found) < wanted:
                found.append({"kind": kind, "source": file["name"], "text": part})
    for number in range(COUNTS["records"] * args.times):
        lines = corpus.record_lines(rng, words, 6, shapes.RECORD_DISTANCE)
        found.append({"kind": "records", "source": f"table {number}", "text": "\n".join(lines)
                      + "\n"})  # fmt: skip
    for prompt in found:
        prompt["n_tokens"] = len(encode(prompt["text"]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"provenance": PROVENANCE, "window": shapes.DFLASH.window, "prompts": found}
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    print({kind: sum(p["kind"] == kind for p in found) for kind in COUNTS})


if __name__ == "__main__":
    main()
