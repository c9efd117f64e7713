"""The emulator itself: what it accepts, and that each seeded fault is found and named."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.emulation.host_module import (
    HERE,
    HostModule,
    LaunchError,
    aligned,
    counting,
    unavailable,
)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

FAULTS = HERE / "faults.cu"
SCHEDULES = [("in order", 0), ("reverse", 0), *(("random", seed) for seed in (1, 2, 3))]
# fault -> what the report says; these need no checking mode
ALWAYS = {
    "divergent_shuffle": "deadlock|has returned",
    "shuffle_outside_mask": "reads lane",
    "shuffle_after_return": "has returned|deadlock",
    "barrier_in_a_branch": "__syncthreads",
    "barrier_at_two_places": "divergent __syncthreads",
    "barrier_after_return": "__syncthreads",
}
CHECKED = {
    "missing_barrier": "race|unwritten",
    "missing_second_barrier": "race",
    "missing_syncwarp": "race|unwritten",
    "unwritten_shared": "read of unwritten shared memory at faults.cu:",
    "shared_past_the_end": "out of bounds",
    "global_read_past_the_end": "global read of 4 bytes out of bounds at faults.cu:",
    "global_write_past_the_end": "global write of 4 bytes out of bounds at faults.cu:",
    "misaligned": "misaligned access at faults.cu:",
    "two_blocks_one_address": "race between blocks",
}


def launch(name, mode="fast", schedule="in order", seed=0, grid=(1,)):
    """Run one kernel of faults.cu on 0 .. 63; returns the array."""
    a = aligned((64,), np.float32, np.arange(64))
    kernel = HostModule(FAULTS, mode=mode).get_function(name)
    kernel(grid, (64,), (a, np.int32(0)), schedule=schedule, seed=seed)
    return a


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("schedule,seed", SCHEDULES)
def test_correct_kernel_passes_in_every_schedule(mode, schedule, seed):
    """An emulator that reports faults where there are none, or computes another result."""
    mirrored = 63 - np.arange(64)
    expected = mirrored + mirrored[np.arange(64) ^ 1]
    assert np.array_equal(launch("correct", mode, schedule, seed), expected)


@pytest.mark.parametrize("schedule,seed", SCHEDULES)
@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_divergence_is_reported_in_every_schedule(name, schedule, seed):
    """A kernel that would hang or give garbage on the card and passes its tests here."""
    with pytest.raises(LaunchError, match=ALWAYS[name]):
        launch(name, schedule=schedule, seed=seed)


@pytest.mark.parametrize("schedule,seed", SCHEDULES[:3])
@pytest.mark.parametrize("name", sorted(CHECKED))
def test_memory_fault_is_reported_by_the_checking_mode(name, schedule, seed):
    """A race or a bad access that happens to give the right numbers."""
    with pytest.raises(LaunchError, match=CHECKED[name]):
        launch(name, "check", schedule, seed, grid=(2,) if "blocks" in name else (1,))


# kernel -> (space, direction, bytes) -> (requests, cost, least); worked out by hand
COUNTED = {
    "correct": {("global", "read", 4): (2, 8, 8), ("global", "write", 4): (2, 8, 8),
                ("shared", "read", 4): (2, 2, 2), ("shared", "write", 4): (2, 2, 2)},
    "strided_read": {("global", "read", 4): (1, 8, 4), ("global", "write", 4): (2, 8, 8)},
    "read_off_by_a_sector": {("global", "read", 4): (1, 5, 4), ("global", "write", 4): (2, 8, 8)},
    "bank_conflict": {("global", "read", 4): (1, 4, 4), ("global", "write", 4): (2, 8, 8),
                      ("shared", "write", 4): (1, 32, 1), ("shared", "read", 4): (2, 64, 2)},
}


@pytest.mark.parametrize("schedule,seed", SCHEDULES[:3])
@pytest.mark.parametrize("name", sorted(COUNTED))
def test_cost_of_accesses_is_counted(name, schedule, seed):
    """A scattered load, a row that begins inside a sector, a bank conflict that stays unseen."""
    with counting() as found:
        launch(name, "check", schedule, seed)
    totals = {}
    for access, numbers in found.items():
        assert access.kernel == name and access.line.startswith("faults.cu:")
        key = access.space, access.direction, access.n_bytes
        totals[key] = tuple(a + b for a, b in zip(totals.get(key, (0, 0, 0)), numbers))
    assert totals == COUNTED[name]


def test_conflicts_of_wide_accesses_are_counted_by_quarter_warps():
    """16-byte accesses counted as if 32 lanes went at once: a conflict everywhere."""
    with counting() as found:
        launch("bank_conflict_of_16_bytes", "check")
    reads = {(a.n_bytes, *n) for a, n in found.items() if (a.space, a.direction) == ("shared", "read")}
    writes = [n for a, n in found.items() if (a.space, a.direction) == ("shared", "write")]
    assert any(cost > least for _, _, cost, least in reads)
    assert all(cost == least for n_bytes, cost, least in [(16, n[1], n[2]) for n in writes])


def test_nothing_is_counted_outside_and_every_launch_inside_is_added():
    """Counts of another kernel or of an earlier launch."""
    with counting() as found:
        launch("strided_read", "check")
        launch("strided_read", "check")
    launch("strided_read", "check")
    assert sorted(found.values()) == [(2, 16, 8), (4, 16, 16)]


@pytest.mark.parametrize("name", ["missing_barrier", "unwritten_shared"])
def test_poison_shows_unwritten_shared_memory_without_the_checker(name):
    """Shared memory that happens to hold the last launch's values hides a missing barrier."""
    launch("correct")
    wrong = [not np.array_equal(launch(name, schedule=s), launch(name, schedule=s))
             or np.isnan(launch(name, schedule=s)).any() for s in ("in order", "reverse")]
    assert any(wrong)


