"""Every op on the device against its CPU twin: one function runs a case on either op set.

Shapes are small with ragged ends; the outputs are compared bit for bit and their digests go into
the report, so that two cards can be compared without the CPU.
"""

import hashlib

import numpy as np

from scripts.device.synthetic import _SCALES, random_rows


def normal(shape, seed=0, scale=1.0):
    """Random floats."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _poisoned(ops, shape, dtype=np.float32):
    out = ops.empty(shape, dtype)
    ops.copy_in(out, np.frombuffer(b"\xff" * (np.dtype(dtype).itemsize), dtype)[0])
    return out


def product(ops, name, m, n=37, k=512, activations="int8x2"):
    """Quantised rows times a packed matrix."""
    w = ops.pack(random_rows(name, n, k), name, k)
    xq = ops.quantized_rows(m, k, w.layout, activations)
    ops.quantize_rows(xq, ops.upload(normal((m, k), m) * np.exp(normal((m, k), 1))))
    out = _poisoned(ops, (m, n))
    ops.matmul(out, xq, w)
    return [out]


def float_product(ops, name, m, n=37, k=96):
    """Float rows times a float matrix."""
    dtype = {"F32": np.float32, "F16": np.float16}[name]
    raw = normal((n, k), 3).astype(dtype).view(np.uint8)
    out = _poisoned(ops, (m, n))
    ops.matmul(out, ops.upload(normal((m, k), m)), ops.pack(raw, name, k))
    return [out]


def rows(ops):
    """Norms, rotation, embedding rows, elementwise ops."""
    x, y, made = normal((5, 640), 1), normal((5, 640), 2), []
    for name in ("add", "swiglu", "geglu", "sigmoid_gate"):
        made.append(_poisoned(ops, x.shape))
        getattr(ops, name)(made[-1], ops.upload(x), ops.upload(y))
    for name, number in (("scale", 0.3), ("softcap", 30.0)):
        made.append(_poisoned(ops, x.shape))
        getattr(ops, name)(made[-1], ops.upload(x), number)
    made.append(_poisoned(ops, x.shape))
    ops.add_bias(made[-1], ops.upload(x), ops.upload(y[0]))
    made.append(_poisoned(ops, x.shape))
    ops.copy(made[-1], ops.upload(x))
    for d in (64, 640):
        made.append(_poisoned(ops, (3200 // d, d)))
        ops.rms_norm(made[-1], ops.upload(x.reshape(-1, d)), ops.upload(y.reshape(-1)[:d].copy()), 1e-6)
    for style in ("interleaved", "split_half"):
        made.append(ops.upload(x.reshape(5, 10, 64)))
        table = ops.upload(normal((9, 24, 2), 5))
        ops.rope(made[-1], ops.upload(np.array([0, 8, 3, 1, 7], np.int32)), table, style, 48)
    for name in _SCALES:
        raw = random_rows(name, 9, 512)
        made.append(_poisoned(ops, (3, 512)))
        ids = ops.upload(np.array([8, 0, 4], np.int32))
        ops.embed_rows(made[-1], ops.embedding_table(raw, name, 512), ids, 1.5)
    return made


def attention(ops, m, d=64, kv_type="f16", window=0, n_positions=300):
    """Cache rows, then attention of the newest of them."""
    cache = ops.kv_cache(2, d, 384, kv_type)
    for start in range(0, n_positions, 100):
        k, v = (ops.upload(normal((100, 2, d), seed + start)) for seed in (1, 2))
        ops.kv_write(*cache, k, v, ops.upload(np.arange(start, start + 100, dtype=np.int32)))
    out = _poisoned(ops, (m, 4, d))
    positions = ops.upload(np.arange(n_positions - m, n_positions, dtype=np.int32))
    ops.attention(out, ops.upload(normal((m, 4, d), 9)), *cache, positions, window, d**-0.5, 0.0)
    return [out, *cache]


def span(ops, d=64):
    """Draft attention over pinned rows and spans."""
    cache, sink = ops.kv_cache(2, d, 256, "f32"), ops.kv_cache(2, d, 128, "f32")
    k, v = (ops.upload(normal((200, 2, d), seed)) for seed in (1, 2))
    for pair in (cache, sink):
        first = ops.upload(np.arange(128, dtype=np.int32))
        ops.kv_write(*pair, k[:128], v[:128], first)
    ops.kv_write(*cache, k[128:], v[128:], ops.upload(np.arange(128, 200, dtype=np.int32)))
    ranges = ops.upload(np.array([[0, 200], [150, 200], [64, 190]], np.int32))
    out = _poisoned(ops, (3, 4, d))
    ops.attention_span(out, ops.upload(normal((3, 4, d), 4)), *cache, *sink, ranges,
                       ops.upload(np.array([48], np.int32)), d**-0.5, 0.0)
    return [out]


def selection(ops):
    """Argmax, top-k, finiteness, the selector, the dynamic convolution."""
    logits = normal((3, 20001), 7)
    logits[1, [5, 9000, 20000]] = 50
    x = ops.upload(logits)
    ids, flags = _poisoned(ops, (3,), np.int32), _poisoned(ops, (2,), np.int32)
    ops.argmax(ids, x)
    ops.check_finite(flags[:1], x)
    logits[2, 17] = np.nan
    ops.check_finite(flags[1:], ops.upload(logits))
    best, values = _poisoned(ops, (3, 10), np.int32), _poisoned(ops, (3, 10))
    ops.top_k(best, values, x)
    lattice = _poisoned(ops, (3, 10, 10))
    ops.selector_lattice(lattice, ops.upload(normal((3, 10, 48), 1)),
                         ops.upload(normal((3, 10, 48), 2)), ops.upload(normal((3, 48), 3)), values)
    walked = [_poisoned(ops, (3,), t) for t in (np.int32, np.int32, np.float32, np.float32)]
    ops.selector_walk(*walked, lattice, best)
    out = _poisoned(ops, (4, 256))
    ops.dynamic_conv(out, ops.upload(normal((4, 256), 1)), ops.upload(normal((4, 96), 2)),
                     ops.upload(normal((2, 3, 256), 3)), 1, 16)
    return [ids, flags, best, values, lattice, *walked, out]


def fused(ops, few=False):
    """Products of rows that a norm or a gated unit has quantised by itself."""
    made = []
    cases = [("Q4_K", 9, 768, "int8x2"), ("Q8_0", 3, 288, "int8"), ("Q6_K", 17, 256, "int8"),
             ("Q4_0", 1, 1120, "int8x2")]
    for name, m, k, activations in cases[:2] if few else cases:
        w = ops.pack(random_rows(name, 37, k), name, k)
        xq, h = ops.quantized_rows(m, k, w.layout, activations), _poisoned(ops, (m, k))
        x = ops.upload(normal((m, k), m) * np.exp(normal((m, k), 1)))
        y, weight = ops.upload(normal((m, k), 2)), ops.upload(normal(k, 3))
        spare = ops.zeros((m, k), np.float32)
        for op, args in (("norm_quantize", (h, x, weight, 1e-6, True)),
                         ("swiglu_quantize", (spare, x, y)), ("geglu_quantize", (spare, x, y)),
                         ("sigmoid_gate_quantize", (spare, x, y))):
            getattr(ops, op)(xq, *args)
            made.append(_poisoned(ops, (m, 37)))
            ops.matmul(made[-1], xq, w)
        made.append(h)
    return made


def delta_norms(ops):
    """Norms of a delta net's heads, a warp and a block a row; in place, strided, gated."""
    made = []
    for n_heads, d in ((5, 64), (16, 128), (2, 300)):
        x = ops.upload(normal((3, (n_heads + 1) * d), d) * 1e3)
        heads = x[:, d:].reshape(3, n_heads, d)
        ops.l2_norm(heads, heads, 1e-6)
        flat, z = normal((3 * n_heads, d), 1), normal((3 * n_heads, d), 2, 4.0)
        made += [x, _poisoned(ops, flat.shape)]
        ops.gated_rms_norm(made[-1], ops.upload(flat), ops.upload(z), ops.upload(normal(d, 3)), 1e-6)
    gates = [ops.upload(normal((7, 70), seed, 4.0)) for seed in (4, 5)]
    rates = [ops.upload(-np.abs(normal(70, 6))), ops.upload(normal(70, 7))]
    ops.delta_gates(*gates, *gates, *rates)
    return [*made, *gates]


