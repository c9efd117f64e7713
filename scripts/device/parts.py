"""The parts of the check: each takes (device op set, CPU op set, sizes) and returns findings.

A finding is ``{"rows": [...], "faults": [sentences], "targets": [(text, met)]}``; rows are plain
dicts for the report. A part that cannot run says why under "skipped".
"""

import gc
from functools import partial

import numpy as np

from cudflash import defaults
from cudflash.model.buffers import Allocator, Workspace
from cudflash.model.draft_buffers import DraftWorkspace
from cudflash.model.draft_runner import DraftRunner
from cudflash.model.runner import ALL, LAST, Runner
from cudflash.ops.cuda.packed import PackedMatrix
from scripts.device import synthetic
from scripts.device.timing import Stopwatch, gbps, graph_ms, spread, wall_ms
from scripts.device.twins import compare, normal

KERNEL_TARGET = 0.88  # of the measured copy bandwidth, large shapes, M = 1 and 8
WIDTH_TARGETS = {8: 1.10, 16: 1.20}  # t(M) / t(1)
STEP_TARGET = 0.75  # bytes / bandwidth floor over the whole step's time
OVERHEAD_TARGET = 0.03  # loop outside kernels
DRAFT_TARGET = 0.12  # draft round over verify round
LARGE_BYTES = 50 << 20


def twins(device, cpu, sizes, few=False):
    """Every kernel's bits against its CPU twin."""
    rows = compare(device, cpu, few)
    faults = [f"{row['case']}: bits differ from the CPU's" for row in rows if not row["equal"]]
    return {"rows": rows, "faults": faults}


def copy_bandwidth(device, sizes):
    """Bytes a second of a device copy, read and written, in GB/s."""
    n = sizes.copy_bytes // 2
    a, b = device.empty((n,), np.uint8), device.zeros((n,), np.uint8)
    with Stopwatch(device.driver) as watch:
        times = [watch.ms(lambda: device.driver.copy_within(a.address, b.address, n))
                 for _ in range(7)]
    return gbps(2 * n, spread(times[1:])["median"])


def independence(device, cpu, sizes, few=False):
    """M = 16 against M = 1 on real shapes, every row; some weight rows against the CPU."""
    rows, faults = [], []
    maker = synthetic.Maker(device)
    for shape in sizes.products:
        w = maker.matrix(shape.type, shape.n, shape.k)
        x = normal((16, shape.k), 5) * np.exp(normal((16, shape.k), 6))
        whole = _product(device, w, x)
        alone = all(np.array_equal(_product(device, w, x[r:r + 1])[0].view(np.uint32),
                                   whole[r].view(np.uint32)) for r in range(16))
        raw = synthetic.random_rows(shape.type, synthetic.SEED_ROWS, shape.k)
        n = min(sizes.verified_rows, shape.n, synthetic.SEED_ROWS)
        twin = _product(cpu, cpu.pack(raw[:n].copy(), shape.type, shape.k), x)
        same = np.array_equal(twin.view(np.uint32), whole[:, :n].view(np.uint32))
        rows.append({"shape": shape.name, "type": shape.type, "k": shape.k, "n": shape.n,
                     "m16_is_m1": alone, "cpu_rows": n, "cpu_equal": same})
        name = f"{shape.name} {shape.type} ({shape.n}, {shape.k})"
        faults += [] if alone else [f"{name}: a row of 16 differs from the row alone"]
        faults += [] if same else [f"{name}: bits differ from the CPU's"]
    return {"rows": rows, "faults": faults}


def _product(ops, w, x):
    out = ops.empty((len(x), w.n), np.float32)
    xq = ops.quantized_rows(len(x), w.k, w.layout, "int8x2")
    ops.quantize_rows(xq, ops.upload(x))
    ops.matmul(out, xq, w)
    return ops.download(out)


