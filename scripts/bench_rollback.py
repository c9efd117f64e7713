"""Measure the gated delta net on the CPU: its ops, and ways to keep a part of a block.

    python scripts/bench_rollback.py
    python scripts/bench_rollback.py --shape 27B --repeats 7

First table: microseconds per layer of the recurrent ops for 1, 8 and 256 rows, beside the packed
products (Q4_K) of the same layer. Second table: convolution and recurrence of one round of 8 rows of
which some are kept, under four ways to have the right state afterwards; what a way costs more than
plain is given as a share of the whole round, products and all ops included:

* plain: all rows are kept, the last state is written once. No speculation; the yardstick.
* tape: cudflash's own. The round reads the state and writes the rows' k, d and decay to a tape; the
  next round carries the state over the kept rows while it reads it.
* replay: the same tape, applied at once by a pass of its own over the state.
* history: the state after every row is written; keeping n rows picks the n-th.

Everything takes turns in one process, layers are several so that states come from beyond the
second-level cache, sequences are recorded once. A figure is the quickest of a few launches; with
one thread it is the processor time of that thread, which other work on the machine hardly changes,
with more it is elapsed time. Markdown on stdout, one JSON line after it.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass

import bench_common
import numpy as np
from bench_common import Spread
from bench_kernels_cpu import random_raw
from history_kernel import delta_rule_history

ROWS = (1, 8, 256)
BLOCK, TAPE_ROWS = 8, 16
F32 = np.float32


@dataclass(frozen=True)
class Shape:
    """One layer of a model, and how many of them are measured in turn."""

    hidden: int
    ffn: int
    n_k: int
    n_v: int
    layers: int
    d: int = 128
    taps: int = 4

    @property
    def width(self):
        """Channels of the convolution."""
        return (2 * self.n_k + self.n_v) * self.d

    def products(self):
        """(outputs, inputs) of the layer's matrices."""
        v = self.n_v * self.d
        return [(self.width, self.hidden), (v, self.hidden), (self.hidden, v),
                (self.ffn, self.hidden), (self.ffn, self.hidden), (self.hidden, self.ffn)]


SHAPES = {
    "0.6B": Shape(1024, 3584, 16, 16, layers=6),
    "27B": Shape(5120, 17408, 16, 48, layers=2),
}


