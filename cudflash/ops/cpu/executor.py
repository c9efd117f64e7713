"""The kernel that runs programs of kernels: one call from Python per forward pass.

A program is an int64 array of records ``[entry point, argument block, barrier before, serial]``.
Every worker thread walks the whole program and takes its own share of each record; a serial record
is thread 0's alone. Threads meet at barriers that spin first and sleep later: a forward of a small
model has hundreds of steps of a few microseconds, far below what a sleeping thread costs to wake.

Subnormal policy of the numerics contract: flush to zero, set here for the length of a program and
restored afterwards (CuPy compiles with ``-ftz=true`` and gives no way to turn it off).
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cudflash.ops.cpu import simd as S

RECORD_BYTES = 32
# Control block of a pool, byte offsets; what different threads spin on has its own cache line.
PROGRAM, N_RECORDS = 0, 8             # written by the caller before each start
REST_SPINS = 16                       # pauses of a worker between two programs before it sleeps
STARTS, START_SLEEPERS = 64, 96       # programs started so far; workers asleep until the next
ARRIVALS = 128                        # threads at the barrier
GENERATION, SLEEPERS = 192, 224       # barriers passed; threads asleep at one
CONTROL_BYTES = 256
# About 50 us of pauses. On an idle machine nobody waits that long; on a busy one the other thread
# has lost its core, and spinning on would only take the time it needs.
_SPINS_BEFORE_SLEEP = 1000
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}  # number of the Linux system call
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129           # private to the process
_FTZ_DAZ = 0x8040


@intrinsic
def call_kernel(typingctx, entry, args, tid, n_threads):
    """Call a Numba-compiled ``void f(int64, int64, int64)`` by address (Numba's own convention)."""
    signature = types.void(types.int64, types.int64, types.int64, types.int64)

    def codegen(context, builder, sig, values):
        ptr = ir.IntType(8).as_pointer()
        fnty = ir.FunctionType(S.I32, [ptr.as_pointer(), ptr.as_pointer()] + [S.I64] * 3)
        fn = builder.inttoptr(values[0], fnty.as_pointer())
        ret = cgutils.alloca_once(builder, ptr)
        exc = cgutils.alloca_once(builder, ptr)
        builder.call(fn, [ret, exc, *values[1:]])
        return context.get_dummy_value()

    return signature, codegen


def _atomic_add(builder, address, value):
    return builder.atomic_rmw("add", S.pointer(builder, address, S.I64), value, "seq_cst")


def _atomic_load(builder, address):
    return builder.load_atomic(S.pointer(builder, address, S.I64), "acquire", 8)


def _atomic_store(builder, address, value):
    builder.store_atomic(value, S.pointer(builder, address, S.I64), "release", 8)


_a = types.int64
atomic_add = S._define("atomic_add", _a(_a, _a), _atomic_add)
atomic_load = S._define("atomic_load", _a(_a), _atomic_load)
atomic_store = S._define("atomic_store", types.none(_a, _a), _atomic_store)


def _on_x86(builder):
    return builder.module.triple.startswith(("x86_64", "i686", "i386"))


def _pause(builder):
    if _on_x86(builder):
        S.call_intrinsic(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


def _futex(builder, address, operation, value):
    """Linux: sleep until the 32-bit word changes from ``value``, or wake ``value`` sleepers.

    Elsewhere the thread sleeps for a moment and looks again.
    """
    triple = builder.module.triple
    number = _FUTEX_CALL.get(triple.split("-")[0]) if "linux" in triple else None
    if number is None:
        if "windows" not in triple:
            S.call_intrinsic(builder, "usleep", S.I32, [ir.Constant(S.I32, 50)])
        return
    zero = ir.Constant(S.I64, 0)
    args = [ir.Constant(S.I64, number), address, operation, value, zero, zero, zero]
    S.call_intrinsic(builder, "syscall", S.I64, args)


def _swap_mxcsr(builder, value):
    """Set the SSE control word, return the former one; 0 where there is none."""
    if not _on_x86(builder):
        return value
    slot = cgutils.alloca_once(builder, S.I32)
    void = ir.VoidType()
    S.call_intrinsic(builder, "llvm.x86.sse.stmxcsr", void, [slot])
    former = builder.load(slot)
    builder.store(value, slot)
    S.call_intrinsic(builder, "llvm.x86.sse.ldmxcsr", void, [slot])
    return former


pause = S._define("pause", types.none(), _pause)
futex = S._define("futex", types.none(_a, _a, _a), _futex)
swap_mxcsr = S._define("swap_mxcsr", types.int32(types.int32), _swap_mxcsr)


def build_run_program():
    """Python function of the kernel ``run_program``; ``args`` points at a control block.

    Thread 0 comes with a program: it starts the others, does its share and returns when all have
    done theirs. Every other thread stays in here and waits for the next start. Starting and joining
    is one native call, so no Python exception (Ctrl-C) can fall between them and leave a thread in
    an old program. ``n_records < 0`` sends the others home.
    """
    from numba import njit

    @njit(inline="always")
    def sleep_while(word, sleepers, value, most):
        """Wait until the counter at ``word`` differs from ``value``: spin first, then sleep."""
        spins = 0
        while atomic_load(word) == value:
            spins += 1
            if spins < most:
                pause()
            else:
                atomic_add(sleepers, 1)
                futex(word, _FUTEX_WAIT, value & 0xFFFFFFFF)
                atomic_add(sleepers, -1)

    @njit(inline="always")
    def advance(word, sleepers):
        """Count on and wake whoever sleeps; a sleeper counts itself before it looks again."""
        atomic_add(word, 1)
        if atomic_add(sleepers, 0) != 0:
            futex(word, _FUTEX_WAKE, 1 << 30)

    @njit(inline="always")
    def meet(control, n_threads):
        generation = atomic_load(control + GENERATION)
        if atomic_add(control + ARRIVALS, 1) == n_threads - 1:
            atomic_store(control + ARRIVALS, 0)
            advance(control + GENERATION, control + SLEEPERS)
        else:
            sleep_while(control + GENERATION, control + SLEEPERS, generation, _SPINS_BEFORE_SLEEP)

    @njit
    def share(control, tid, n_threads):
        """One thread's part of the program in the control block."""
        program, n_records = S.peek_i64(control + PROGRAM), S.peek_i64(control + N_RECORDS)
        former = swap_mxcsr(0x1F80 | _FTZ_DAZ)
        for i in range(n_records):
            record = program + i * RECORD_BYTES
            if n_threads > 1 and S.peek_i64(record + 16) != 0:
                meet(control, n_threads)
            if S.peek_i64(record + 24) == 0:
                call_kernel(S.peek_i64(record), S.peek_i64(record + 8), tid, n_threads)
            elif tid == 0:
                call_kernel(S.peek_i64(record), S.peek_i64(record + 8), 0, 1)
        if n_threads > 1:
            meet(control, n_threads)
        swap_mxcsr(former)

    def run_program(control, tid, n_threads):
        if tid == 0:
            if n_threads > 1:
                advance(control + STARTS, control + START_SLEEPERS)
            if S.peek_i64(control + N_RECORDS) >= 0:
                share(control, tid, n_threads)
            return
        starts = np.int64(0)
        while True:
            most = S.peek_i64(control + REST_SPINS)
            sleep_while(control + STARTS, control + START_SLEEPERS, starts, most)
            starts += 1
            if S.peek_i64(control + N_RECORDS) < 0:
                return
            share(control, tid, n_threads)

    return run_program
