"""Bits do not depend on the processor: the same ops compiled for narrower vectors."""

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from tests.helpers.delta_net import Rows, Shape, State, conv_weight
from tests.helpers.ops_checks import digest, digest_in_subprocess, poisoned


def ops_digest():
    """Digest of one call of every kind of float kernel (also run in other processes)."""
    rng = np.random.default_rng(5)

    def floats(*shape):
        return ops.upload(rng.standard_normal(shape).astype(np.float32))

    ops.set_threads(1)
    x, y, weight = floats(5, 336), floats(5, 336), floats(336)
    outs = [poisoned(x.shape) for _ in range(4)]
    ops.rms_norm(outs[0], x, weight, 1e-6)
    ops.swiglu(outs[1], x, y)
    ops.softcap(outs[2], x, 2.0)
    q, k, v = floats(5, 6, 48), floats(140, 2, 48), floats(140, 2, 48)
    positions = ops.upload(np.arange(140, dtype=np.int32))
    table = floats(140, 24, 2)
    ops.rope(q, positions[-5:], table, "interleaved", 48)
    caches = ops.kv_cache(2, 48, 256, "f16")
    ops.kv_write(*caches, k, v, positions)
    attended = poisoned(q.shape)
    ops.attention(attended, q, *caches, positions[-5:], 100, 0.2, 20.0)
    ids, values = poisoned((5, 7), np.int32), poisoned((5, 7))
    ops.top_k(ids, values, x)
    rows = ops.embedding_table(rng.integers(0, 32, (5, 144), dtype=np.uint8), "Q4_K", 256)
    embedded = poisoned((5, 256))
    ops.embed_rows(embedded, rows, ids[:, 0] % 5, 3.0)
    shape = Shape()
    delta, state = Rows.random(shape, 30), State(shape, conv_weight(shape), poison=False)
    recurrent = [*state.run(0, delta[:20]), *state.run(20, delta[20:25]), *state.run(23, delta[23:])]
    gates = [poisoned(delta.beta.shape) for _ in range(2)]
    normed = [poisoned((30, 64)), poisoned(delta.q.shape)]
    ops.delta_gates(*gates, delta.beta, delta.decay, -delta.beta[0], delta.decay[0])
    ops.gated_rms_norm(normed[0], delta.u[:, :64], delta.u[:, 64:128], delta.u[0, :64], 1e-6)
    ops.l2_norm(normed[1], delta.q, 1e-6)
    return digest(*recurrent, *gates, *normed, *outs[:3], q, *caches, attended, ids, values, embedded)


@pytest.mark.parametrize("without", ["avx512", ("avx512", "fma")])
def test_narrower_vectors_give_the_same_bits(without):
    """Catches an order that follows the register width, and a multiply-add that is not fused."""
    prefixes = (without,) if isinstance(without, str) else without
    found = digest_in_subprocess("tests.ops.test_vector_width:ops_digest",
                                 without_features=prefixes)
    assert found == ops_digest()
