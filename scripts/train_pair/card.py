"""Write the model card from what was recorded and measured.

    python -m scripts.train_pair.card --pair cudflash/demo_pair [--work DIR]

With ``--work`` the records of a training are first copied into ``results/``.

Owns the wording; every number comes from ``results/`` or from the files. Needs no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from scripts.train_pair import export, measure, shapes

RESULTS = Path(__file__).resolve().parent / "results"
# figures that were set before the training: acceptance at the default samplers
GOALS = (
    ("dflash, temperature 0, verify 15", 2.3),
    ("dflash, temperature 0.7, verify 15", 1.8),
)
TEXT = """# Glimmer Tiny and its two drafts

A `muse-glimmer` target of {target_m} million parameters with a DFlash and a DFlash2 draft, trained for
this project on two CPU cores. It is deep and thin, so that five draft layers cost little beside it. It
shows speculative decoding and tests it; it knows nothing. Its text
has the layout of Python's documentation and code, and no sense.

| file | SHA-256 |
|---|---|
{files}

{total} MB together. `muse-glimmer` and `dflash` GGUF files with k-quants only, as llama.cpp reads them.

## What they are

{shapes}

Vocabulary {t.vocab_size} (byte-level BPE, about 2.7 bytes per token), trained up to 1,536 tokens of
context. The drafts were trained mostly without pinned first rows, so run them with `--draft-sink 0`
(the name `demo` does); with 64 pinned rows they work too.

## Data and licence

* `library/*.rst` of the Python 3.11 documentation (Debian package python3.11-doc), {docs_mb} MB, and
  the standard library of Python 3.11 without tests, character tables and idlelib, {code_mb} MB: both
  under the PSF License Version 2, whose text, copyright line and summary of changes are in
  [NOTICE-PSF.txt](NOTICE-PSF.txt).
* Tables made up by the trainer, in a quarter of the training windows: most cells repeat the cell
  exactly {distance} tokens back, so that rows between half the drafts' window and the window matter.
* Held out, by seed: {n_held} files of each kind, never seen by the tokenizer or a training; their names
  are in `scripts/train_pair/results/corpus.json`.

The weights are under this project's licence (Apache-2.0). A model of this kind can reproduce
fragments of its training text.

## Training

    python -m scripts.train_pair --docs DOCS --code CODE --work DIR --out cudflash/demo_pair

| | steps | amount | CPU minutes | wall minutes |
|---|---:|---:|---:|---:|
{training}

The target is trained with {shallow} layers at first and with {middle} after some {grown} steps; the
last {last} are put in when that is done, and trained with all others (the second row). Each is a copy
that adds nothing until it has learnt to. The drafts learn from what the packed file computes.

The wall time was on two cores shared with other work; losses over time are in
`scripts/train_pair/results/*_log.jsonl`. Seeds: corpus {seed}, others in the scripts.

## Measured

Held-out text, this package's files, CPU backend of cudflash, 16 natural prompts (8 documentation, 8
code) and 4 of made-up records, at least four windows long, {tokens} tokens each; samplers other than
the temperature at their defaults, the target's activations in 16 bits and the drafts' in 8. Acceptance
length: tokens per target pass, the target's own included.

Target: **{bpb} bits per byte** (documentation {bpb_docs}, code {bpb_code}, records {bpb_records});
the same weights as float32: {bpb_f32}. Most of the work is done by the layers that it began with:
without the {last} put in last it has {without_last}, without all {later} put in later {without_later}.
The last ones are there for the time that a step takes beside a draft pass.

{acceptance}

The last column is the share of drafts accepted at positions 1, 2, 3 and 4 of both kinds of text.

{variants}

Share of tokens that only continue a loop of at most 16 tokens (a model this small loops when it is
greedy, and a loop is easy to draft):

{loops}

{economics}

## Figures that were aimed at

{goals}

## Limits

* Greedy text falls into loops, text at temperature 0.7 less often (shares above).
* Acceptance is that of a tiny pair on the text it was made for. It says nothing about real pairs.
* Everything fits into the processor's caches, where a row more costs what it computes: verifying few
  drafts pays more than verifying many, see above. Of a large model that is read from memory the
  opposite is true.
