"""Put cubins into the package, so that a wheel built next needs no compiler on its user's machine.

    python -m scripts.ship_cubins --arch 90 --arch 120

Needs CuPy and NVRTC (`pip install 'cudflash[cuda13]'`), no GPU. They go to `raw_kernels/cubin/`,
which git ignores; a cubin whose kernel has changed since is not found by its key, and NVRTC is asked.
"""

import argparse
import sys
from pathlib import Path

from cudflash.ops import store
from cudflash.ops.cuda.compiler import Compiler, build_key
from scripts.build_cubins import ARCHITECTURES, shipped

FOLDER = Path(__file__).resolve().parents[1] / "raw_kernels" / "cubin"


def builds():
    """(file, defines) of every build, those of long rows included."""
    for file, defines in shipped():
        yield file, defines
        if "SLICES=8" in defines:
            yield file, tuple(d.replace("SLICES=8", "SLICES=16") for d in defines)


def ship(nvrtc, arch, folder=FOLDER, wanted=None):
    """Compile for one architecture; returns bytes written."""
    compiler, written = Compiler(nvrtc, int(arch), f"sm_{arch}"), 0
    for file, defines in sorted(set(builds() if wanted is None else wanted)):
        path = folder / compiler.arch / f"{build_key(file, defines, compiler.arch)}.cubin"
        path.parent.mkdir(parents=True, exist_ok=True)
        written += path.write_bytes(store.sealed(path.name, compiler.compile(file, defines)))
    return written


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", help="as 90; default: all")
    options = parser.parse_args()
    import cupy.cuda

    for arch in options.arch or ARCHITECTURES:
        print(f"sm_{arch}: {ship(cupy.cuda.nvrtc, arch) / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
