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


