"""Made records of bench: numbers that can be checked by hand, no engine."""

from copy import deepcopy

from cudflash.bench.record import COMPLETE, SCHEMA

PLAIN_MS, TOKENS = 100.0, 11  # a plain answer: 10 decoded tokens in 100 ms
DRAFT = {
    "path": "draft.gguf", "sha256": "d" * 64, "kind": "dflash2", "block_size": 8,
    "taps": {"value": [0, 1], "source": "file", "file_value": [0, 1]},
    "window": {"value": 64, "source": "file", "file_value": 64},
    "sink": {"value": 64, "source": "absent", "file_value": None}, "full_block": True,
    "activations": "int8",
}  # fmt: skip


def counts(blocks, k=3):
    """Counters of rounds that each proposed ``k`` and accepted as many as ``blocks`` says."""
    n = len(blocks)
    accepted = sum(blocks)
    bonus = sum(block == k for block in blocks)
    return {
        "rounds": n, "draft_rounds": n, "plain_rounds": 0, "drafted": k * n,
        "tested": accepted + n - bonus, "accepted": accepted, "accepted_emitted": accepted,
        "emitted": accepted + n, "bonus": bonus, "corrected": n - bonus, "stopped": 0, "cut": 0,
        "proposed_at": [n] * k, "tested_at": [sum(b >= i for b in blocks) for i in range(k)],
        "accepted_at": [sum(b > i for b in blocks) for i in range(k)],
        "draft_ms": 2.0 * n, "verify_ms": 3.0 * n, "decide_ms": 0.5 * n, "plain_ms": 0.0,
    }  # fmt: skip


def run(lane="plain", prompt=0, repetition=0, *, ms=PLAIN_MS, blocks=None, **changes):
    """One run; ``blocks`` makes it a drafted one."""
    made = None if blocks is None else counts(blocks)
    decoded = TOKENS - 1 if made is None else made["emitted"]
    found = {
        "group": "dflash2", "lane": lane, "stop": "natural", "set": "prose", "kind": "natural",
        "depth": 0, "prompt": prompt, "index": prompt, "repetition": repetition, "order": 0,
        "prompt_tokens": 20, "cached_tokens": 0, "n_tokens": decoded + 1,
        "tokens_sha256": f"{prompt:064x}", "finish_reason": "length", "loops": False,
        "prompt_ms": 5.0, "decode_ms": ms, "decode_tokens": decoded,
        "rule": None if made is None else "match", "counts": made, "fault": None, "closings": 0,
        "exact": True,
    }  # fmt: skip
    return found | changes


def record(runs, lanes=None, draft=DRAFT, **changes):
    """A record around runs."""
    lanes = lanes or [
        {"name": "plain", "drafter": "plain", "verify_length": None, "accept": None,
         "scripted": False, "mode": None},
        {"name": "dflash2 k3", "drafter": "dflash2", "verify_length": 3, "accept": "match",
         "scripted": False, "mode": "on"},
    ]  # fmt: skip
    prompts = dict.fromkeys((r["set"], r["index"], r["depth"], r["kind"]) for r in runs)
    items = [
        {"set": s, "index": i, "depth": d, "kind": k, "note": "", "n_tokens": 20,
         "sha256": f"{i:064x}"} for s, i, d, k in prompts
    ]  # fmt: skip
    group = {
        "name": "dflash2", "lanes": lanes,
        "target": {"path": "target.gguf", "sha256": "a" * 64, "arch": "llama", "name": None},
        "draft": deepcopy(draft),
        "device": {"kind": "cpu", "name": "a processor", "reason": "only one"},
        "kernel_path": "avx2", "threads": 1, "n_ctx": 256, "kv_type": "f16",
        "activations": "int8x2", "numerics": "1", "planned_bytes": 1000,
    }  # fmt: skip
    made = {
        "schema": SCHEMA, "status": COMPLETE, "created": "2026-01-01T00:00:00Z",
        "command": "cudflash bench", "machine": {"cpu": "a processor", "cpus": 2, "system": "Linux"},
        "versions": {"cudflash": "1", "commit": "abc", "numpy": "2", "numba": "0", "python": "3"},
        "settings": {"n_tokens": 64, "repetitions": 1, "stops": ["natural"],
                     "sampling": {"temperature": 0.0}, "seed": 1},
        "prompts": {"sha256": "e" * 64, "sets": [], "items": items}, "groups": [group],
        "runs": runs, "verify_cost": [], "differences": [], "others_share": None,
    }  # fmt: skip
    return made | changes


def simple_record(ms=50.0, n=6, blocks=(3, 1, 2, 0), **changes):
    """``n`` prompts, answered plain (10 tokens in 100 ms) and drafted (10 tokens in ``ms``)."""
    runs = []
    for prompt in range(n):
        drafted = ms(prompt) if callable(ms) else ms
        runs += [run(prompt=prompt), run("dflash2 k3", prompt, ms=drafted, blocks=list(blocks))]
    return record(runs, **changes)
