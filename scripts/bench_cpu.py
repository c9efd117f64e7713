"""Compare cudflash with llama.cpp on this machine's CPU, in one interleaved run.

    python scripts/bench_cpu.py                                   # models in ./models, no peer
    python scripts/bench_cpu.py --peer-python peer/bin/python     # peer: llama-cpp-python
    python scripts/bench_cpu.py --llama-bench llama-bench --llama-cli llama-completion
    python scripts/bench_cpu.py --model a.gguf --model b.gguf --repeats 4

Measured per model: prefill and decode (tokens per second), decode after a long context, the time
from typing a command to its first token, and what verifying M rows costs against one. Order of the
two sides is A B B A; neither works while the other is measured. Every figure is the median of the
repeats with the lowest and highest; the ratio is taken within each neighbouring pair, above 1 means
that cudflash is faster. Prompts are random tokens from a fixed seed (dense models take the same
time for any text), continuations are greedy. Nothing is asserted.

The Markdown goes to stdout, one JSON line after it; progress goes to stderr.

A fair peer is built for this processor. Where a virtual machine shows AMX but does not keep its
state, llama.cpp's native build dies with an illegal instruction; then build it with every extension
but AMX:

    export CFLAGS="-march=native -mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    export CXXFLAGS="$CFLAGS"
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON \\
      -DGGML_BMI2=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON \\
      -DGGML_AVX512_BF16=ON -DGGML_LLAMAFILE=ON" \\
      pip install --no-binary llama-cpp-python llama-cpp-python
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bench_common
from bench_common import ForeignLoad, Spread
from bench_peers import (
    BenchPeer,
    Ours,
    PeerError,
    WorkerPeer,
    command_seconds,
    has_llama_cpp,
)
from fetch_models import MODELS

SETTLE_SECONDS = 0.25  # llama.cpp's threads spin some milliseconds after their last task
PREFILL_TOKENS = 256
DECODE_TOKENS = 64
SHORT_CONTEXT = 16
LONG_CONTEXT = 4096
N_CTX = 4352  # the long context, the continuation, and room for a verify block; 34 chunks of 128
STEPS_PER_FIGURE = 8  # a step of a small model takes a few milliseconds; their median is a figure
VERIFY_ROWS = tuple(range(1, 17))
PROMPT = "The capital of France is"


@dataclass
class Measure:
    """One line of the table: both sides' figures and what else ran meanwhile."""

    name: str
    unit: str  # "tok/s" (more is better) or "s" (less is better)
    ours: list = field(default_factory=list)
    peer: list = field(default_factory=list)
    foreign: list = field(default_factory=list)  # share of the machine used by others, per window

    def ratios(self):
        """Return cudflash's speed over the peer's, pair by pair."""
        if self.unit == "s":
            return [p / o for o, p in zip(self.ours, self.peer)]
        return [o / p for o, p in zip(self.ours, self.peer)]

    def row(self, digits):
        """Return the cells of the Markdown row."""
        peer = Spread.of(self.peer)
        ratio = Spread.of(self.ratios())
        return [
            self.name,
            self.unit,
            Spread.of(self.ours).text(digits),
            peer.text(digits) if peer else "no peer",
            ratio.text(2) if ratio else "no peer",
        ]