class Layer:
    """Weights, state and scratch of one layer, for up to 256 rows."""

    def __init__(self, shape, rng, raw):
        from cudflash.ops import cpu as ops

        self.ops, self.shape = ops, shape
        s, d = shape, shape.d
        self.matrices = [ops.pack(raw[n, k], "Q4_K", k) for n, k in s.products()]
        self.weight = ops.upload(rng.standard_normal((s.taps, s.width)).astype(F32))
        self.norm = ops.upload(np.ones(d, F32))
        self.a = ops.upload(-rng.random(s.n_v).astype(F32))
        self.history = ops.zeros((2, s.taps - 1, s.width), F32)
        self.tape_u = ops.zeros((TAPE_ROWS, s.width), F32)
        self.states = ops.zeros((2, s.n_v, d // 16, d, 16), F32)
        self.tapes = (ops.zeros((2, TAPE_ROWS, s.n_k, d), F32),
                      ops.zeros((TAPE_ROWS, s.n_v, d), F32),
                      ops.zeros((2, TAPE_ROWS, s.n_v), F32))
        self.rows = ops.zeros((BLOCK + 1, s.n_v, d // 16, d, 16), F32)  # of the history

    def products(self, scratch, m):
        """Record the layer's packed products of m rows, quantisation of their inputs included."""
        for matrix in self.matrices:
            rows = scratch.quantized[matrix.k].rows(m)
            self.ops.quantize_rows(rows, scratch.inputs[:m, :matrix.k])
            self.ops.matmul(scratch.outputs[:m, :matrix.n], rows, matrix)

    def gates(self, scratch, m):
        """Record the gates of m rows."""
        gate = scratch.gates[:, :m]
        self.ops.delta_gates(gate[0], gate[1], gate[2], gate[3], self.a, self.a)

    def conv(self, scratch, m):
        """Record the convolution of m rows."""
        self.ops.short_conv(scratch.c[:m], scratch.u[:m], self.weight, self.history, self.tape_u,
                            scratch.plan)

    def parts(self, scratch, m):
        """(q and k together, q, k, v, out) of m rows."""
        s, split = self.shape, 2 * self.shape.n_k * self.shape.d
        qk = scratch.c[:m, :split].reshape(m, 2 * s.n_k, s.d)
        v = scratch.c[:m, split:].reshape(m, s.n_v, s.d)
        return qk, qk[:, :s.n_k], qk[:, s.n_k:], v, scratch.o[:m]

    def l2(self, scratch, m):
        """Record the norms of queries and keys of m rows."""
        qk = self.parts(scratch, m)[0]
        self.ops.l2_norm(qk, qk, 1e-6)

    def delta(self, scratch, m):
        """Record the recurrence of m rows."""
        _, q, k, v, out = self.parts(scratch, m)
        self.ops.delta_rule(out, q, k, v, scratch.gates[0, :m], scratch.gates[1, :m], 0.1,
                            self.states, *self.tapes, scratch.plan)

    def delta_history(self, scratch, m):
        """Record the recurrence of m rows with the state after every row kept."""
        _, q, k, v, out = self.parts(scratch, m)
        delta_rule_history(out, q, k, v, scratch.gates[0, :m], scratch.gates[1, :m], 0.1,
                           self.rows, scratch.kept)

    def gated_norm(self, scratch, m):
        """Record the gated norm of m rows."""
        heads, z = (t[:m].reshape(-1, self.shape.d) for t in (scratch.o, scratch.z))
        self.ops.gated_rms_norm(heads, heads, z, self.norm, 1e-6)


class Scratch:
    """Buffers that layers share."""

    def __init__(self, shape, rng):
        from cudflash.ops import cpu as ops

        s, m = shape, max(ROWS)
        widths = {k for _, k in s.products()}
        self.inputs = ops.upload(rng.standard_normal((m, max(widths))).astype(F32))
        self.outputs = ops.empty((m, max(n for n, _ in s.products())), F32)
        self.quantized = {k: ops.quantized_rows(m, k, "q256", "int8x2") for k in widths}
        self.u = ops.upload(rng.standard_normal((m, s.width)).astype(F32))
        self.c = ops.upload(rng.standard_normal((m, s.width)).astype(F32))
        self.o, self.z = (ops.upload(rng.standard_normal((m, s.n_v, s.d)).astype(F32))
                          for _ in range(2))
        self.gates = ops.upload(rng.random((4, m, s.n_v)).astype(F32))
        self.plan, self.control = ops.zeros((8,), np.int32), ops.zeros((10,), np.int32)
        self.at, self.kept = ops.zeros((1,), np.int32), ops.zeros((1,), np.int32)
        self.reset()

    def reset(self):
        """Let the state be one of position 1000 in slot 0, so that it is read, not zero."""
        self.control[:] = 0
        self.control[8:] = 1000, -1
        self.at[0] = 1000


OPS = ("products", "conv", "l2", "gates", "delta", "gated_norm")


def record(layers, scratch, m, names, block_rows=TAPE_ROWS):
    """Record some ops of all layers for m rows."""
    ops = layers[0].ops
    with ops.capture() as graph:
        ops.recurrent_open(scratch.plan, scratch.control, scratch.at, m, block_rows)
        for layer in layers:
            for name in names:
                getattr(layer, name)(scratch, m)
    return graph


def quickest(call, clock, n):
    """Seconds of the quickest of ``n`` calls."""
    times = []
    for _ in range(n):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def op_table(layers, scratch, repeats, clock):
    """Microseconds per layer of every op and row count: {(op, rows): [..]}."""
    graphs = {(name, m): record(layers, scratch, m, [name]) for name in OPS for m in ROWS}
    times = {key: [] for key in graphs}
    for graph in graphs.values():
        scratch.reset()
        graph.launch()  # compiles or loads the kernels
    for _ in range(repeats):
        for key, graph in graphs.items():
            scratch.reset()
            # the same position again and again: large blocks take it from the other slot
            n = 1 if key[1] == max(ROWS) else 5
            times[key].append(1e6 * quickest(graph.launch, clock, n) / len(layers))
    return times


class Rounds:
    """Convolution and recurrence of rounds of BLOCK rows under every strategy."""

    def __init__(self, layers, scratch, kept):
        self.scratch, self.kept, ops = scratch, kept, layers[0].ops
        self.block = record(layers, scratch, BLOCK, ["conv", "delta"])
        self.large = record(layers, scratch, BLOCK, ["conv", "delta"], block_rows=1)
        self.history = record(layers, scratch, BLOCK, ["conv", "delta_history"])
        self.forward = {}
        for target in (0, 1):
            with ops.capture() as graph:
                ops.recurrent_open(scratch.plan, scratch.control, scratch.at, 0, TAPE_ROWS, -1,
                                   target)
                for layer in layers:
                    ops.recurrent_copy(layer.history, layer.tape_u, layer.states, *layer.tapes,
                                       scratch.plan)
            self.forward[target] = graph

    def plain(self):
        """All rows kept; BLOCK positions on."""
        self.large.launch()
        self.scratch.at[0] += BLOCK

    def tape(self):
        """A tentative block; some rows are kept, which costs nothing until the next round."""
        self.block.launch()
        self.scratch.at[0] += self.kept

    def replay(self):
        """A tentative block, then the state is carried on into the other slot at once."""
        self.block.launch()
        self.scratch.at[0] += self.kept
        target = 1 - int(self.scratch.control[0])
        self.forward[target].launch()
        self.scratch.control[0] = target

    def rows(self):
        """A block that writes every state; keeping some picks one."""
        self.history.launch()
        self.scratch.kept[0] = self.kept


STRATEGIES = {"plain": "plain", "tape": "tape", "replay": "replay", "history": "rows"}


def round_table(layers, scratch, repeats, clock):
    """Microseconds per layer and round: {(strategy, rows kept): [..]}."""
    times = {}
    rounds = {kept: Rounds(layers, scratch, kept) for kept in (1, 4, BLOCK)}
    for method in STRATEGIES.values():
        scratch.reset()
        getattr(rounds[1], method)()
    for _ in range(repeats):
        for name, method in STRATEGIES.items():
            for kept, one in rounds.items():
                if name == "plain" and kept != BLOCK:
                    continue
                scratch.reset()
                call = getattr(one, method)
                call()
                times.setdefault((name, kept), []).append(
                    1e6 * quickest(call, clock, 5) / len(layers))
    return times


def memory(shape):
    """Floats per layer that each strategy holds beside one state, as KiB."""
    s = shape
    state = s.n_v * s.d * s.d + (s.taps - 1) * s.width
    tape = TAPE_ROWS * (s.width + s.n_v * s.d + 2 * (s.n_k * s.d + s.n_v))
    kib = {"plain": 0, "tape": tape, "replay": state + tape,
           "history": BLOCK * s.n_v * s.d * s.d + BLOCK * s.width}
    return {name: 4 * floats / 1024 for name, floats in kib.items()}


def measure(name, args):
    """Measure one shape and print its tables; return the figures."""
    shape, rng = SHAPES[name], np.random.default_rng(0)
    raw = {}
    for n, k in shape.products():
        if (n, k) not in raw:
            from cudflash.loader.ggml_types import GGMLType

            raw[n, k] = random_raw(GGMLType.Q4_K, n, k, rng)
    layers = [Layer(shape, rng, raw) for _ in range(shape.layers)]
    scratch = Scratch(shape, rng)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    single = op_table(layers, scratch, args.repeats, clock)
    lines = []
    for op in OPS:
        row = [op]
        for m in ROWS:
            share = Spread.of([100 * t / p for t, p in zip(single[op, m], single["products", m])])
            row += [Spread.of(single[op, m]).text(0), share.text(1)]
        lines.append(row)
    header = ["op", *(f"{m} rows, {unit}" for m in ROWS for unit in ("us", "% of products"))]
    print(f"#### {name}: hidden {shape.hidden}, {shape.n_k} key and {shape.n_v} value heads\n")
    print(bench_common.table(header, lines) + "\n")
    rounds, kib = round_table(layers, scratch, args.repeats, clock), memory(shape)
    plain, lines = rounds["plain", BLOCK], []
    whole = [sum(parts) for parts in zip(*(single[op, BLOCK] for op in OPS))]
    for (strategy, kept), times in rounds.items():
        extra = Spread.of([100 * (t - p) / w for t, p, w in zip(times, plain, whole)])
        lines.append([strategy, str(kept), Spread.of(times).text(0), extra.text(1),
                      f"{kib[strategy]:.0f}"])
    print(bench_common.table(["state", "kept of 8", "us per layer", "over plain, % of a round",
                              "KiB per layer beside one state"], lines) + "\n")
    return {"ops_us": {f"{op}/{m}": t for (op, m), t in single.items()},
            "rounds_us": {f"{s}/{n}": t for (s, n), t in rounds.items()}}


def main(argv=None):
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    from cudflash.ops import cpu as ops

    ops.set_threads(args.threads)
    facts = {"benchmark": "rollback", "threads": args.threads, **bench_common.machine()}
    print(", ".join(f"{key} {value}" for key, value in facts.items()), file=sys.stderr)
    figures = {name: measure(name, args) for name in args.shape or SHAPES}
    print(json.dumps({**facts, "shapes": figures}))


if __name__ == "__main__":
    main()
