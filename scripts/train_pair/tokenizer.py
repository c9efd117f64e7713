"""Train the byte-level BPE and turn the corpus into token ids.

    python -m scripts.train_pair.tokenizer --work DIR [--like FILE]

With ``--like`` nothing is trained: the vocabulary is that of a GGUF file. Writes ``tokenizer.json``
(of the tokenizers package), ``vocab.json`` ({"tokens", "merges"} in GPT-2's byte alphabet, as GGUF
wants them) and ``tokens.npz`` (uint16: train and held-out ids by kind, made-up records; documents
end with the end token).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np

from scripts.train_pair import corpus, shapes

RECORD_LINES = (10, 24)  # lines of one table
RECORD_TABLES = {"train": 1500, "heldout": 60}


def train(texts):
    """Train GPT-2 style byte-level BPE on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=shapes.VOCAB,
            special_tokens=list(shapes.SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def read(path):
    """The tokenizer of a GGUF file that this trainer wrote."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def vocabulary(tokenizer) -> dict:
    """Tokens in id order and merges, as GGUF stores them."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {"tokens": tokens, "merges": merges}


def single_words(tokens: list[str]) -> list[str]:
    """Words of the vocabulary that are one token after a blank."""
    blank = "\u0120"  # how the byte alphabet writes it
    return [t[1:] for t in tokens if t[0] == blank and len(t) > 2 and t[1:].isascii()
            and t[1:].isalpha() and t[1:].islower()]  # fmt: skip


def main():
    """Train, encode, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--like", type=Path, help="a GGUF file whose tokenizer is taken")
    args = parser.parse_args()
    work = args.work
    texts = {k: json.loads((work / f"train_{k}.json").read_text()) for k in corpus.KINDS}
    if args.like is None:
        tokenizer = train(text for kind in corpus.KINDS for text in texts[kind])
    else:
        tokenizer = read(args.like)
    tokenizer.save(str(work / "tokenizer.json"))
    vocab = vocabulary(tokenizer)
    (work / "vocab.json").write_text(json.dumps(vocab))
    arrays, facts = {}, {}

    def encode(name, documents):
        parts = [e.ids + [shapes.END_TOKEN] for e in tokenizer.encode_batch(documents)]
        arrays[name] = np.concatenate([np.array(p, np.uint16) for p in parts])
        n_bytes = sum(len(d.encode()) for d in documents)
        facts[name] = {"tokens": len(arrays[name]), "bytes": n_bytes}

    heldout = json.loads((work / "heldout.json").read_text())
    for kind in corpus.KINDS:
        encode(f"train_{kind}", texts[kind])
        encode(f"heldout_{kind}", [h["text"] for h in heldout if h["kind"] == kind])
    words = single_words(vocab["tokens"])
    rng = random.Random(corpus.SEED)
    for part, n_tables in RECORD_TABLES.items():
        tables = [
            "\n".join(corpus.record_lines(rng, words, rng.randint(*RECORD_LINES),
                                          shapes.RECORD_DISTANCE)) + "\n"
            for _ in range(n_tables)
        ]  # fmt: skip
        encode(f"{part}_records", tables)
        line = tokenizer.encode(tables[0].split("\n")[1] + "\n").ids
        if len(line) != shapes.RECORD_DISTANCE:
            raise SystemExit(f"a record has {len(line)} tokens, not {shapes.RECORD_DISTANCE}")
    np.savez(work / "tokens.npz", **arrays)
    facts["words"] = len(words)
    (work / "tokens.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
