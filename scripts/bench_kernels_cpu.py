"""Measure the packed matrix product of the CPU op set, format by format.

    python scripts/bench_kernels_cpu.py
    python scripts/bench_kernels_cpu.py --format Q4_K --format Q6_K --activations int8x2

For M = 1, 8 and 16 rows: gigabytes (1e9) of packed weights read per second, and the time against
one row, which is what verifying M rows costs. For M = 256: rows per second, which bounds prefill.
Several matrices are used in turn, together larger than a processor's second-level cache, as in a
model; the sequence is recorded once and launched as a graph, so Python is not in the figures.
Activations are quantised beforehand. The Markdown goes to stdout, one JSON line after it.
"""

import argparse
import json
import sys
import time

import numpy as np

from cudflash.bench.machine import facts as machine
from cudflash.bench.report import table
from cudflash.bench.statistics import Spread

# Where each format keeps its half-precision scales inside a block: they must be finite, while
# every other byte may be anything. Layout: ggml's ggml-common.h.
SCALE_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}
PLAIN = ("BF16", "F16", "F32")
DECODE_ROWS = (1, 8, 16)
PREFILL_ROWS = 256
MIN_SECONDS = 0.02  # a figure is the mean of as many launches as fill this


def random_raw(ggml_type, n, k, rng):
    """Return random weights in GGUF's byte layout.

    Returns
    -------
    ndarray of shape (n, row_bytes), uint8
    """
    from cudflash.loader.ggml_types import row_bytes

    name = ggml_type.name
    if name in PLAIN:
        values = rng.standard_normal((n, k), dtype=np.float32)
        if name == "BF16":
            halves = np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))
            return halves.view(np.uint8)
        return values.astype(np.float16 if name == "F16" else np.float32).view(np.uint8)
    raw = rng.integers(0, 256, (n, row_bytes(ggml_type, k)), dtype=np.uint8)
    blocks = raw.reshape(n, -1, ggml_type.type_size)
    for offset in SCALE_OFFSETS[name]:
        scales = rng.uniform(1e-3, 2e-3, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return raw


def matmul_graph(matrices, n_rows, activations, rng):
    """Record ``n_rows`` of random activations times each matrix in turn."""
    from cudflash.ops import cpu as ops

    first = matrices[0]
    x = ops.upload(rng.standard_normal((n_rows, first.k), dtype=np.float32))
    if first.layout != "f32":
        scratch = ops.quantized_rows(n_rows, first.k, first.layout, activations)
        quantized = scratch.rows(n_rows)
        ops.quantize_rows(quantized, x)
        x = quantized
    out = ops.empty((n_rows, first.n), np.float32)
    with ops.capture() as graph:
        for matrix in matrices:
            ops.matmul(out, x, matrix)
    return graph


def launch_seconds(graph):
    """Return seconds per launch, over enough launches to be above the clock's noise."""
    n, total = 0, 0.0
    while total < MIN_SECONDS:
        start = time.perf_counter()
        graph.launch()
        total += time.perf_counter() - start
        n += 1
    return total / n


def bench_format(name, activations, args):
    """Measure one format; return seconds per matrix product for each M, and the packed size."""
    from cudflash.loader.ggml_types import GGMLType

    from cudflash.ops import cpu as ops

    rng = np.random.default_rng(0)
    ggml_type = GGMLType[name]
    raw = random_raw(ggml_type, args.n, args.k, rng)
    matrices = [ops.pack(raw, ggml_type, args.k)]
    while sum(m.nbytes for m in matrices) < args.working_set_mib << 20:
        matrices.append(ops.pack(raw, ggml_type, args.k))
    graphs = {
        m: matmul_graph(matrices if m != PREFILL_ROWS else matrices[:1], m, activations, rng)
        for m in (*DECODE_ROWS, PREFILL_ROWS)
    }
    seconds = {m: [] for m in graphs}
    for graph in graphs.values():
        graph.launch()  # compiles or loads the kernel
    for _ in range(args.repeats):
        for m, graph in graphs.items():
            n_products = 1 if m == PREFILL_ROWS else len(matrices)
            seconds[m].append(launch_seconds(graph) / n_products)
    return seconds, matrices[0].nbytes


def cells(name, activations, seconds, n_bytes):
    """Return the Markdown cells of one format."""
    row = [name, activations]
    for m in DECODE_ROWS:
        row.append(Spread.of([n_bytes / s / 1e9 for s in seconds[m]]).text(1))
    for m in DECODE_ROWS[1:]:
        ratios = [s / one for s, one in zip(seconds[m], seconds[1])]
        row.append(Spread.of(ratios).text(2))
    row.append(Spread.of([PREFILL_ROWS / s for s in seconds[PREFILL_ROWS]]).text(0))
    return row


def parse(argv):
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [*SCALE_OFFSETS, *PLAIN]
    add("--format", action="append", choices=names, help="may be given more than once")
    add("--activations", action="append", choices=["int8", "int8x2"], help="default: both")
    add("--n", type=int, default=4096, help="rows of the weight matrix (outputs)")
    add("--k", type=int, default=4096, help="columns of the weight matrix, a multiple of 256")
    add("--working-set-mib", type=int, default=64, help="weights used in turn, in MiB")
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if args.k % 256 or args.k < 256 or args.n < 1 or args.repeats < 1:
        parser.error("--k must be a multiple of 256, --n and --repeats at least 1")
    args.format = args.format or names
    args.activations = args.activations or ["int8", "int8x2"]
    return args


def main(argv=None):
    """Run the benchmark; return the exit status."""
    args = parse(argv)
    from cudflash.ops import cpu as ops

    ops.set_threads(args.threads)
    facts = machine()
    header = ["format", "activations", *(f"M={m} GB/s" for m in DECODE_ROWS)]
    header += [*(f"t({m})/t(1)" for m in DECODE_ROWS[1:]), f"M={PREFILL_ROWS} rows/s"]
    rows, results = [], []
    for name in args.format:
        for activations in args.activations if name not in PLAIN else ["f32"]:
            print(f"{name} {activations}", file=sys.stderr)
            seconds, n_bytes = bench_format(name, activations, args)
            rows.append(cells(name, activations, seconds, n_bytes))
            results.append({
                "format": name, "activations": activations, "packed_bytes": n_bytes,
                "seconds": seconds,
            })
    print(f"{facts['cpu']}, {facts['cpus']} CPUs, commit {facts['commit']}")
    print(f"\n### {args.n} x {args.k}, {args.threads} threads, {args.repeats} repeats\n")
    print(table(header, rows))
    shape = {"n": args.n, "k": args.k, "threads": args.threads}
    print("\n" + json.dumps({"bench": "kernels_cpu", **facts, **shape, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
