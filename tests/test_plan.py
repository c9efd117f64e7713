"""Memory: what is planned, what is allocated, what loading costs."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import cudflash.plan
from cudflash import defaults
from cudflash.errors import UsageError
from tests.helpers import gguf_writer as w
from tests.helpers.engines import engine
from tests.helpers.vectors import TARGETS, target_case

MIB = 1 << 20


@pytest.mark.parametrize("arch, variant", TARGETS, ids=lambda value: value)
@pytest.mark.parametrize("settings", [
    {"n_ctx": 512}, {"n_ctx": 100, "kv_type": "f32", "activations": "int8x2"},
], ids=["f16-int8", "f32-int8x2"])  # fmt: skip
def test_plan_is_what_is_allocated(arch, variant, settings):
    """Catches buffers that the plan forgets, and a KV type or window it does not know: within 1 %.

    Every buffer of the engine and of a session goes through a counting allocator.
    """
    one = engine(arch, variant, **settings)
    planned = cudflash.plan.plan(target_case(arch, variant).path, **settings)
    assert planned == one.plan
    session = one.session()
    allocated = one.allocator.n_bytes + session._runner.allocator.n_bytes
    for kind, n_bytes in allocated.items():
        assert getattr(planned, kind) == pytest.approx(n_bytes, rel=0.01), kind
    assert planned.total == pytest.approx(allocated.total(), rel=0.01)
    assert sum(planned.kv_layers) == planned.kv


def test_steps_allocate_nothing():
    """Catches buffers made while decoding: plan and counters must stay as they are."""
    one = engine("gemma3")
    session = one.session()
    before = one.allocator.total + session._runner.allocator.total
    session.generate([1, 2, 3] * 60, max_tokens=20, seed=1).result()
    assert one.allocator.total + session._runner.allocator.total == before


def test_context_table_grows_only_by_what_grows():
    """Catches sliding layers planned as full ones: only full layers grow with the context."""
    planned = engine("muse-glimmer").plan
    rows = planned.contexts
    assert [row.n_ctx for row in rows] == sorted(row.n_ctx for row in rows)
    now = next(row for row in rows if row.n_ctx == planned.n_ctx)
    assert (now.kv_bytes, now.total_bytes) == (planned.kv, planned.total)
    config = engine("muse-glimmer").config
    layers = cudflash.plan.kv_bytes(config, 1 << 17, "f16", defaults.PREFILL_ROWS, 128)
    for layer, n_bytes in zip(config.layers, layers):
        row = 2 * layer.n_kv_heads * config.head_dim * 2
        slots = n_bytes // row
        if layer.window is None:
            assert slots == 1 << 17
        else:
            needed = layer.window + defaults.PREFILL_ROWS
            assert needed <= slots < needed + 128


def test_plan_refuses_what_load_refuses():
    """Catches a plan for settings that cannot be loaded."""
    path = target_case("llama", "kq").path
    for settings in ({"kv_type": "q4_0"}, {"activations": "int4"}, {"n_ctx": 0}):
        with pytest.raises(UsageError):
            cudflash.plan.plan(path, **settings)


_CHILD = """
import sys, cudflash
def read(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024
small, big = sys.argv[1:]
cudflash.load(small, device="cpu", n_ctx=64)  # compiles or reads every kernel that loading needs
open("/proc/self/clear_refs", "w").write("5")  # restart the high-water mark
before = read("VmRSS")
engine = cudflash.load(big, device="cpu", n_ctx=64)
print(read("VmHWM") - before, read("VmRSS") - before, engine.plan.weights)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_loading_does_not_hold_file_and_copy_together(tmp_path):
    """Catches pages of the file that stay resident beside the packed copy: peak is about the file.

    A 200 MB model; the allowance covers scratch, tables and one tensor in transit.
    """
    paths = [str(_model(tmp_path / "small.gguf", 1)), str(_model(tmp_path / "big.gguf", 12))]
    size = os.path.getsize(paths[1])
    assert size > 190 * MIB
    out = subprocess.run(
        [sys.executable, "-c", _CHILD, *paths], capture_output=True, text=True, check=True
    ).stdout
    peak, after, packed = map(int, out.split())
    assert packed > 0.95 * size, "the weights are the file, or the bound means nothing"
    assert peak < size + 64 * MIB, f"peak {peak / MIB:.0f} MiB for a file of {size / MIB:.0f} MiB"
    assert after < size + 64 * MIB


def _model(path, n_layers):
    """A llama with 1,024 wide layers of Q8_0 (17 MiB each): one layer's bytes, written n times."""
    hidden, ffn, vocab = 1024, 4096, 64
    b = w.GGUFBuilder().add("general.architecture", w.STRING, "llama")
    for suffix, value in (
        ("block_count", n_layers), ("context_length", 64), ("embedding_length", hidden),
        ("feed_forward_length", ffn), ("attention.head_count", 8),
    ):  # fmt: skip
        b.add(f"llama.{suffix}", w.U32, value)
    b.add("llama.attention.layer_norm_rms_epsilon", w.F32, 1e-5)
    b.add("tokenizer.ggml.model", w.STRING, "gpt2")
    b.add_array("tokenizer.ggml.tokens", w.STRING, [f"t{i}" for i in range(vocab)])
    ones = np.ones(hidden, np.float32)
    b.add_f32("output_norm.weight", ones).add_q8_0("token_embd.weight", vocab, hidden, 1)
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (hidden, hidden))
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (ffn, hidden))
    shapes["ffn_down"] = (hidden, ffn)
    layer = w.GGUFBuilder()
    for name in ("attn_norm", "ffn_norm"):
        layer.add_f32(name, ones)
    for name, shape in shapes.items():
        layer.add_q8_0(name, *shape, 1)
    for i in range(n_layers):
        for spec in layer.tensors:
            b.tensors.append(replace(spec, name=f"blk.{i}.{spec.name}.weight"))
    # why not b.write: joining the data of 200 MB tensor by tensor is quadratic
    datas = [spec.data for spec in b.tensors]
    at = 0
    for spec in b.tensors:
        spec.offset, at = at, at + len(spec.data)
        spec.data = b""
    assert all(spec.offset % b.alignment == 0 for spec in b.tensors)
    with open(path, "wb") as out:
        out.write(b.build())
        out.writelines(datas)
    return path


def test_a_hybrid_can_be_planned_for_a_gpu():
    """Catches a recurrent state that only the CPU's plan counts, and a refusal that is out of date."""
    path = target_case("qwen35", "kq").path
    card, host = (cudflash.plan.plan(path, device=device, n_ctx=256) for device in ("cuda", "cpu"))
    assert card.state == host.state > 0 and card.workspace > 0
