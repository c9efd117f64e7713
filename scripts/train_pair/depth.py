"""What the layers that were put in later are worth: bits per byte with them and without.

    python -m scripts.train_pair.depth --work DIR --out scripts/train_pair/results/depth.json

A layer is left out by zeros in the norms behind its branches. Everything was trained together, so
what the others would do without it, had they been trained so, is not seen here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from scripts.train_pair import export, measure, shapes

NORMS = ("post_attention_norm", "post_ffw_norm")


def added(depths, period):
    """Layers of the deepest stack that each deepening has put in.

    Parameters
    ----------
    depths : sequence of int
        Numbers of layers, ascending.
    period : int

    Returns
    -------
    list of set of int
        One for each depth but the first.
    """
    found = []
    for shallow, deep in zip(depths, depths[1:]):
        sources = shapes.grown_from(shallow, deep, period)
        kept = {source: layer for layer, (source, silent) in enumerate(sources) if not silent}
        found = [{kept[layer] for layer in layers} for layers in found]
        found.append({layer for layer, (_, silent) in enumerate(sources) if silent})
    return found


def without(weights, layers):
    """Weights with some layers adding nothing."""
    mute = {f"layers.{layer}.{norm}" for layer in layers for norm in NORMS}
    return {k: np.zeros_like(v) if k in mute else v for k, v in weights.items()}


def main():
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from scripts.train_pair.train_target import PARTS

    depths = [n for part in PARTS["glimmer"].values() for n, _ in part.layers]
    later = added(depths, shapes.TARGET.period)
    vocab = json.loads((args.work / "vocab.json").read_text())
    weights = export.load_weights(args.work / "target.pt")
    found = {}
    for layers in (set(), later[-1], set().union(*later)):
        n = len(layers)
        with tempfile.TemporaryDirectory() as folder:
            export.write_target(Path(folder) / export.TARGET_FILE, without(weights, layers),
                                shapes.TARGET, vocab["tokens"], vocab["merges"])  # fmt: skip
            args.pair = folder
            found[str(n)] = measure.bits_of(args, "shipped")
        print(n, found[str(n)], flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
