"""What the runtime asks for on models of real size, recorded without memory or a card."""

import numpy as np
import pytest

from cudflash.ops.cuda import CudaOps
from cudflash.ops.cuda.planning import PlanningDriver
from scripts import build_cubins
from scripts.device.parts import Model
from scripts.device.shapes import FULL


class Recorder(PlanningDriver):
    """Takes every call and runs nothing; what it "computes" is ones."""

    stream = upload_stream = 0

    def __init__(self):
        super().__init__()
        self.builds, self.launches = set(), []

    def function(self, file, defines, name):
        self.builds.add((file, frozenset(defines)))
        return 0

    def launch(self, launch):
        self.launches.append(launch)

    def capture(self, launches):
        return tuple(launches)

    def launch_graph(self, executable):
        self.launches += executable

    def free_graph(self, executable):
        pass

    def copy_in(self, address, array):
        pass

    def copy_within(self, to, address, n_bytes):
        pass

    def copy_out(self, array, address):
        array.reshape(-1).view(np.uint8)[:] = 0
        array.reshape(-1)[:] = 1

    def pinned(self, n_bytes):
        return 0, np.empty(n_bytes, np.uint8)

    def free_pinned(self, address):
        pass

    def event(self, timing=False):
        return 0

    def free_event(self, event):
        pass

    def wait(self, event):
        pass

    def record(self, event, stream=None):
        pass

    def upload_async(self, address, host_address, n_bytes):
        pass

    def stream_waits(self, stream, event):
        pass

    def synchronize(self):
        pass


def gated():
    """Builds that the compile gate covers; 16 slices share their inner loop with 8."""
    return {(file, frozenset(d.replace("SLICES=16", "SLICES=8") for d in defines))
            for file, defines in build_cubins.shipped()}


@pytest.mark.parametrize("shape", FULL.models, ids=lambda shape: shape.name)
def test_builds_of_real_shapes_pass_the_compile_gate(shape):
    """A kernel build that a real model needs and that nobody has compiled, or a launch that cannot
    be made at this size: a grid too large, a number past 32 bits, rows that are not aligned.
    """
    driver = Recorder()
    model = Model(CudaOps(driver), shape, 33000)
    for context in (0, 512, 32768):
        model.place(context)
        for n_rows in (1, 4, 8, 16):
            model.step(n_rows)
        if context:
            model.propose()
            model.observe()
    asked = {(file, frozenset(d.replace("SLICES=16", "SLICES=8") for d in defines))
             for file, defines in driver.builds}
    missing = asked - gated()
    assert not missing, sorted((file, sorted(defines)) for file, defines in missing)
    assert len(asked) > 15


def test_replayed_step_of_a_real_shape_moves_only_ids_and_positions():
    """Arguments that change from step to step: a graph would go on with the old ones."""
    driver = Recorder()
    model = Model(CudaOps(driver), FULL.models[0], 4096)
    model.place(100)
    starts = []
    for _ in range(3):
        before = len(driver.launches)
        model.step(1)
        starts.append([(la.name, la.grid, la.table) for la in driver.launches[before:]])
    assert starts[0] == starts[1] == starts[2] and len(starts[0]) > 52 * 10