def products(device, cpu, sizes, few=False):
    """Time of every product: GB/s and share of the copy bandwidth, for each M."""
    bandwidth = copy_bandwidth(device, sizes)
    rows, targets = [], []
    maker = synthetic.Maker(device)
    for shape in sizes.products:
        one = maker.matrix(shape.type, shape.n, shape.k)
        copies = max(1, -(-sizes.rotate_bytes // one.nbytes))
        matrices = [one, *(maker.matrix(shape.type, shape.n, shape.k) for _ in range(copies - 1))]
        first = None
        for m in sizes.rows:
            ms = _time_product(device, matrices, m) / copies
            first = ms if first is None else first
            share = gbps(one.nbytes, ms) / bandwidth
            rows.append({
                "shape": shape.name, "type": shape.type, "k": shape.k, "n": shape.n, "m": m,
                "us": 1e3 * ms, "gbps": gbps(one.nbytes, ms), "of_copy": share,
                "of_m1": ms / first})
            name = f"{shape.name} {shape.type} M={m}"
            if one.nbytes >= LARGE_BYTES and m in (1, 8):
                targets.append((f"{name}: {share:.0%} of copy bandwidth, target "
                                f"{KERNEL_TARGET:.0%}", share >= KERNEL_TARGET))
            if one.nbytes >= LARGE_BYTES and m in WIDTH_TARGETS:
                limit = WIDTH_TARGETS[m]
                targets.append((f"{name}: {ms / first:.2f} of M=1, target {limit}",
                                ms / first <= limit))
        del matrices, one
    return {"rows": rows, "faults": [], "targets": targets, "copy_gbps": bandwidth}


def _time_product(device, matrices, m):
    w = matrices[0]
    out = device.empty((m, w.n), np.float32)
    xq = device.quantized_rows(m, w.k, w.layout, "int8x2")
    device.quantize_rows(xq, device.upload(normal((m, w.k), 5)))

    def record():
        for matrix in matrices:
            device.matmul(out, xq, matrix)

    return graph_ms(device, record)["median"]


class Model:
    """A synthetic target and draft in use."""

    def __init__(self, device, shape, n_ctx, rows=16):
        self.ops, self.shape = device, shape
        maker, allocator = synthetic.Maker(device), Allocator(device)
        self.model = synthetic.target_model(maker, shape, n_ctx)
        self.work = Workspace(allocator, device, self.model.config, self.model.matrices(),
                              rows, rows, "int8x2")
        self.draft = synthetic.draft_model(maker, shape, self.model, n_ctx)
        self.draft_work = DraftWorkspace(allocator, device, self.draft, defaults.DRAFT_ACTIVATIONS)
        self.runner = Runner(device, self.model, self.work, n_ctx, "f16")
        self.runner.set_taps(shape.taps)
        self.drafter = DraftRunner(device, self.draft, self.draft_work)

    @property
    def step_bytes(self):
        """Packed weights that a step reads."""
        return sum(m.nbytes for m in self.model.matrices() if isinstance(m, PackedMatrix))

    def place(self, position):
        """Pretend that ``position`` rows are committed: zeros are as long to read as others."""
        self.runner.cache.length = self.runner.cache._frontier = position
        self.runner.tokens = [0] * position
        state = self.runner.cache.recurrent
        if state is not None:
            control = state._empty_control(2)
            control[-2] = position  # of the first slot
            self.ops.copy_in(state._control, control)
        self.drafter.context.length = position
        self.drafter.context._oldest = max(0, position - self.draft.config.window)

    def step(self, n_rows):
        """Evaluate and drop rows; waits for the outcome."""
        self.runner.step([3] * n_rows, LAST if n_rows == 1 else ALL)
        self.work.outcome.read(self.ops, n_rows)
        self.runner.rollback()

    def propose(self):
        """One draft block; waits for its tokens."""
        self.drafter.propose(3, self.draft.config.block_size - 1)

    def observe(self):
        """Context rows of a block."""
        n = self.draft.config.block_size
        self.drafter.write(self.runner.tap_rows(n), n)
        self.drafter.rollback()


def whole(device, cpu, sizes, few=False):
    """Synthetic models at several contexts: decode, verify and draft rounds, loop overhead."""
    bandwidth = copy_bandwidth(device, sizes)
    rows, targets, faults = [], [], []
    for shape in sizes.models:
        gc.collect()
        limit = max(sizes.contexts) + 64
        try:
            model = Model(device, shape, limit)
        except Exception as err:  # noqa: BLE001  (too little memory, as a rule: told, not fatal)
            rows.append({"model": shape.name, "skipped": str(err)})
            continue
        floor = model.step_bytes / bandwidth / 1e6
        for context in sizes.contexts:
            row = {"model": shape.name, "context": context, "floor_ms": floor}
            model.place(context)
            for n_rows in sorted({1, *(m for m in (4, 8, 16) if m <= shape.block)}):
                for _ in range(3):  # plain, recorded, replayed
                    model.step(n_rows)
                row[f"step_{n_rows}_ms"] = wall_ms(
                    partial(model.step, n_rows), sizes.steps)
            row["overhead"] = _overhead(model, row["step_1_ms"]["median"])
            for part in (model.propose, model.observe):
                for _ in range(3):
                    part()
                row[f"{part.__name__}_ms"] = wall_ms(part, sizes.steps)
            rows.append(row)
            _judge(shape, row, targets)
        del model
    return {"rows": rows, "faults": faults, "targets": targets, "copy_gbps": bandwidth}


def _overhead(model, wall):
    """Share of a decoding step that is spent outside the graph."""
    graph = next(g for key, g in model.runner._graphs.items() if key[0] == 1)
    with Stopwatch(model.ops.driver) as watch:
        device_ms = spread([watch.ms(graph.launch) for _ in range(7)])["median"]
    return {"device_ms": device_ms, "share": 1 - device_ms / wall}


def _judge(shape, row, targets):
    name = f"{shape.name}, context {row['context']}"
    step, share = row["step_1_ms"]["median"], row["overhead"]["share"]
    verify = row[f"step_{shape.block}_ms"]["median"]
    drafting = (row["propose_ms"]["median"] + row["observe_ms"]["median"]) / verify
    row["of_floor"], row["draft_of_verify"] = row["floor_ms"] / step, drafting
    targets += [
        (f"{name}: decode at {row['of_floor']:.0%} of the floor, target {STEP_TARGET:.0%}",
         row["of_floor"] >= STEP_TARGET),
        (f"{name}: {share:.1%} outside kernels, target {OVERHEAD_TARGET:.0%}",
         share <= OVERHEAD_TARGET),
        (f"{name}: draft round {drafting:.0%} of a verify round, target {DRAFT_TARGET:.0%}",
         drafting <= DRAFT_TARGET)]
