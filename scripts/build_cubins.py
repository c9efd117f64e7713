"""Compile every shipped kernel for every architecture and inspect it, without a GPU; `make cubin`.

    python -m scripts.build_cubins                          # all of it, some minutes
    python -m scripts.build_cubins --arch 90 --only attention --only Q6_K
    python -m scripts.build_cubins --record                 # and write down what was found
    python -m scripts.build_cubins --nvcc nvcc              # the other compiler

Compiles with NVRTC from wheels (pip install -e '.[cubin]'; no CUDA toolkit). Fails where a kernel
does not compile without a warning, uses local memory (spills, or an array that the compiler could
not keep in registers), or differs from raw_kernels/recorded.json: more registers, other shared
memory, instructions for each weight byte off by more than 5 %; and where a product or attention
lacks 128-bit loads or a packed product lacks int8 tensor-core instructions. Of another release of
the compiler than the recorded one it forgives 16 registers and 15 %. Cubins go to build/cubin/ and
are made again only when something that decides them has changed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from scripts import kernel_report, sass_model
from scripts.kernel_builds import ARCHITECTURES, label, shipped, weight_loop

ROOT = Path(__file__).resolve().parents[1]
NVCC_FLAGS = ("-cubin", "-Werror=all-warnings", "-Xptxas", "-v")
RECORD = ROOT / "raw_kernels" / "recorded.json"
MAX_STATIC_SHARED = 48 * 1024
TOLERANCE, TOLERANCE_OTHER_RELEASE = 0.05, 0.15
MORE_REGISTERS_OTHER_RELEASE = 16
WIDE_LOADS = ("matmul", "prefill", "attention")  # files whose kernels load 16 bytes at a time


def compile_one(compiler, arch, file, defines, folder):
    """Compile one build, or find it made already.

    Returns
    -------
    dict or str
        {kernel: {"registers", "local", "shared", "opcodes", "instructions"}}, or what went wrong.
    """
    from cudflash.ops.cuda.compiler import OPTIONS, build_key
    from cudflash.ops.cuda.source import spliced

    name = label(file, defines)
    out = folder / f"sm_{arch}" / (re.sub(r"[ =]", "_", name) + ".cubin")
    out.parent.mkdir(parents=True, exist_ok=True)
    key = f"{release(compiler)} {build_key(file, defines, f'sm_{arch}')}"
    report = out.with_suffix(".json")
    if out.exists() and report.exists():
        found = json.loads(report.read_text())
        if found["key"] == key:
            return found["kernels"]
    options = [*OPTIONS, f"-arch=sm_{arch}", *(f"-D{d}" for d in defines)]
    if compiler == "nvrtc":
        log, cubin = _nvrtc(spliced(file), f"{file}.cu", [*options, "--ptxas-options=-v"])
        if cubin is not None:
            out.write_bytes(cubin)
    else:
        source = out.with_suffix(".cu")
        source.write_text(spliced(file))
        done = subprocess.run([compiler, *NVCC_FLAGS, *options, "-o", out, source],
                              capture_output=True, text=True, check=False)
        log, cubin = done.stdout + done.stderr, None if done.returncode else out
    if cubin is None or re.search(r"\bwarning\b", log):
        return f"{name}, sm_{arch}: does not compile without a warning:\n{log[-2000:]}"
    kernels = read_usage(log)
    if not kernels:
        return f"{name}, sm_{arch}: ptxas reported no kernel"
    nvdisasm = sass_model.find_nvdisasm()
    code = sass_model.disassemble(nvdisasm, out) if nvdisasm else {}
    for kernel, usage in kernels.items():
        usage["opcodes"] = sorted({op for op, _ in code.get(kernel, ())})
        usage["instructions"] = _loop(code.get(kernel, []), file, defines, arch)
    report.write_text(json.dumps({"key": key, "kernels": kernels}))
    return kernels


def _nvrtc(text, name, options):
    """(log, cubin or None) of one program."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    _, n = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(n)
    nvrtc.nvrtcGetProgramLog(program, log)
    cubin = None
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, n = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(n)
        nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return log.decode(errors="replace"), cubin


def _loop(instructions, file, defines, arch):
    """Instructions of a thread for each weight byte, and the model's figures; None elsewhere."""
    unit = weight_loop(file, defines, arch)
    if unit is None or not instructions or file.startswith("matmul_float") and not any(
            op.startswith("FFMA") for op, _ in instructions):
        return None
    opcode, multiplies, weight_bytes, other_bytes = unit
    body = sass_model.hot_loop(instructions, opcode)
    if not body:
        return None
    turns = sum(op.startswith(opcode) for op, _ in body) / multiplies
    figures = {card: sass_model.model(c, body, turns * weight_bytes, turns * other_bytes)
               for card, c in sass_model.CARDS.items() if c.arch == arch}
    return {"per_byte": round(32 * sass_model.n_real(body) / (turns * weight_bytes), 3),
            "model": {card: [round(gbs), limit] for card, (gbs, limit) in figures.items()}}


