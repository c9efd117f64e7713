"""What the compiler made of the kernels: the record that `make cubin` compares with, and tables."""

import json
from pathlib import Path

from scripts.kernel_builds import ARCHITECTURES, label, shipped
from scripts.sass_model import CARDS

ROOT = Path(__file__).resolve().parents[1]
REGISTERS = ROOT / "raw_kernels" / "REGISTERS.md"
KERNELS = ROOT / "docs" / "KERNELS.md"
BEGIN, END = "<!-- model: begin -->", "<!-- model: end -->"
_MODEL_ARCHS = ("80", "86", "89", "90", "120")

_REGISTERS_HEAD = """# Registers and shared memory

Registers a thread by architecture and bytes of static shared memory a block, as ptxas of {compiler}
reports them; local memory is 0 everywhere, which `make cubin` enforces. Written by
`python -m scripts.build_cubins --record`. What the compiler says, not a measurement: none of this
has run on a card.

"""


class Record:
    """Registers, shared memory and instructions by build, kernel and architecture.

    Attributes
    ----------
    compiler : str
        Release that made them, as "NVRTC 13.5".
    """

    def __init__(self, compiler="", kernels=None):
        self.compiler, self._kernels = compiler, kernels or {}

    @classmethod
    def read(cls, path):
        """Record of a file; an empty one if there is none."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(found["compiler"], found["kernels"])

    def write(self, path):
        """Store what shipped builds have; builds that are shipped no more are left out."""
        names = {label(*build) for build in shipped()}
        kept = {key: value for key, value in sorted(self._kernels.items())
                if key.split(" | ")[0] in names}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(kept[key], sort_keys=True)}"
                           for key in kept)
        path.write_text(f'{{"compiler": {json.dumps(self.compiler)}, "kernels": {{\n{lines}\n}}}}\n',
                        encoding="utf-8")
        self._kernels = kept

    def put(self, file, defines, kernel, arch, usage):
        """Remember one kernel."""
        kept = {k: usage[k] for k in ("registers", "shared", "instructions") if usage.get(k)
                is not None}
        self._kernels.setdefault(f"{label(file, defines)} | {kernel}", {})[arch] = kept

    def forget_others(self, file, defines, kernels):
        """Forget kernels that a build no longer has."""
        prefix = f"{label(file, defines)} | "
        for key in [k for k in self._kernels if k.startswith(prefix)]:
            if key.removeprefix(prefix) not in kernels:
                del self._kernels[key]

    def get(self, file, defines, kernel, arch):
        """What is remembered of one kernel, or None."""
        return self._kernels.get(f"{label(file, defines)} | {kernel}", {}).get(arch)

    def rows(self):
        """(kernel, build, {arch: usage}), sorted."""
        for key, usage in sorted(self._kernels.items(),
                                 key=lambda kv: kv[0].split(" | ")[::-1]):
            build, kernel = key.split(" | ")
            yield kernel, build, usage


def registers_table(record):
    """Markdown: registers of every kernel by architecture, and its static shared memory."""
    lines = ["| kernel | build | shared | " + " | ".join(f"sm_{a}" for a in ARCHITECTURES) + " |",
             "|---|---|---|" + "---|" * len(ARCHITECTURES)]
    for kernel, build, usage in record.rows():
        cells = [str(usage[a]["registers"]) if a in usage else "" for a in ARCHITECTURES]
        shared = max(u["shared"] for u in usage.values())
        defines = build.split(" ", 1)[1] if " " in build else ""
        lines.append(f"| `{kernel}` | {defines} | {shared:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def model_table(record):
    """Markdown: instructions a weight byte and the model's GB/s of every product."""
    cards = list(CARDS)
    lines = ["| kernel | build | " + " | ".join(f"instr/B sm_{a}" for a in _MODEL_ARCHS) + " | "
             + " | ".join(cards) + " | measured |",
             "|---|---|" + "---|" * (len(_MODEL_ARCHS) + len(cards) + 1)]
    for kernel, build, usage in record.rows():
        found = {a: u["instructions"] for a, u in usage.items() if u.get("instructions")}
        if not found:
            continue
        cells = [f"{found[a]['per_byte']:.2f}" if a in found else "" for a in _MODEL_ARCHS]
        for card in cards:
            gbs, limit = found.get(CARDS[card].arch, {}).get("model", {}).get(card, (None, ""))
            cells.append("" if gbs is None else f"{gbs:,} {limit}")
        defines = " ".join(d for d in build.split(" ")[1:]
                           if not d.startswith(("ROW_", "SLICES=8")))
        lines.append(f"| `{kernel}` | {defines} | " + " | ".join(cells) + " | not measured |")
    return "\n".join(lines) + "\n"


def write_tables(record):
    """Write REGISTERS.md and the model's part of docs/KERNELS.md."""
    head = _REGISTERS_HEAD.format(compiler=record.compiler)
    REGISTERS.write_text(head + registers_table(record), encoding="utf-8")
    text = KERNELS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    KERNELS.write_text(f"{before}{BEGIN}\n{model_table(record)}{END}{after}", encoding="utf-8")