def random_tokens(n, vocab_size, seed, bos_id=None):
    """Return ``n`` seeded token ids away from both ends, where special tokens are."""
    rng = random.Random(seed)
    tokens = [rng.randrange(vocab_size // 8, vocab_size - vocab_size // 8) for _ in range(n)]
    if bos_id is not None:
        tokens[0] = bos_id
    return tokens


def timed(side, task, foreign):
    """Run ``task(side)`` on a quiet machine; record what others did meanwhile."""
    time.sleep(SETTLE_SECONDS)
    if side.pid is None:
        return task(side)
    with ForeignLoad(side.pid) as load:
        value = task(side)
    if load.share is not None:
        foreign.append(load.share)
    return value


def interleave(measure, ours, peer, task, repeats):
    """Fill ``measure`` with ``task(side)`` in the order A B B A, after one untimed call each.

    Parameters
    ----------
    measure : Measure
    ours, peer : side or None
    task : callable
        Takes a side, returns the figure in the unit of the measure.
    repeats : int
        Figures per side.
    """
    sides = [(ours, measure.ours)] + ([(peer, measure.peer)] if peer else [])
    for side, _ in sides:
        task(side)
    for repeat in range(repeats):
        for side, figures in sides if repeat % 2 == 0 else reversed(sides):
            figures.append(timed(side, task, measure.foreign))
        print(f"  {measure.name}: repeat {repeat + 1} of {repeats}", file=sys.stderr)
    return measure


def decode_prefix(ours, n, vocab_size, bos_id):
    """Return a random context after which the model does not end its text at once."""
    for seed in range(1, 9):
        prefix = random_tokens(n, vocab_size, seed, bos_id)
        if ours.decode(prefix, DECODE_TOKENS) is not None:
            return prefix
    raise PeerError(f"the model ends its text at once after each of 8 random contexts of {n}")


def speed_measures(ours, peer, repeats, long_context):
    """Measure prefill and decode of both sides."""
    tokenizer = ours.engine.tokenizer
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    prompt = random_tokens(PREFILL_TOKENS, tokenizer.vocab_size, 0, bos)
    yield interleave(
        Measure(f"prefill, {PREFILL_TOKENS} tokens", "tok/s"), ours, peer,
        lambda side: len(prompt) / side.prefill(prompt), repeats,
    )
    for n in (SHORT_CONTEXT, LONG_CONTEXT) if long_context else (SHORT_CONTEXT,):
        prefix = decode_prefix(ours, n, tokenizer.vocab_size, bos)
        yield interleave(
            Measure(f"decode, {DECODE_TOKENS} tokens after {n}", "tok/s"), ours, peer,
            lambda side, prefix=prefix: 1 / side.decode(prefix, DECODE_TOKENS), repeats,
        )


@dataclass(frozen=True)
class Command:
    """A command line as a side: no process of its own between measurements."""

    name: str
    command: list
    pid: None = None


def first_token_measure(path, threads, repeats, cudflash, llama_cli):
    """Measure both command lines from start to exit after one token."""
    common = ["-m", str(path), "-p", PROMPT, "-n", "1", "-c", "512", "-t", str(threads)]
    common += ["--temp", "0"]
    ours = Command("cudflash", [str(cudflash), "generate", *common])
    peer = None
    if llama_cli:
        peer = Command(
            "llama.cpp", [str(llama_cli), *common, "-no-cnv", "--no-display-prompt"]
        )
    return interleave(
        Measure("command to first token", "s"), ours, peer,
        lambda side: command_seconds(side.command), repeats,
    )


def verify_costs(ours, repeats):
    """Return seconds per verify step for each row count, row counts in turn within a repeat."""
    step_seconds = ours.step_timer(SHORT_CONTEXT, ours.engine.tokenizer.vocab_size)
    costs = {m: [] for m in VERIFY_ROWS}
    for m in VERIFY_ROWS:
        step_seconds(m)  # records the pass
    for repeat in range(repeats):
        for m in VERIFY_ROWS if repeat % 2 == 0 else reversed(VERIFY_ROWS):
            steps = [step_seconds(m) for _ in range(STEPS_PER_FIGURE)]
            costs[m].append(statistics.median(steps))
    return costs


def verify_table(costs):
    """Return the Markdown table of verify costs: milliseconds and ratio to one row."""
    rows = []
    for m, seconds in costs.items():
        ratio = Spread.of([s / one for s, one in zip(seconds, costs[1])])
        milliseconds = Spread.of([s * 1e3 for s in seconds])
        rows.append([str(m), milliseconds.text(2), ratio.text(2)])
    return bench_common.table(["rows M", "ms per step", "t(M) / t(1)"], rows)


def open_peer(args, path):
    """Start the peer the arguments ask for, or return None."""
    if args.no_peer:
        return None
    if args.peer_python or (not args.llama_bench and has_llama_cpp(sys.executable)):
        python = args.peer_python or sys.executable
        return WorkerPeer(python, path, args.threads, N_CTX, args.peer_flash_attn)
    if args.llama_bench:
        return BenchPeer(args.llama_bench, path, args.threads, args.peer_flash_attn)
    return None


def bench_model(path, args):
    """Measure one model, print its tables, return its part of the JSON line."""
    print(f"{path.name}: loading", file=sys.stderr)
    ours = Ours(str(path), args.threads, N_CTX)
    how, peer, measures, costs = ours.settings(), None, [], {}
    if not args.first_token_only:
        peer = open_peer(args, path)
        try:
            measures = list(speed_measures(ours, peer, args.repeats, not args.no_long_context))
        finally:
            if peer:
                peer.close()
        costs = verify_costs(ours, args.repeats)
    del ours  # its worker threads and memory would disturb the commands
    measures.append(
        first_token_measure(path, args.threads, args.repeats, args.cudflash, args.llama_cli)
    )

    print(f"\n### {path.name}, {args.threads} threads, {args.repeats} repeats\n")
    header = ["measure", "unit", "cudflash", "llama.cpp", "ratio"]
    print(bench_common.table(header, [m.row(3 if m.unit == "s" else 1) for m in measures]))
    foreign = Spread.of([share for m in measures for share in m.foreign])
    if foreign:
        print(
            f"\nMedian (lowest–highest). While one side was measured, everything else used "
            f"{100 * foreign.median:.1f} % of the machine (median), {100 * foreign.high:.1f} % "
            "at most."
        )
    if costs:
        print("\nVerifying M rows at once (cudflash):\n")
        print(verify_table(costs))
    return {
        "model": path.name,
        "sha256": bench_common.sha256(path),
        **how,
        "peer": peer.facts if peer else None,
        "measures": [asdict(m) for m in measures],
        "verify_seconds": costs,
    }


def parse(argv):
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", action="append", type=Path, help="GGUF file; may be given more than once")
    add("--models-dir", type=Path, default=Path("models"), help="where the small models are")
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=6, help="figures per side; even, so that A B B A closes")
    add("--peer-python", type=Path, help="a Python that can import llama_cpp")
    add("--peer-flash-attn", choices=["auto", "on", "off"], default="auto",
        help="llama.cpp's default is auto, which means on; off can be faster after long contexts")
    add("--llama-bench", type=Path, help="peer for speeds when there is no --peer-python")
    add("--llama-cli", type=Path, help="llama-completion, for the time to the first token")
    add("--cudflash", type=Path, default=Path(sys.executable).with_name("cudflash"))
    add("--no-peer", action="store_true", help="measure cudflash alone")
    add("--first-token-only", action="store_true", help="measure the two command lines only")
    add("--no-long-context", action="store_true", help="skip decode after the long context")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if not args.model:
        args.model = [args.models_dir / model.file_name for model in MODELS.values()]
        args.model = [path for path in args.model if path.exists()]
        if not args.model:
            parser.error(
                f"no model in {args.models_dir}: run python scripts/fetch_models.py, "
                "or give --model FILE.gguf"
            )
    for path in args.model:
        if not path.exists():
            parser.error(f"{path} does not exist: give the path of a GGUF file")
    return args


def main(argv=None):
    """Run the benchmark; return the exit status."""
    args = parse(argv)
    facts = bench_common.machine()
    print(f"{facts['cpu']}, {facts['cpus']} CPUs, commit {facts['commit']}")
    try:
        models = [bench_model(path, args) for path in args.model]
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record = {
        "bench": "cpu", **facts, "threads": args.threads,
        "peer_flash_attn": args.peer_flash_attn, "models": models,
    }
    print("\n" + json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