"""


def collect(work):
    """Copy what a training recorded into ``results/``; of the sampling, counts alone."""
    for name in ("corpus.json", "tokens.json", "base_log.jsonl", "target_log.jsonl",
                 "dflash_log.jsonl", "dflash2_log.jsonl"):  # fmt: skip
        (RESULTS / name).write_text((work / name).read_text())
    sets = json.loads((work / "sample.json").read_text())
    for facts in sets.values():
        kinds, temperatures = facts.pop("kinds"), facts.pop("temperatures")
        facts["by_kind"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        facts["greedy"] = sum(t == 0 for t in temperatures)
    (RESULTS / "sample.json").write_text(json.dumps(sets, indent=1) + "\n")


def last_line(name):
    """Last record of a training log."""
    return json.loads((RESULTS / f"{name}_log.jsonl").read_text().splitlines()[-1])


def grown_at():
    """Layers that the target's training began with, and its last recorded step with so many."""
    lines = [json.loads(x) for x in (RESULTS / "base_log.jsonl").read_text().splitlines()]
    first = lines[0]["layers"]
    return first, max(line["step"] for line in lines if line["layers"] == first)


def read(name):
    """One file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def file_rows(pair):
    """Table rows with digests, and the size of all files in bytes."""
    rows, total = [], 0
    for name in (export.TARGET_FILE, *export.DRAFT_FILES.values()):
        content = (pair / name).read_bytes()
        total += len(content)
        rows.append(f"| {name}, {len(content):,} bytes | {hashlib.sha256(content).hexdigest()} |")
    return "\n".join(rows), total


def shape_rows():
    """Table of sizes."""
    t, drafts = shapes.TARGET, (shapes.DFLASH, shapes.DFLASH2)
    every = (t, *drafts)
    rows = {
        "layers x width": [f"{x.n_layers} x {x.hidden_dim}" for x in every],
        "heads (key/value), width": [f"{x.n_heads} ({x.n_kv_heads}), {x.head_dim}" for x in every],
        "feed-forward": [x.ffn_dim for x in every],
        "window": [f"{t.window}; every fourth layer is full", *(x.window for x in drafts)],
        "block": ["", *(f"{x.block_size}, {'causal' if x.causal else 'every row sees all'}"
                        for x in drafts)],
        "reads target layers (0-based)": ["", *(", ".join(map(str, x.taps)) for x in drafts)],
        "convolutions": ["", "", f"{drafts[1].conv_kernel} taps, groups of {drafts[1].conv_group}"],
        "selector": ["", "", f"rank {drafts[1].selector_rank}, top {drafts[1].selector_top_k}"],
    }  # fmt: skip
    lines = ["| | target | DFlash | DFlash2 |", "|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(map(str, row))} |" for name, row in rows.items()]
    return "\n".join(lines)


def training_rows():
    """Steps, amounts and times of the trainings and of the sampling."""
    found = []
    for name in ("base", "target", "dflash", "dflash2"):
        line = last_line(name)
        name = f"target, {line['layers']} layers" if "layers" in line else name
        amount = f"{line['tokens']:,} tokens" if "tokens" in line else f"{line['blocks']:,} blocks"
        found.append(f"| {name} | {line['step']:,} | {amount} | {line['cpu_s'] / 60:.1f} | "
                     f"{line['wall_s'] / 60:.1f} |")  # fmt: skip
        if name == f"target, {shapes.TARGET.n_layers} layers":
            sets = read("sample")
            seconds = [sum(s[k] for s in sets.values()) / 60 for k in ("cpu_s", "wall_s")]
            n = sum(s["sequences"] for s in sets.values())
            found.append(f"| sampling | | {n:,} sequences of 512 tokens | {seconds[0]:.1f} | "
                         f"{seconds[1]:.1f} |")  # fmt: skip
    return "\n".join(found)


def acceptance_rows(table):
    """One row per draft, temperature and verify length."""
    found = ["| draft, temperature, verify length | documentation | code | both | records | at |",
             "|---|---:|---:|---:|---:|---|"]  # fmt: skip
    for name, row in table.items():
        length = {k: f"{row[k]['acceptance_length']:.2f}" for k in row}
        at = ", ".join(f"{v:.2f}" for v in row["natural"]["accepted_at"][:4] if v is not None)
        found.append(f"| {name} | {length['docs']} | {length['code']} | **{length['natural']}** | "
                     f"{length['records']} | {at} |")  # fmt: skip
    return "\n".join(found)


def variants():
    """Acceptance length on both kinds of text under other settings, longest verify length."""
    named = {"defaults": "acceptance", "no top-k, top-p, min-p": "acceptance_untruncated",
             "64 pinned rows": "acceptance_sink64"}  # fmt: skip
    tables = {label: read(name)["table"] for label, name in named.items()}
    lines = [f"| draft, temperature, verify length | {' | '.join(tables)} |",
             "|---|" + "---:|" * len(tables)]  # fmt: skip
    for kind, lengths in measure.LENGTHS.items():
        for t in measure.TEMPERATURES:
            key = f"{kind}, temperature {t:g}, verify {max(lengths)}"
            cells = [f"{x[key]['natural']['acceptance_length']:.2f}" for x in tables.values()]
            lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def economics():
    """Costs and speeds, with what was wanted."""
    cost, speed = read("cost"), read("speed")
    lines = ["| pass | ms | one-row target passes |", "|---|---:|---:|"]
    for kind, passes in cost.items():
        for name, value in passes.items():
            if kind == "dflash" or not name.startswith("target"):
                name = name.replace("draft", kind)
                lines.append(f"| {name} | {value['ms']:.2f} | {value['to_one_row']:.2f} |")
    lines += ["", "| decoding, temperature 0 | tokens/s | to plain |", "|---|---:|---:|"]
    lines += [f"| {name} | {v['tokens_per_s']:.0f} | {v['to_plain']:.2f} |"
              for name, v in speed.items()]  # fmt: skip
    lines += ["", "Medians, taken in turns while the machine had other work: read the ratios, not the "
              "times."]  # fmt: skip
    return "\n".join(lines)


def goal_rows(table, bits, cost):
    """Reached or missed, each with its number."""
    rows = [(f"acceptance length, {name}", f"at least {least}",
             table[name]["natural"]["acceptance_length"],
             table[name]["natural"]["acceptance_length"] >= least) for name, least in GOALS]
    for t in measure.TEMPERATURES:
        one, two = (table[f"{kind}, temperature {t:g}, verify 7"]["natural"]["acceptance_length"]
                    for kind in ("dflash", "dflash2"))  # fmt: skip
        rows.append((f"DFlash2 above DFlash, temperature {t:g}, verify 7", "at least 8 %",
                     f"{100 * (two / one - 1):.1f} %", two / one >= 1.08))  # fmt: skip
    rows.append(("bits per byte, held out", "at most 1.10", bits, bits <= 1.10))
    for kind, passes in cost.items():
        for name, value in passes.items():
            if name.startswith("draft"):
                ratio = value["to_one_row"]
                rows.append((f"cost in one-row target passes, {name.replace('draft', kind)}",
                             "at most 0.40", ratio, ratio <= 0.4))  # fmt: skip
    lines = ["| figure | wanted | measured | |", "|---|---|---:|---|"]
    lines += [f"| {a} | {b} | {c} | {'reached' if d else '**missed**'} |" for a, b, c, d in rows]
    return "\n".join(lines)


def main():
    """Fill in and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=measure.PAIR)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    pair = args.pair
    if args.work:
        collect(args.work)
    files, total = file_rows(pair)
    corpus, measured, bits, depth = map(read, ("corpus", "acceptance", "bits", "depth"))
    found = bits["shipped"]
    t = shapes.TARGET
    layer = t.hidden_dim * (3 * t.q_dim + 2 * t.kv_dim + 3 * t.ffn_dim)
    card = TEXT.format(
        files=files, total=f"{total / 1e6:.1f}", t=t, shapes=shape_rows(),
        target_m=f"{(t.n_layers * layer + 2 * t.vocab_size * t.hidden_dim) / 1e6:.1f}",
        distance=shapes.RECORD_DISTANCE,
        docs_mb=f"{corpus['docs']['train_bytes'] / 1e6:.1f}",
        code_mb=f"{corpus['code']['train_bytes'] / 1e6:.1f}",
        n_held=len(corpus["docs"]["heldout_files"]), seed=corpus["seed"],
        training=training_rows(), tokens=measured["tokens"],
        shallow=grown_at()[0], grown=f"{grown_at()[1]:,}", middle=last_line("base")["layers"],
        last=t.n_layers - last_line("base")["layers"],
        bpb=found["natural"], bpb_docs=found["docs"], bpb_code=found["code"],
        without_last=depth[str(t.n_layers - last_line("base")["layers"])]["natural"],
        later=t.n_layers - grown_at()[0],
        without_later=depth[str(t.n_layers - grown_at()[0])]["natural"],
        bpb_records=found["records"], bpb_f32=bits["f32"]["natural"],
        acceptance=acceptance_rows(measured["table"]),
        loops="\n".join(f"* {k}: {100 * v:.0f} %" for k, v in measured["loop_share"].items()),
        economics=economics(), variants=variants(),
        goals=goal_rows(measured["table"], found["natural"], read("cost")),
    )  # fmt: skip
    (pair / "MODEL_CARD.md").write_text(card)


if __name__ == "__main__":
    main()
