"""Measure the hybrid's two drafters and write the README beside its files.

    python -m scripts.train_pair.hybrid_card --work DIR

Needs cudflash and no torch. Owns every figure of that README: none is typed. Held-out prompts are
those of the embedded pair, whose corpus, split and tokenizer are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from scripts.train_pair import hybrid_export, measure, shapes
from scripts.train_pair.hybrid import OUT, ROOT

PROMPTS = ROOT / "tests/vectors/demo_pair/prompts.json"
DEPTHS = {"mtp": (1, 2, 3, 5, 7), "dflash2": (3, 7)}
TEMPERATURES = (0.0, 0.7)
TOKENS = 128

TEXT = """# A small trained hybrid

A `qwen35` target with an MTP block, {parameters} parameters in all, and a DFlash2 draft on it: the
models on which the two drafters are compared and whose acceptance the tests watch. Nothing else; its
text has the layout of Python's documentation and code, and no sense.

| file | bytes | SHA-256 |
|---|---:|---|
{files}

Target: {layers} layers x {hidden}, every {interval}th attends ({heads} heads of {head_dim}, {kv_heads}
for keys and values, {rope} dimensions rotated), the others are gated delta nets ({k_heads} key and
{v_heads} value heads of {delta}); feed-forward {ffn}; MTP block of one attention layer. Draft:
{draft_layers} layers, block {block}, window {window}, reads layers {taps} (0-based; two delta nets and
the attention layer), selector of rank {rank}. Vocabulary and tokenizer are those of the embedded
pair. llama.cpp (commit 0c1e57098bba) reads the target and drafts with its block; a greedy text of 40
tokens was the same in both programs. It does not read the draft, which taps behind the last layer.

## Data and licence

As for the embedded pair (`cudflash/demo_pair/MODEL_CARD.md`): documentation and standard library of
Python 3.11 under the PSF License Version 2, text and summary of changes in
[NOTICE-PSF.txt](NOTICE-PSF.txt), and tables made up by the trainer; the same files are held out.
The weights are under this project's licence (Apache-2.0).

## Training

    python -m scripts.train_pair.hybrid --docs DOCS --code CODE --work DIR

| | steps | CPU minutes | |
|---|---:|---:|---|
{training}

The MTP block was trained with the target as it is, {depths} passes in a row, the draft on the same
sequences as the block; all three are far from converged. The target's first 21 steps had 9 sequences
of 512 tokens, the others 5. Losses over time: `*_log.jsonl` here.

## Measured

{n_prompts} held-out natural prompts, {tokens} tokens each, CPU backend, samplers other than the
temperature at their defaults; tokens per target pass, the target's own included, and the share
accepted at each position of those that were proposed there.

| drafter, temperature, k | documentation | code | both | at positions 1, 2, 3 ... |
|---|---:|---:|---:|---|
{rows}

