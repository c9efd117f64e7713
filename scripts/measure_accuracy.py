"""Measure what activation precision and cache type cost, against exact-weight arithmetic.

    python scripts/measure_accuracy.py                          # every combination, both models
    python scripts/measure_accuracy.py smollm2 --activations int8x2 --kv f16 --tokens 500

The text, its exact values (float64 over the expanded weights) and llama.cpp's own values are
recorded in `tests/vectors/real/`; the models come from `scripts/fetch_models.py`. Prints a Markdown
table (for docs/NUMERICS.md), then one line of JSON with the same numbers. The logits of the whole
text are held at once: 2000 tokens of Gemma take 2.1 GB.

Columns
-------
perplexity      exp of the mean negative log-likelihood (nll) of the text
d ppl           relative to exact arithmetic
rms d nll       root mean square over tokens of the difference in nll: noise, whatever its sign
top-1           share of positions of the text whose most likely token is the exact one
clear top-1     the same where the exact lead over the second token is at least 0.5
forced top-1    the same over the exact greedy answers to 12 prompts (48 tokens each)
s               seconds of the pass over the text (one prefill)
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from fetch_models import MODELS, sha256_of

_VECTORS = Path(__file__).resolve().parents[1] / "tests" / "vectors" / "real"
_CLEAR_MARGIN = 0.5
_ROWS_AT_ONCE = 64  # float64 copies of 64 x 262144 logits: 134 MB
_COLUMNS = (
    ("model", "model"),
    ("activations", "activations"),
    ("kv_type", "KV"),
    ("perplexity", "perplexity"),
    ("perplexity_change", "d ppl"),
    ("nll_rms_difference", "rms d nll"),
    ("top1_agreement", "top-1"),
    ("clear_top1_agreement", "clear top-1"),
    ("forced_top1_agreement", "forced top-1"),
    ("seconds", "s"),
)


def measure(name, path, activations, kv_type, n_tokens):
    """Run one combination.

    Parameters
    ----------
    name : str
        Key of `fetch_models.MODELS`.
    path : Path
        The GGUF file.
    activations : str
        "int8" or "int8x2".
    kv_type : str
        "f16" or "f32".
    n_tokens : int
        How much of the text to use, at most 2000.

    Returns
    -------
    dict
        One value per column of the table, and `n_tokens`.
    """
    import cudflash

    recorded, exact = _load(name), _load(f"{name}-exact")
    ids = recorded["ppl_ids"][:n_tokens]
    engine = cudflash.load(str(path), kv_type=kv_type, activations=activations)
    engine.logits(ids[:8])  # compiles whatever is not compiled yet
    start = time.perf_counter()
    logits = engine.logits(ids)  # (n_tokens, V)
    seconds = time.perf_counter() - start
    n = len(ids) - 1
    nll = _nll(logits[:n], ids[1:])
    agree = np.argmax(logits[:n], axis=1) == exact["ppl_top1"][:n]
    clear = exact["ppl_margin"][:n] >= _CLEAR_MARGIN
    del logits
    return {
        **_row(name, activations, kv_type, nll, exact["ppl_nll"][:n]),
        "top1_agreement": float(agree.mean()),
        "clear_top1_agreement": float(agree[clear].mean()),
        "forced_top1_agreement": _forced_agreement(engine, recorded),
        "seconds": round(seconds, 2),
    }


def exact_and_native_rows(name, n_tokens):
    """Rows of the two yardsticks: exact arithmetic, and llama.cpp's CPU on the packed file."""
    recorded, exact = _load(name), _load(f"{name}-exact")
    exact_nll = exact["ppl_nll"][: n_tokens - 1]
    native_nll = recorded["native/ppl_nll"][: n_tokens - 1]
    return [
        _row(name, "exact (float64)", "f64", exact_nll, exact_nll),
        _row(name, "llama.cpp CPU", "f32", native_nll, exact_nll),
    ]


def _row(name, activations, kv_type, nll, exact_nll):
    return {
        "model": name,
        "activations": activations,
        "kv_type": kv_type,
        "n_tokens": len(nll) + 1,
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_change": float(np.expm1(nll.mean() - exact_nll.mean())),
        "nll_rms_difference": float(np.sqrt(np.mean((nll - exact_nll) ** 2))),
    }


def _nll(logits, following):
    """Negative log-likelihood of `following` (n,) under `logits` (n, V): float64 (n,)."""
    out = np.empty(len(following))
    for first in range(0, len(following), _ROWS_AT_ONCE):
        rows = slice(first, min(first + _ROWS_AT_ONCE, len(following)))
        block = logits[rows].astype(np.float64)
        best = block.max(axis=1)
        log_sum = best + np.log(np.exp(block - best[:, None]).sum(axis=1))
        out[rows] = log_sum - block[np.arange(len(block)), following[rows]]
    return out


def _forced_agreement(engine, recorded):
    """Share of the exact greedy answers the engine would have given, each step from exact ids."""
    same = []
    for i in range(12):
        prompt, answer = recorded[f"p{i}/ids"], recorded[f"deq/p{i}/greedy_ids"]
        logits = engine.logits(np.concatenate([prompt, answer[:-1]]))
        same.append(np.argmax(logits[len(prompt) - 1 :], axis=1) == answer)
    return float(np.mean(same))


def _load(name):
    with np.load(_VECTORS / f"{name}.npz") as npz:
        return {key: npz[key] for key in npz.files}


def markdown(rows):
    """The rows as a Markdown table."""
    lines = [" | ".join(title for _, title in _COLUMNS), " | ".join("---" for _ in _COLUMNS)]
    lines += [" | ".join(_cell(key, row.get(key)) for key, _ in _COLUMNS) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(key, value):
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if key.endswith("agreement"):
        return f"{value:.2%}"
    if key == "perplexity_change":
        return f"{value:+.4%}"
    return f"{value:.2f}" if key == "seconds" else f"{value:.4f}"


def main(arguments=None):
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Accuracy against exact-weight arithmetic.")
    parser.add_argument("names", nargs="*", metavar="MODEL", help=" or ".join(MODELS))
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of GGUF files")
    parser.add_argument("--activations", nargs="+", default=["int8", "int8x2"])
    parser.add_argument("--kv", nargs="+", default=["f16", "f32"], help="cache types")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the text, 2 to 2000")
    options = parser.parse_args(arguments)
    if not 2 <= options.tokens <= 2000:
        parser.error(f"--tokens {options.tokens} is not between 2 and 2000")
    rows = []
    for name in options.names or MODELS:
        if name not in MODELS:
            parser.error(f"no model {name}; there are {' and '.join(MODELS)}")
        path = options.models / MODELS[name].file_name
        if not path.exists() or sha256_of(path) != MODELS[name].sha256:
            hint = f"run: python scripts/fetch_models.py {name}"
            print(f"error: {path} is absent or another file; {hint}", file=sys.stderr)
            return 1
        rows += exact_and_native_rows(name, options.tokens)
        for activations in options.activations:
            for kv_type in options.kv:
                print(f"{name}: {activations}, KV {kv_type} ...", file=sys.stderr, flush=True)
                rows.append(measure(name, path, activations, kv_type, options.tokens))
    print(markdown(rows))
    print(json.dumps({"benchmark": "accuracy", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
