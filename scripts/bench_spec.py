"""What speculation costs on the CPU: the draft pass, the verify block, the loop around them.

    python scripts/bench_spec.py models/SmolLM2-135M-Instruct.Q4_1.gguf [--repeats 9]

No trained draft exists for the small models, so the draft has random Q8_0 weights in the qualified
geometry (5 layers, 5 taps, block 16) at the target's widths: its cost is real, its acceptance is
not and is not reported. Accepted tokens come from a scripted drafter that knows the plain answer;
its speed is the ceiling that verification sets, and is labelled so. Prints Markdown tables, then
one line of JSON. Needs the ``test`` extra (gguf, to write the draft).
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_common import Spread, machine, table

import cudflash
from cudflash.drafters import Oracle
from cudflash.events import TokenEvent
from cudflash.sampling import SamplingConfig

WINDOW, SINK, BLOCK, LAYERS = 512, 64, 16, 5
CONTEXTS = (1, 4, 16)  # times the window
GREEDY = SamplingConfig(temperature=0.0)
PROMPT = "The history of the city begins with"


def write_draft(path, config, n_ctx):
    """Write a DFlash draft with random Q8_0 weights for a target."""
    import gguf

    rng = np.random.default_rng(1)
    hidden, heads, kv, d = config.hidden_dim, *_heads(config), config.head_dim
    ffn = config.layers[0].ffn_dim
    out = gguf.GGUFWriter(path, "dflash")
    out.add_block_count(LAYERS)
    out.add_context_length(n_ctx)
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(ffn)
    out.add_head_count(heads)
    out.add_head_count_kv(kv)
    out.add_key_length(d)
    out.add_value_length(d)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(d)
    out.add_sliding_window(WINDOW)
    out.add_array("dflash.attention.sliding_window_pattern", [True] * LAYERS)
    out.add_uint32("dflash.block_size", BLOCK)
    taps = np.linspace(1, config.n_layers - 2, LAYERS).astype(int)
    out.add_array("dflash.target_layers", [int(tap) + 1 for tap in taps])
    out.add_uint32("tokenizer.ggml.mask_token_id", 0)
    out.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab_size)])

    def matrix(name, n, k):
        rows = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        out.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)

    def ones(name, n):
        out.add_tensor(name, np.ones(n, np.float32))

    matrix("fc.weight", hidden, LAYERS * hidden)
    ones("enc.output_norm.weight", hidden)
    ones("output_norm.weight", hidden)
    for i in range(LAYERS):
        for name, n, k in (("attn_q", heads * d, hidden), ("attn_k", kv * d, hidden),
                           ("attn_v", kv * d, hidden), ("attn_output", hidden, heads * d),
                           ("ffn_gate", ffn, hidden), ("ffn_up", ffn, hidden),
                           ("ffn_down", hidden, ffn)):
            matrix(f"blk.{i}.{name}.weight", n, k)
        for name, n in (("attn_norm", hidden), ("ffn_norm", hidden),
                        ("attn_q_norm", d), ("attn_k_norm", d)):
            ones(f"blk.{i}.{name}.weight", n)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _heads(config):
    layer = config.layers[0]
    return layer.n_heads, layer.n_kv_heads


def draft_costs(engine, repeats):
    """Milliseconds of one draft pass (15 tokens) at 1, 4 and 16 windows of context, in turns."""
    from cudflash.model.draft_runner import DraftRunner

    taps, hidden = len(engine.draft_config.taps), engine.config.hidden_dim
    rows = engine.ops.upload(
        np.random.default_rng(0).standard_normal((256, taps, hidden)).astype(np.float32))
    runners = {}
    for times in CONTEXTS:
        # below the public API: a draft context without a conversation has no name there
        runner = DraftRunner(engine.ops, engine.draft.model, engine.draft.work)
        while runner.length < times * WINDOW:
            runner.observe(rows, min(256, times * WINDOW - runner.length))
        runner.propose(5, BLOCK - 1)
        runners[times] = runner
    found = {times: [] for times in CONTEXTS}
    for repeat in range(repeats):
        for times in CONTEXTS if repeat % 2 else CONTEXTS[::-1]:
            started = time.perf_counter()
            runners[times].propose(5, BLOCK - 1)
            found[times].append(1e3 * (time.perf_counter() - started))
    return found


def verify_costs(engine, repeats):
    """Milliseconds of a target pass of 1, 4, 8 and 16 rows with all logits, in turns."""
    runner = engine.session()._runner
    runner.prefill_chunk(list(range(10, 138)), False)
    counts = (1, 4, 8, 16)
    found = {n: [] for n in counts}
    for repeat in range(repeats + 1):
        for n in counts if repeat % 2 else counts[::-1]:
            started = time.perf_counter()
            runner.step(list(range(10, 10 + n)), "all")
            runner.rollback()
            if repeat:
                found[n].append(1e3 * (time.perf_counter() - started))
    return found


class Launches:
    """Seconds spent inside recorded passes, to tell them from the Python around them."""

    def __init__(self):
        from cudflash.ops.cpu.runtime import Graph

        self.seconds, inner = 0.0, Graph.launch

        def launch(graph):
            started = time.perf_counter()
            inner(graph)
            self.seconds += time.perf_counter() - started

        Graph.launch = launch


def loop_costs(engine, repeats, n_tokens=128):
    """Share of decoding spent outside recorded passes, and tokens per second, plain and scripted.

    Passes are recorded by an uncounted first answer of the same conversation; the clock runs from
    the first token to the last.
    """
    launches = Launches()
    ids = engine.tokenizer.encode(PROMPT)
    plain = engine.generate(ids, max_tokens=n_tokens, sampling=GREEDY, speculative="off")
    lanes = {"plain": {"speculative": "off"}}
    for length in (3, 7, 15):
        lanes[f"scripted, verify {length}"] = {"speculative": "on", "verify_length": length,
                                               "drafter": Oracle(plain.tokens)}
    sessions = {name: engine.session() for name in lanes}
    found = {name: {"overhead": [], "tps": []} for name in lanes}
    for repeat in range(repeats + 1):
        for name in lanes if repeat % 2 else reversed(list(lanes)):
            answer = sessions[name].generate(ids, max_tokens=n_tokens, sampling=GREEDY,
                                             **lanes[name])
            started = None
            for event in answer:
                if started is None and isinstance(event, TokenEvent):
                    launches.seconds, started = 0.0, time.perf_counter()
            wall = time.perf_counter() - started
            if answer.result().tokens != plain.tokens:
                raise SystemExit(f"{name}: the tokens differ from plain decoding")
            if repeat:
                found[name]["overhead"].append(100 * (wall - launches.seconds) / wall)
                found[name]["tps"].append((n_tokens - 1) / wall)
    return found


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    n_ctx = max(CONTEXTS) * WINDOW + BLOCK
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "draft.gguf"
        print("writing a random draft", file=sys.stderr)
        write_draft(path, cudflash.load(args.model).config, n_ctx)
        engine = cudflash.load(args.model, path, n_ctx=n_ctx, threads=args.threads,
                               draft_sink=SINK)
        drafts = draft_costs(engine, args.repeats)
        verify = verify_costs(engine, args.repeats)
        del engine
    loops = loop_costs(cudflash.load(args.model, threads=args.threads), args.repeats)
    print(f"### {args.model.name}, {args.threads} threads, {args.repeats} repeats\n")
    base = drafts[CONTEXTS[0]]
    print(table(["draft context, windows", "ms per draft pass", "ratio to one window"],
                [[str(t), Spread.of(v).text(2),
                  Spread.of([a / b for a, b in zip(v, base)]).text(2)]
                 for t, v in drafts.items()]))
    print()
    print(table(["verify rows", "ms", "t(M) / t(1)"],
                [[str(n), Spread.of(v).text(2),
                  Spread.of([a / b for a, b in zip(v, verify[1])]).text(2)]
                 for n, v in verify.items()]))
    print()
    print(table(["decoding", "tokens/s", "outside recorded passes, %"],
                [[name, Spread.of(v["tps"]).text(1), Spread.of(v["overhead"]).text(1)]
                 for name, v in loops.items()]))
    print(json.dumps({"bench": "spec", "model": args.model.name, "machine": machine(),
                      "draft_ms": drafts, "verify_ms": verify, "loops": loops}))


if __name__ == "__main__":
    main()
