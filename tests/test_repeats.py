"""Layers that are recorded as copies: word for word what recording them would have given."""

from unittest import mock

import numpy as np
import pytest

import cudflash
from cudflash.model.repeats import buffers_of
from cudflash.model.runner import ALL, LAST, NONE, Runner
from cudflash.ops import cpu
from tests.helpers.engines import engine
from tests.helpers.hybrid_model import hybrid_engine
from tests.helpers.vectors import ARCHES

ENGINES = {arch: lambda arch=arch: engine(arch) for arch in ARCHES} | {
    "legacy formats": lambda: engine("llama", "leg"), "floats": lambda: engine("qwen35", "f32"),
    "hybrid": hybrid_engine,
}
PASSES = [(1, LAST, ()), (1, ALL, (0, 1)), (3, ALL, ()), (8, ALL, (1,)), (12, NONE, ())]


def launches(graph):
    """All that a launch consists of."""
    return [
        (op.kernel.name, op.keep[0].tolist(), op.spans.tolist(), op.n_reads, op.touched, op.rows)
        for op in graph.ops(0, len(graph))
    ]


def recorded(runner, key, copies):
    """A pass recorded with or without copies, and how many layers were copied."""
    done = []

    def repeat(*args):
        done.append(copies and real(*args))
        return done[-1]

    real = cpu.repeat
    with mock.patch.object(cpu, "repeat", repeat):
        graph = runner._record(key)
    return launches(graph), sum(done)


def high(*owners):
    """Whether addresses can be told from sizes: not all where the heap lies below 4 GiB."""
    arrays = [part for part in buffers_of(*owners) if isinstance(part, np.ndarray)]
    return all(array.ctypes.data >= 1 << 32 for array in arrays)


@pytest.mark.parametrize("name", ENGINES)
def test_copied_layers_are_what_recording_gives(name):
    """An address that stays or is moved too far: a layer that runs on the weights or the cache of
    another one."""
    one = ENGINES[name]()
    runner = Runner(one.ops, one.model, one.work, 400, one.kv_type)
    copied = 0
    for n_rows, which, taps in PASSES:
        runner.set_taps(taps)
        key = (n_rows, which, which != NONE, taps, 0, None)
        expected, none = recorded(runner, key, False)
        found, n = recorded(runner, key, True)
        assert found == expected and none == 0
        copied += n
    alike = len(set(one.model.config.layers)) < len(one.model.layers)
    assert copied or not alike or not high(*one.model.layers)


def test_most_layers_of_the_embedded_target_are_copied():
    """Copies that are declined without need: ``auto`` would have to pay for recording again."""
    with cudflash.load("demo", device="cpu", n_ctx=256) as one:
        runner = Runner(one.ops, one.model, one.work, 256, one.kv_type)
        taps = (0, 5, len(one.model.layers) - 1)
        runner.set_taps(taps)
        key = (4, ALL, True, taps, 0, None)
        expected, _ = recorded(runner, key, False)
        found, n = recorded(runner, key, True)
        assert found == expected
        # two kinds: a sliding and a full one
        assert n == len(one.model.layers) - 2 or not high(*one.model.layers)


@pytest.mark.parametrize("sink", [0, 64])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_copied_layers_of_a_draft_are_what_recording_gives(kind, sink):
    """As above, for a draft: its convolutions, its ring and its pinned rows."""
    from cudflash.model.draft_runner import DraftRunner

    with cudflash.load("demo", f"demo:{kind}", device="cpu", n_ctx=256, draft_sink=sink) as one:
        draft = DraftRunner(one.ops, one.draft.model, one.draft.work)
        n = one.draft_config.block_size
        for key in (("context", 1), ("context", 8), ("block", n, n - 1), ("block", 4, 3)):
            expected, _ = recorded(draft, key, False)
            found, copied = recorded(draft, key, True)
            layers = one.draft.model.layers
            assert found == expected and (copied == len(layers) - 1 or not high(*layers))


def test_buffers_of_takes_everything_apart():
    """A buffer that is overlooked: its address would stay in the copies."""
    one = hybrid_engine()
    runner = Runner(one.ops, one.model, one.work, 64, one.kv_type)
    for layer, cache in zip(one.model.layers, runner.cache.layers):
        found = buffers_of(layer, cache)
        assert not any(isinstance(part, (tuple, list, dict)) for part in found)
        arrays = [part for part in found if isinstance(part, np.ndarray)]
        assert len({array.ctypes.data for array in arrays}) > 5
