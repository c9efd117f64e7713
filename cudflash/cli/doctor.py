"""``cudflash doctor``: which device would run a model, and what is wrong with this machine."""

import os
import time

import click

from cudflash.cli.common import Command, json_option, output_of, output_options
from cudflash.errors import CudflashError, DeviceError


@click.command("doctor", cls=Command)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda|cuda:N",
    help="The device that has to work.",
)
@json_option
@output_options
@click.pass_context
def command(ctx, device, as_json):
    """Show which device would run a model and why, and what is wrong with this machine.

    Exit code 0 if the wanted device works, 6 if it does not.
    """
    output = output_of(ctx)
    found = examine(device, output)
    if as_json:
        output.json(found)
    else:
        show(output, found)
    if not found["ok"]:
        ctx.exit(DeviceError.exit_code)


def examine(device, output):
    """Look at the machine.

    Returns
    -------
    dict
        ``ok`` is whether the wanted device works; ``problems`` is a list of sentences.
    """
    from cudflash.cli.versions import versions
    from cudflash.cupy_state import cupy_state
    from cudflash.device import choose_device, cpu_name, physical_cores

    chosen, problems = None, []
    try:
        chosen = choose_device(device)
    except DeviceError as err:
        problems.append(str(err))
    gpu = cupy_state()
    problems += [problem for problem in gpu.problems if problem not in problems]
    cpu = {"name": cpu_name(), "threads": physical_cores(), **_cpu_ops(output, problems)}
    cuda = _cuda_ops(chosen, output, problems)
    return {
        "ok": chosen is not None and (cuda["works"] if chosen.kind == "cuda" else cpu["works"]),
        "device": vars(chosen) if chosen else None,
        "cpu": cpu,
        "gpu": {**gpu.to_dict(), **cuda},
        "versions": versions(),
        "problems": problems,
    }


def _cpu_ops(output, problems):
    """Run one small kernel; where that fails no model can run on the CPU."""
    facts = {"works": False, "isa": None, "cache_dir": None, "kernel_ms": None}
    started = time.perf_counter()
    try:
        from cudflash.cli.kernels import CompileNotice
        from cudflash.ops import cpu as ops
        from cudflash.ops import store
        from cudflash.ops.cpu import jit

        facts["cache_dir"] = None if jit.cache_dir() is None else str(jit.cache_dir())
        facts["isa"] = jit.isa()
        with CompileNotice(output):
            facts["works"] = _adds(ops)
        facts["kernel_ms"] = round(1e3 * (time.perf_counter() - started), 1)
    except CudflashError as err:
        problems.append(str(err))
        return facts
    except Exception as err:  # noqa: BLE001  (a broken Numba fails in its own ways)
        problems.append(
            f"the CPU op set does not run ({type(err).__name__}: {' '.join(str(err).split())}); "
            "install the versions of numba and llvmlite that cudflash asks for"
        )
        return facts
    if not facts["works"]:
        problems.append("the CPU op set computed a wrong sum; this processor or Numba is broken")
    if facts["cache_dir"] is None:
        problems.append(
            "no folder for compiled kernels is writable and closed to others, so they are compiled at "
            f"every start; set {store.CACHE_ENV} to a folder of your own"
        )
    return facts


def _cuda_ops(device, output, problems):
    """Run one small kernel on the chosen GPU: the compiler, the driver and the card together."""
    facts = {"works": False, "arch": None, "free_bytes": None, "total_bytes": None}
    if device is None or device.kind != "cuda":
        return facts
    from cudflash.cli.kernels import CompileNotice
    from cudflash.device import load_ops

    try:
        ops = load_ops(device)
        facts["arch"] = ops.driver.arch
        facts["free_bytes"], facts["total_bytes"] = ops.memory()
        with CompileNotice(output):
            facts["works"] = _adds(ops)
    except (CudflashError, RuntimeError) as err:
        problems.append(" ".join(str(err).split()))
        return facts
    if not facts["works"]:
        problems.append(f"{device.name} computed a wrong sum; the card or its driver is broken")
    return facts


def _adds(ops):
    import numpy as np

    a = np.arange(64, dtype=np.float32).reshape(1, 64)
    out = ops.empty((1, 64), np.float32)
    ops.add(out, ops.upload(a), ops.upload(2 * a))
    return bool((ops.download(out) == 3 * a).all())


def show(output, found):
    """Write the findings for people."""
    chosen, cpu, gpu = found["device"], found["cpu"], found["gpu"]
    device = f"{chosen['kind']}: {chosen['name']} ({chosen['reason']})" if chosen else "none"
    rows = [
        ("device", device),
        ("processor", cpu["name"]),
        ("threads", f"{cpu['threads']} of {os.cpu_count()} logical processors"),
        ("CPU op set", f"works, {cpu['isa']} path" if cpu["works"] else "does not work"),
        ("kernel cache", cpu["cache_dir"] or "none is writable"),
        ("GPU", gpu["state"]),
    ]
    if gpu["driver"]:
        rows.append(("driver", f"CUDA {gpu['driver']}"))
    if gpu["nvrtc"]:
        rows.append(("NVRTC", gpu["nvrtc"]))
    if gpu["total_bytes"]:
        free, total = (n / 2**30 for n in (gpu["free_bytes"], gpu["total_bytes"]))
        works = "works" if gpu["works"] else "does not work"
        rows.append(("CUDA op set", f"{works}, {gpu['arch']}, {free:.1f} of {total:.1f} GiB free"))
    rows += [(name, number or "missing") for name, number in found["versions"].items()]
    output.table([(name, str(value)) for name, value in rows])
    for problem in found["problems"]:
        output.error(problem)