def test_undefined_behaviour_stops_the_process():
    """A shift or an overflow that this processor and the card resolve differently."""
    code = ("from tests.emulation.test_emulator import launch\n"
            "launch('shift_too_far', 'undefined')")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], capture_output=True,
                          check=False)
    assert done.returncode < 0


def test_arithmetic_flushes_subnormals_and_does_not_contract():
    """Floats that follow g++'s defaults instead of the contract."""
    a = aligned((64,), np.float32, 0)
    a[1], a[2], a[3] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), -1
    a[6], a[7], a[9] = 1e-20, 1e-20, np.float32(1e-40)
    HostModule(FAULTS).get_function("products")((1,), (1,), (a, np.int32(0)))
    assert a[0] == np.float32(a[1] * a[2]) - np.float32(1)
    assert a[4] == np.float32(2**-11 + 2**-24)
    assert a[5] == 0 and a[8] == 0
    assert np.float32(1e-20) * np.float32(1e-20) != 0  # the mode was restored


def test_argument_of_the_wrong_type_is_refused():
    """A Python float where the kernel takes 4 bytes: CuPy would pass 8 of them."""
    kernel = HostModule(FAULTS).get_function("correct")
    a = aligned((64,), np.float32)
    for args in ((a,), (a, 0), (a, np.float32(0)), (a[::2], np.int32(0)), (3, np.int32(0))):
        with pytest.raises(TypeError, match="correct"):
            kernel((1,), (64,), args)


def test_build_is_reused_until_a_source_changes(tmp_path, monkeypatch):
    """A stale library: the test then runs yesterday's kernel."""
    monkeypatch.setenv("CUDFLASH_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "k.cu"
    text = 'extern "C" __global__ void k(int* a) { a[0] = VALUE + %d; }\n'
    found = []
    for offset, value in ((1, 5), (1, 5), (2, 5), (2, 6)):
        source.write_text(text % offset)
        a = aligned((1,), np.int32)
        module = HostModule(source, (f"VALUE={value}",))
        module.get_function("k")((1,), (1,), (a,))
        found.append((int(a[0]), module._file))
    assert [value for value, _ in found] == [6, 6, 7, 8]
    assert len({path for _, path in found}) == 3
    assert ctypes.sizeof(ctypes.c_void_p) == 8


def test_libraries_share_the_stacks_of_their_threads():
    """Two mappings a thread and library: a long test run reaches the system's 65,530, and dies."""
    def mappings():
        return len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines())

    launch("correct")
    before = mappings()
    for i in range(3):
        kernel = HostModule(FAULTS, [f"UNUSED={i}"]).get_function("correct")
        kernel((1,), (64,), (aligned((64,), np.float32, np.arange(64)), np.int32(0)))
    assert mappings() - before < 64


def test_block_of_too_many_threads_is_refused():
    """A block that no card runs, and that overruns the emulator's stacks."""
    a = aligned((2048,), np.float32, 0.0)
    kernel = HostModule(FAULTS).get_function("correct")
    with pytest.raises(LaunchError, match="2048 threads, 1024 allowed"):
        kernel((1,), (2048,), (a, np.int32(0)))
