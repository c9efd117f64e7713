"""Compile every shipped kernel for every architecture, without a GPU; `make cubin`.

    python scripts/build_cubins.py                          # all of it, some minutes
    python scripts/build_cubins.py --arch 90 --only attention --only Q6_K
    python scripts/build_cubins.py --table raw_kernels/REGISTERS.md

Fails where a kernel does not compile without a warning, uses local memory (spills, or an array the
compiler could not keep in registers) or more static shared memory than a block may have. Needs nvcc
12.8 or later (sm_120); cubins go to build/cubin/.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
FLAGS = (
    "-std=c++17",
    "-ftz=true",  # CuPy compiles so and cannot be told otherwise; the contract flushes too
    "-fmad=false",  # no contraction; fused operations are written as such
    "-prec-div=true", "-prec-sqrt=true",  # IEEE division and square root
    "-Werror=all-warnings",
)
# Bytes of local memory a kernel may use, by label; anything not listed may use none.
LOCAL_BYTES_ALLOWED = {}
MAX_STATIC_SHARED = 48 * 1024

FORMATS_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
FORMATS_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
FLOATS = ("F16", "BF16", "F32")
PRECISIONS = tuple(product((1, 2), (1, 2)))  # (PLANES, TOKEN_TILES)


def shipped():
    """(file, defines) of every build that a launcher will ask for."""
    plain = [(name, ()) for name in ("accept", "argmax", "check_finite", "dynamic_conv",
                                     "elementwise", "rms_norm", "selector", "top_k")]
    plain += [("rope", (f"SPLIT_HALF={half}",)) for half in (0, 1)]
    plain += [("kv_write", (f"KV_BITS={bits}",)) for bits in (16, 32)]
    plain += [(name, (f"HEAD_DIM={d}", f"KV_BITS={bits}"))
              for name, d, bits in product(("attention", "attention_prefill", "attention_span"),
                                           (64, 128, 256), (16, 32))]
    plain += [("embed_rows", (f"FORMAT={f}",)) for f in (*FORMATS_32, *FORMATS_256, *FLOATS)]
    plain += [("retile", (f"FORMAT={f}", f"TILE_ROWS={rows}"))
              for formats, rows in ((FORMATS_32, 32), (FORMATS_256, 16)) for f in formats]
    plain += [("matmul_float", (f"FORMAT={f}", f"TOKENS={tokens}", "SLICES=8"))
              for f, tokens in product(FLOATS, (1, 4, 16))]
    for planes, tiles in PRECISIONS:
        scratch = (f"PLANES={planes}", f"TOKEN_TILES={tiles}")
        plain += [("quantize_q32", scratch), ("quantize_q256", scratch)]
        plain += [("matmul_q32", (f"FORMAT={f}", *scratch, "ROW_GROUPS=1", "SLICES=8"))
                  for f in FORMATS_32]
        plain += [("matmul_q256", (f"FORMAT={f}", *scratch, "ROW_TILES=2", "ROW_GROUPS=1",
                                   "SLICES=8")) for f in FORMATS_256]
    for planes in (1, 2):
        scratch = (f"PLANES={planes}", "TOKEN_TILES=4")
        plain += [("quantize_q32", scratch), ("quantize_q256", scratch)]
        plain += [("prefill_q32", (f"FORMAT={f}", *scratch, "ROW_GROUPS=4", "SLICES=8"))
                  for f in FORMATS_32]
        plain += [("prefill_q256", (f"FORMAT={f}", *scratch, "ROW_TILES=1", "ROW_GROUPS=4",
                                    "SLICES=8")) for f in FORMATS_256]
    for planes, tiles in PRECISIONS:
        scratch = (f"PLANES={planes}", f"TOKEN_TILES={tiles}")
        # K from 16,384; the inner loop is the same for every format
        plain.append(("matmul_q32", ("FORMAT=Q8_0", *scratch, "ROW_GROUPS=1", "SLICES=16")))
        plain.append(("matmul_q256", ("FORMAT=Q6_K", *scratch, "ROW_TILES=2", "ROW_GROUPS=1",
                                      "SLICES=16")))
    return plain


def label(file, defines):
    """Name of a build in reports and limits."""
    return " ".join([file, *(d.split("=")[1] if d.startswith("FORMAT") else d for d in defines)])


def compile_one(nvcc, arch, file, defines, folder):
    """Compile one build; returns ([(kernel, registers, local bytes, shared bytes)], faults)."""
    name = label(file, defines)
    out = folder / f"sm_{arch}" / (re.sub(r"[ =]", "_", name) + ".cubin")
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", *FLAGS, *(f"-D{d}" for d in defines),
               "-Xptxas", "-v", "-o", out, ROOT / "raw_kernels" / f"{file}.cu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode:
        return [], [f"{name}, sm_{arch}: does not compile:\n{text[-2000:]}"]
    kernels = read_usage(text)
    faults = [] if kernels else [f"{name}, sm_{arch}: ptxas reported no kernel"]
    allowed = LOCAL_BYTES_ALLOWED.get(name, 0)
    for kernel, _, local, shared in kernels:
        if local > allowed:
            faults.append(f"{name}, sm_{arch}: {kernel} uses {local} bytes of local memory, "
                          f"allowed are {allowed}")
        if shared > MAX_STATIC_SHARED:
            faults.append(f"{name}, sm_{arch}: {kernel} uses {shared} bytes of shared memory, "
                          f"at most {MAX_STATIC_SHARED} are static")
    return kernels, faults


def read_usage(text):
    """What ptxas -v says of each kernel; a stack frame and spills both count as local memory."""
    kernels = []
    parts = re.split(r"Compiling entry function '(\w+)'", text)
    for kernel, part in zip(parts[1::2], parts[2::2]):
        def number(pattern, part=part):
            found = re.search(pattern, part)
            return int(found[1]) if found else 0

        local = max(number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes spill stores"),
                    number(r"(\d+) bytes spill loads"))
        kernels.append((kernel, number(r"Used (\d+) registers"), local, number(r"(\d+) bytes smem")))
    return kernels


TABLE_HEAD = """# Registers and shared memory

