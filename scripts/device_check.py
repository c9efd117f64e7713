"""Check and measure a real card in one go; `make device-check`.

    python -m scripts.device_check                      # everything, under 8 minutes
    python -m scripts.device_check --only twins --only products
    python -m scripts.device_check --resume             # parts that the report lacks

Needs a checkout with CuPy, its CUDA parts, Numba and NumPy; no network, no model files, and cudflash
need not be installed. Writes
`device_check.json` after every part, so that a run that is cut off can be resumed, and a table at
the end. Exit code 1 if a bit differs; missed targets are printed, not failed.
"""

import argparse
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SECONDS = 460  # no part begins after this; what is left out is named in the report


def use_checkout():
    """Find cudflash in this checkout, installed or not; `-m` has put its root on the path."""
    if importlib.util.find_spec("cudflash.loader") is not None:
        return
    for name in ("loader", "raw_kernels"):  # pyproject.toml gives them this name when installing
        spec = importlib.util.spec_from_file_location(
            f"cudflash.{name}", ROOT / name / "__init__.py",
            submodule_search_locations=[str(ROOT / name)])
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def parts():
    """{name: function}, in the order of a run: what must be right before what is fast."""
    from scripts.device import answers, parts

    return {
        "twins": parts.twins,  # every kernel's bits
        "independence": parts.independence,  # M = 1 and M = 16 on real shapes
        "answers": answers.pairs,  # whole answers on tiny pairs
        "products": parts.products,  # GB/s by shape and M
        "whole": parts.whole,  # synthetic models: decode, verify, draft, graphs
    }


def environment(ops):
    """What the figures were taken on."""
    import numpy as np

    import cudflash

    free, total = ops.memory()
    facts = {
        "device": ops.driver.name, "arch": ops.driver.arch,
        "multiprocessors": ops.driver.n_multiprocessors, "free_bytes": free, "total_bytes": total,
        "graphs": ops.graphs, "host": platform.processor() or platform.machine(),
        "python": platform.python_version(), "numpy": np.__version__,
        "cudflash": cudflash.__version__, "commit": _commit(),
    }
    if shutil.which("nvidia-smi"):
        query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                              capture_output=True, text=True, check=False)
        facts["nvidia_smi"] = {"query": query, "answer": done.stdout.strip()}
    return facts


def _commit():
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() or None


def memory_check(limit_s=120):
    """Run the twins under compute-sanitizer where it is installed: (finding, or why not)."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"skipped": "compute-sanitizer is not installed", "rows": [], "faults": []}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m",
               "scripts.device_check", "--only", "twins", "--few", "--report", "/dev/null"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s,
                              cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"skipped": f"compute-sanitizer took over {limit_s} s", "rows": [], "faults": []}
    fault = [] if done.returncode == 0 else [f"compute-sanitizer: {done.stdout[-600:]}"]
    return {"rows": [{"tool": "memcheck", "exit": done.returncode}], "faults": fault}


def peer(binary, model):
    """llama.cpp's own decoding speed and ours on one file."""
    import cudflash

    done = subprocess.run([binary, "-m", model, "-p", "0", "-n", "64", "-ngl", "99", "-o", "json"],
                          capture_output=True, text=True, check=False)
    theirs = json.loads(done.stdout)[-1]["avg_ts"] if done.returncode == 0 else None
    with cudflash.load(model, device="cuda") as engine:
        greedy = cudflash.SamplingConfig(temperature=0)
        ours = [engine.generate([1, 2, 3], max_tokens=65, sampling=greedy, ignore_eos=True)
                .stats["decode_tps"] for _ in range(3)]
    row = {"model": model, "llamacpp_tps": theirs, "cudflash_tps": ours}
    return {"rows": [row], "faults": []}


def run(ops, cpu, sizes, report, *, only=(), few=False, clock=time.monotonic, save=None, say=print):
    """Run parts and fill the report.

    Parameters
    ----------
    ops : CudaOps
    cpu : module
        ``cudflash.ops.cpu``.
    sizes : scripts.device.shapes.Sizes
    report : dict
        Parts that it holds already are not run again.
    only : collection of str
        Parts to run; all if empty.
    few : bool
        Fewer cases.
    save : callable, optional
        Called with the report after every part.
    """
    started = clock()
    report["environment"] = environment(ops)
    done = report.setdefault("parts", {})
    for name, part in parts().items():
        if name in done or (only and name not in only):
            continue
        if clock() - started > SECONDS:
            say(f"{name}: left out, the time is up; run again with --resume")
            continue
        begun = clock()
        say(f"{name} ...")
        try:
            found = part(ops, cpu, sizes, few)
        except Exception as err:  # noqa: BLE001  (one broken part must not cost the others)
            found = {"rows": [], "faults": [f"{name} ended with {type(err).__name__}: {err}"]}
        done[name] = {**found, "seconds": round(clock() - begun, 1)}
        for fault in found["faults"]:
            say(f"  FAULT {fault}")
        if save is not None:
            save(report)
    return report


def table(report):
    """The report as text: one line for each row, then the targets."""
    facts = report["environment"]
    lines = [f"{facts['device']} ({facts['arch']}), commit {facts['commit']}"]
    for name, part in report["parts"].items():
        faults = len(part["faults"])
        lines.append(f"\n{name}: {len(part['rows'])} rows, {faults} faults, "
                     f"{part.get('seconds', 0)} s {part.get('skipped', '')}")
        if "copy_gbps" in part:
            lines.append(f"  copy bandwidth {part['copy_gbps']:.0f} GB/s")
        if name in ("products", "whole"):
            lines += ["  " + "  ".join(f"{k}={_short(v)}" for k, v in row.items())
                      for row in part["rows"]]
        lines += [f"  {'met   ' if met else 'MISSED'} {text}" for text, met in
                  part.get("targets", ())]
        lines += [f"  FAULT {fault}" for fault in part["faults"]]
    return "\n".join(lines)


def _short(value):
    if isinstance(value, dict):
        return _short(value.get("median", value.get("share")))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments=None):
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--resume", action="store_true", help="keep the parts of the report")
    parser.add_argument("--few", action="store_true", help="fewer cases, tiny shapes")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("device_check.json"))
    parser.add_argument("--peer", help="path of llama-bench, with --peer-model")
    parser.add_argument("--peer-model", help="GGUF file for both")
    options = parser.parse_args(arguments)
    from cudflash.errors import CudflashError
    from cudflash.ops import cpu
    from cudflash.ops.cuda import open_ops
    from scripts.device.shapes import FULL, TINY

    report = {}
    if options.resume and options.report.exists():
        report = json.loads(options.report.read_text(encoding="utf-8"))

    def save(current):
        options.report.write_text(json.dumps(current, indent=1), encoding="utf-8")

    try:
        ops = open_ops(options.device, graphs=not options.no_graph)
    except (CudflashError, ImportError, RuntimeError) as err:
        advice = "" if "cudflash doctor" in str(err) else "; run 'cudflash doctor'"
        print(f"no card can be used: {err}{advice}", file=sys.stderr)
        return 6
    run(ops, cpu, TINY if options.few else FULL, report, only=options.only, few=options.few,
        save=save)
    if not options.few and not options.only:
        report["parts"]["memory"] = memory_check()
        if options.peer and options.peer_model:
            report["parts"]["peer"] = peer(options.peer, options.peer_model)
    save(report)
    print(table(report))
    return 1 if any(part["faults"] for part in report["parts"].values()) else 0


if __name__ == "__main__":
    use_checkout()
    sys.exit(main())