def read_usage(text):
    """{kernel: usage} of what ptxas -v says; a stack frame and spills both count as local memory."""
    kernels = {}
    parts = re.split(r"Compiling entry function '(\w+)'", text)
    for kernel, part in zip(parts[1::2], parts[2::2]):
        def number(pattern, part=part):
            found = re.search(pattern, part)
            return int(found[1]) if found else 0

        local = max(number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes spill stores"),
                    number(r"(\d+) bytes spill loads"))
        kernels[kernel] = {"registers": number(r"Used (\d+) registers"), "local": local,
                           "shared": number(r"(\d+) bytes smem")}
    return kernels


def faults_of(where, file, kernel, usage, recorded, same_release):
    """What is wrong with one kernel of one build; ``recorded`` is None where nothing is."""
    found, opcodes = [], usage.get("opcodes", ())
    if usage["local"]:
        found.append(f"{where}: {kernel} uses {usage['local']} bytes of local memory, expected none")
    if usage["shared"] > MAX_STATIC_SHARED:
        found.append(f"{where}: {kernel} uses {usage['shared']} bytes of shared memory, at most "
                     f"{MAX_STATIC_SHARED} are static")
    loads = file.startswith(WIDE_LOADS) and not kernel.endswith(("merge", "retile_float"))
    if opcodes and loads and not any(re.match(r"LDG\.E\.(\S+\.)?128", op) for op in opcodes):
        found.append(f"{where}: {kernel} has no 128-bit load from global memory")
    if opcodes and kernel.endswith(("_q32", "_q256")) and loads and not any(
            op.startswith("IMMA") and ".S8" in op for op in opcodes):
        found.append(f"{where}: {kernel} has no int8 tensor-core instruction")
    if recorded is None:
        found.append(f"{where}: {kernel} is not in {RECORD.name}; run with --record and look")
        return found
    more = 0 if same_release else MORE_REGISTERS_OTHER_RELEASE
    if usage["registers"] > recorded["registers"] + more:
        found.append(f"{where}: {kernel} takes {usage['registers']} registers, recorded are "
                     f"{recorded['registers']}")
    if usage["shared"] != recorded["shared"]:
        found.append(f"{where}: {kernel} takes {usage['shared']} bytes of shared memory, recorded "
                     f"are {recorded['shared']}")
    now, then = usage.get("instructions"), recorded.get("instructions")
    if now and then:
        limit = TOLERANCE if same_release else TOLERANCE_OTHER_RELEASE
        if abs(now["per_byte"] / then["per_byte"] - 1) > limit:
            found.append(f"{where}: {kernel} takes {now['per_byte']} instructions a weight byte, "
                         f"recorded are {then['per_byte']}")
    return found


def release(compiler):
    """"NVRTC 13.5" or "CUDA 13.0", as the compiler calls itself."""
    if compiler == "nvrtc":
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        return f"NVRTC {major}.{minor}"
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return f"CUDA {found[1]}" if found else "an unknown release"


def unusable(compiler, error):
    """One sentence about a compiler that is not there."""
    if compiler == "nvrtc":
        return (f"NVRTC cannot be used ({error}), expected its wheels: run pip install -e '.[cubin]', "
                "or pass --nvcc")
    return f"the compiler {compiler} cannot be run ({error}); pass the path of an nvcc with --nvcc"


def _job(job):
    return compile_one(*job)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", help="architecture, as 90; default: all seven")
    parser.add_argument("--only", action="append", default=[], metavar="WORD",
                        help="builds whose label holds any of these words")
    parser.add_argument("--nvcc", metavar="PATH", help="compile with this nvcc instead of NVRTC")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cubin")
    parser.add_argument("--record", action="store_true",
                        help="write recorded.json, REGISTERS.md and the model in docs/KERNELS.md")
    options = parser.parse_args()
    compiler = options.nvcc or "nvrtc"
    wanted = [b for b in shipped()
              if not options.only or any(word in label(*b) for word in options.only)]
    jobs = [(compiler, arch, *build, options.out)
            for arch, build in product(options.arch or ARCHITECTURES, wanted)]
    record = kernel_report.Record.read(RECORD)
    try:
        same_release = record.compiler == release(compiler)
    except (ImportError, OSError, RuntimeError) as err:
        print(unusable(compiler, err), file=sys.stderr)
        return 2
    n_faults, most = 0, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for (_, arch, file, defines, _), result in zip(jobs, pool.map(_job, jobs)):
            where = f"{label(file, defines)}, sm_{arch}"
            faults = [result] if isinstance(result, str) else []
            if options.record and not faults:
                record.forget_others(file, defines, result)
            for kernel, usage in {} if faults else result.items():
                most = max(most, usage["registers"])
                if options.record:
                    record.put(file, defines, kernel, arch, usage)
                then = record.get(file, defines, kernel, arch)
                faults += faults_of(where, file, kernel, usage, then, same_release or options.record)
            for fault in faults:
                print(fault, file=sys.stderr, flush=True)
            n_faults += len(faults)
    if options.record:
        record.compiler = release(compiler)
        record.write(RECORD)
        kernel_report.write_tables(record)
    print(f"{len(jobs)} builds with {release(compiler)}, at most {most} registers, "
          f"{n_faults} faults")
    return 1 if n_faults or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