Registers a thread by architecture and bytes of static shared memory a block, as ptxas of {release}
reports them; local memory is 0 everywhere, which `make cubin` enforces. Written by
`python scripts/build_cubins.py --table raw_kernels/REGISTERS.md`. What the compiler says, not a
measurement: none of this has run on a card.

"""


def table(usage, architectures):
    """Markdown: registers of every kernel by architecture, and its static shared memory."""
    lines = ["| kernel | build | shared | " + " | ".join(f"sm_{a}" for a in architectures) + " |",
             "|---|---|---|" + "---|" * len(architectures)]
    rows = {}
    for (arch, name), kernels in usage.items():
        for kernel, registers, _, shared in kernels:
            rows.setdefault((kernel, name), {})[arch] = registers, shared
    for (kernel, name), found in sorted(rows.items()):
        cells = [str(found[a][0]) if a in found else "" for a in architectures]
        shared = max(s for _, s in found.values())
        build = name.split(" ", 1)[1] if " " in name else ""
        lines.append(f"| `{kernel}` | {build} | {shared:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def release(nvcc):
    """"CUDA 13.0", as the compiler calls itself."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return f"CUDA {found[1]}" if found else "an unknown release"


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", help="architecture, as 90; default: all seven")
    parser.add_argument("--only", action="append", default=[], metavar="WORD",
                        help="builds whose label holds any of these words")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cubin")
    parser.add_argument("--table", type=Path, help="write the register table to this file")
    options = parser.parse_args()
    architectures = options.arch or ARCHITECTURES
    wanted = [b for b in shipped()
              if not options.only or any(word in label(*b) for word in options.only)]
    jobs = list(product(architectures, wanted))
    usage, faults = {}, []
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda job: compile_one(options.nvcc, job[0], *job[1], options.out), jobs)
        for (arch, build), (kernels, found) in zip(jobs, results):
            usage[arch, label(*build)] = kernels
            faults += found
            for fault in found:
                print(fault, file=sys.stderr, flush=True)
    if options.table:
        head = TABLE_HEAD.format(release=release(options.nvcc))
        options.table.write_text(head + table(usage, architectures), encoding="utf-8")
    most = max((k[1] for kernels in usage.values() for k in kernels), default=0)
    print(f"{len(jobs)} builds for {len(architectures)} architectures, at most {most} registers, "
          f"{len(faults)} faults")
    return 1 if faults or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