# position, rows (0: a copy), target, source of passes over one recurrent state
_PASSES = ((0, 20, -1, -1), (20, 5, -1, -1), (22, 8, -1, -1), (30, 1, -1, -1), (30, 0, 2, -1),
           (30, 9, -1, -1), (30, 0, 1, 2), (30, 2, -1, -1), (31, 3, -1, -1), (0, 3, -1, -1))


def delta_state(ops, n_k=2, n_v=4, d_k=128, d_v=32, taps=4, block=8, n_slots=3):
    """Outputs and state of passes that keep all, some or none of the rows before them."""
    width = 2 * n_k * d_k + n_v * d_v
    plan, control = _poisoned(ops, (8,), np.int32), np.zeros(8 + n_slots, np.int32)
    control[8:] = -1
    control, at = ops.upload(control), ops.upload(np.zeros(1, np.int32))
    shapes = ((n_slots, taps - 1, width), (block, width), (n_slots, n_v, d_v // 16, d_k, 16),
              (2, block, n_k, d_k), (block, n_v, d_v), (2, block, n_v))
    state = [_poisoned(ops, shape) for shape in shapes]
    weight, made = ops.upload(normal((taps, width), 1)), []
    for index, (position, n, target, source) in enumerate(_PASSES):
        ops.copy_in(at, np.array([position], np.int32))
        ops.recurrent_open(plan, control, at, n, block, source, target)
        if not n:
            ops.recurrent_copy(*state, plan)
            continue
        x, out = ops.upload(normal((n, width), index)), _poisoned(ops, (n, width))
        ops.short_conv(out, x, weight, *state[:2], plan)
        split = n_k * d_k
        q, k = (out[:, i * split:(i + 1) * split].reshape(n, n_k, d_k) for i in (0, 1))
        ops.l2_norm(k, k, 1e-6)
        decay, beta = (ops.upload(1 / (1 + np.exp(normal((n, n_v), s)))) for s in (index, index + 1))
        made += [out, _poisoned(ops, (n, n_v, d_v))]
        v = out[:, 2 * split:].reshape(n, n_v, d_v)
        ops.delta_rule(made[-1], q, k, v, decay, beta, d_v**-0.5, *state[2:], plan)
    return [*made, *state, plan, control]


def cases(few=False):
    """(name, function of an op set) of every case."""
    for m in (1, 17) if few else (1, 2, 7, 8, 9, 16, 17, 40):
        for name in ("Q4_K", "Q6_K") if few else _SCALES:
            for precision in ("int8x2",) if few else ("int8", "int8x2"):
                yield (f"product {name} M={m} {precision}",
                       lambda ops, a=(name, m), p=precision: product(ops, *a, activations=p))
    for name, m in (("F16", 3), ("F32", 1)):
        yield f"product {name} M={m}", lambda ops, a=(name, m): float_product(ops, *a)
    yield "rows", rows
    for m, kv_type, window in ((1, "f16", 0), (16, "f32", 100), (20, "f16", 100)):
        yield (f"attention M={m} {kv_type} window {window}",
               lambda ops, a=(m, 64, kv_type, window): attention(ops, *a))
    yield "attention_span", span
    yield "selection", selection
    yield "fused", fused
    yield "delta norms", delta_norms
    yield "delta state", lambda ops: delta_state(ops, d_k=16 if few else 128)


def compare(device, cpu, few=False):
    """Run every case on both op sets.

    Returns
    -------
    list of dict
        ``case``, ``equal``, ``sha256`` of the device's outputs.
    """
    found = []
    for name, run in cases(few):
        theirs = [device.download(a) for a in run(device)]
        ours = [cpu.download(a) for a in run(cpu)]
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in theirs))
        equal = all(_same_bits(a, b) for a, b in zip(theirs, ours))
        found.append({"case": name, "equal": equal, "sha256": digest.hexdigest()[:16]})
    return found


def _same_bits(a, b):
    return a.dtype == b.dtype and np.array_equal(
        np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