A model this small loops when it is greedy, and a loop is easy to draft. Share of tokens that only
continue a loop of at most 16 tokens: {loops}.
"""


def acceptance(folder, prompts):
    """Rows of the table (``measure.pooled`` of each kind and of both), and how much text loops."""
    import cudflash

    prompts = [p for p in prompts if p["kind"] in measure.NATURAL]
    target = folder / hybrid_export.FILE
    pair = cudflash.load(target, folder / hybrid_export.DRAFT_FILE, device="cpu", draft_sink=0)
    found = {}
    for name, depths in DEPTHS.items():
        for temperature in TEMPERATURES:
            for k in depths:
                results = []
                for number, prompt in enumerate(prompts):
                    drafter = pair.mtp_drafter(k) if name == "mtp" else None
                    length = min(n for n in (3, 7) if n >= k)
                    result = measure.answer(
                        pair, prompt, TOKENS, temperature, number, drafter=drafter,
                        speculative="on", verify_length=length,
                    )  # fmt: skip
                    results.append((prompt["kind"], result.speculation["counts"]))
                found[f"{name}, {temperature:g}, {k}"] = {
                    kind: measure.pooled(results, (kind,)) for kind in measure.NATURAL
                } | {"both": measure.pooled(results, measure.NATURAL)}
                print(list(found.items())[-1], flush=True)
    loops = {f"temperature {t:g}": _loops(pair, prompts, t) for t in TEMPERATURES}
    pair.close()
    return {"files": digests(), "prompts": len(prompts), "table": found, "loops": loops}


def _loops(pair, prompts, temperature):
    """Mean share of tokens of plain answers that only continue a loop."""
    shares = [
        measure.loop_share(
            measure.answer(pair, prompt, TOKENS, temperature, number, speculative="off").tokens
        )
        for number, prompt in enumerate(prompts)
    ]
    return round(sum(shares) / len(shares), 3)


def last_lines(work):
    """The last line of each training log, and the logs' names."""
    found = {}
    for name in ("target", "mtp", "dflash2"):
        path = work / f"{name}_log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        found[name] = json.loads(lines[-1])
        (OUT / path.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found


def digests():
    """SHA-256 of the files by name; written beside them as the tests read them."""
    names = (hybrid_export.FILE, hybrid_export.DRAFT_FILE)
    found = {name: hashlib.sha256((OUT / name).read_bytes()).hexdigest() for name in names}
    lines = [f"{digest}  {name}\n" for name, digest in found.items()]
    (OUT / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return found


def count(path):
    """Parameters in a GGUF file."""
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)


def card(work, found):
    """The README's text."""
    shape, draft = shapes.HYBRID, shapes.HYBRID_DFLASH2
    files = [f"| {name} | {(OUT / name).stat().st_size:,} | {digest} |"
             for name, digest in digests().items()]  # fmt: skip
    logs = last_lines(work)
    target = logs["target"]
    about = {
        "target": f"{target['tokens']:,} tokens; held out {target['bpb']} bits per byte",
        "mtp": f"loss {logs['mtp']['loss']}", "dflash2": f"{logs['dflash2']['blocks']:,} blocks",
    }  # fmt: skip
    training = [f"| {name} | {line['step']:,} | {line['cpu_s'] / 60:.1f} | {about[name]} |"
                for name, line in logs.items()]  # fmt: skip
    rows = [
        f"| {name} | " + " | ".join(f"{row[k]['acceptance_length']:.2f}" for k in ("docs", "code"))
        + f" | **{row['both']['acceptance_length']:.2f}** | "
        + ", ".join(f"{share:.2f}" for share in row["both"]["accepted_at"] if share is not None)
        + " |"
        for name, row in found["table"].items()
    ]
    loops = ", ".join(f"{share:.0%} at {name}" for name, share in found["loops"].items())
    return TEXT.format(
        parameters=f"{count(OUT / hybrid_export.FILE):,}", files="\n".join(files),
        layers=shape.n_layers, hidden=shape.hidden_dim, interval=shape.interval,
        heads=shape.n_heads, head_dim=shape.head_dim, kv_heads=shape.n_kv_heads,
        rope=shape.rope_dims, k_heads=shape.n_delta_k_heads, v_heads=shape.n_delta_v_heads,
        delta=shape.delta_dim, ffn=shape.ffn_dim, draft_layers=draft.n_layers,
        block=draft.block_size, window=draft.window, taps=", ".join(map(str, draft.taps)),
        rank=draft.selector_rank, training="\n".join(training), depths=4,
        n_prompts=found["prompts"], tokens=TOKENS, rows="\n".join(rows), loops=loops,
    )  # fmt: skip


def main():
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]
    kept = OUT / "acceptance.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if found.get("files") != digests():
        found = acceptance(OUT, prompts)
        kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (OUT / "README.md").write_text(card(args.work, found), encoding="utf-8")


if __name__ == "__main__":
    main()
