"""Prepare the corpus: Python's documentation and library, split by file, and made-up records.

    python -m scripts.train_pair.corpus --docs DIR --code DIR --work DIR

``--docs`` is a folder of ``*.rst.txt`` sources (``library/`` of Debian's python3.11-doc package),
``--code`` the folder of the standard library (``libpython3.11-stdlib``). Writes ``train_docs.txt``,
``train_code.txt`` and ``heldout.json``, and ``corpus.json`` with what was taken.

Owns which files are held out: chosen by seed, never trained on, never seen by the tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from pathlib import Path

SEED = 20261130
HELD_OUT = 24  # files of each kind
KINDS = ("docs", "code")
# not prose or code of the library itself: tables of character sets, generated data, test suites
SKIPPED_CODE = ("test", "tests", "encodings", "pydoc_data", "idlelib", "lib2to3", "turtledemo",
                "dist-packages", "__pycache__", "site-packages", "config-3.11-x86_64-linux-gnu",
                "_sysconfigdata__linux_x86_64-linux-gnu.py",
                "_sysconfigdata__x86_64-linux-gnu.py", "ensurepip", "msilib")  # fmt: skip
LEAST_BYTES = 1500  # shorter files cannot give a prompt of four windows
HELD_OUT_BYTES = (4000, 40000)  # least and largest size of a held-out file


def find_files(docs: Path, code: Path) -> dict[str, list[Path]]:
    """List the files of each kind, sorted by path so that every machine sees one order."""
    found = {"docs": sorted(docs.rglob("*.rst.txt")), "code": sorted(code.rglob("*.py"))}
    found["code"] = [
        path for path in found["code"]
        if not set(path.relative_to(code).parts) & set(SKIPPED_CODE)
    ]  # fmt: skip
    return {
        kind: [path for path in paths if path.stat().st_size >= LEAST_BYTES]
        for kind, paths in found.items()
    }


def split(names: list[str], sizes: list[int], count: int, seed: int) -> set[str]:
    """Choose the held-out names: ``count`` of those whose size is in ``HELD_OUT_BYTES``."""
    least, most = HELD_OUT_BYTES
    fit = [name for name, size in zip(names, sizes) if least <= size <= most]
    return set(random.Random(seed).sample(fit, min(count, len(fit))))


def clean(text: str) -> str:
    """Unify line ends and drop trailing blanks, which no reader sees and a model must guess."""
    lines = text.replace("\r\n", "\n").expandtabs(8).split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def record_lines(rng: random.Random, words: list[str], n_lines: int, distance: int) -> list[str]:
    """Make up a table in which most cells repeat the cell above, exactly ``distance`` tokens back.

    Parameters
    ----------
    rng : random.Random
    words : list of str
        Words that are one token each when a blank stands before them.
    n_lines : int
    distance : int
        Tokens per line: words, separators and the line end together.

    Returns
    -------
    list of str
        Lines without line end.
    """
    # a cell is ``width`` words and a bar; bars and line end count into the distance
    width = rng.choice((2, 4, 6))
    n_cells = (distance - 2) // (width + 1)
    spare = distance - 2 - n_cells * (width + 1)
    keep = rng.uniform(0.6, 0.95)

    def cell(n):
        return [rng.choice(words) for _ in range(n)]

    widths = [width] * n_cells
    widths[-1] += spare
    cells = [cell(n) for n in widths]
    lines = []
    for _ in range(n_lines):
        cells = [old if rng.random() < keep else cell(len(old)) for old in cells]
        lines.append("| " + " | ".join(" ".join(c) for c in cells) + " |")
    return lines


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def main():
    """Split, clean, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    roots = {"docs": args.docs, "code": args.code}
    heldout, facts, seen = [], {"seed": SEED}, set()
    for number, (kind, paths) in enumerate(find_files(args.docs, args.code).items()):
        names = [str(path.relative_to(roots[kind])) for path in paths]
        kept = split(names, [p.stat().st_size for p in paths], HELD_OUT, SEED + number)
        train = []
        for name, path in zip(names, paths):
            text = clean(path.read_text(encoding="utf-8", errors="replace"))
            if name in kept:
                heldout.append({"kind": kind, "name": name, "text": text})
            elif digest(text) not in seen:  # the same file under two names
                seen.add(digest(text))
                train.append(text)
        (args.work / f"train_{kind}.json").write_text(json.dumps(train))
        facts[kind] = {
            "train_files": len(train), "train_bytes": sum(len(t.encode()) for t in train),
            "train_sha256": digest("\0".join(train)), "heldout_files": sorted(kept),
        }  # fmt: skip
    facts["heldout_bytes"] = sum(len(h["text"].encode()) for h in heldout)
    (args.work / "heldout.json").write_text(json.dumps(heldout))
    (args.work / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps({k: v for k, v in facts.items() if k not in KINDS} | {
        kind: {k: v for k, v in facts[kind].items() if k != "heldout_files"} for kind in KINDS
    }))


if __name__ == "__main__":
    main()
