"""Static reading of cubins: opcodes, the loop over the weights, and a roofline model of it.

No GPU and no timing: a model says what would limit a kernel if latency were hidden. It guards
against regressions and ranks variants; it is not a measurement.

Model, for one warp and one turn of the loop that holds the most multiply instructions:
``issue`` = instructions (one a cycle); every pipe = instructions * 32 / lanes; ``l1`` = bytes of
loads and stores over 128 bytes a cycle and SM. The slowest gives the weight bytes that the SMs can
take, ``sm``; ``l2`` = what the path from L2 gives for weights beside activations; ``dram`` = 92 %
of the nominal bandwidth, what large copies reach. The figure is the least of the three.

Source: pipe widths from NVIDIA's tuning guides and white papers of each architecture; L2 bytes a
clock and SM are assumed (32 to 48), the weakest number of the model.
"""

import json
import re
import subprocess
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION_BYTES = 16
DRAM_SHARE = 0.92


@dataclass(frozen=True)
class Card:
    """What the model knows of a card; lanes and operations are of a whole SM and a clock."""

    arch: str
    sms: int
    ghz: float
    dram: float  # GB/s
    l2: float  # bytes a clock and SM
    int_lanes: int
    float_lanes: int
    imad_lanes: int
    imma: int  # int8 multiply-adds, times 2


CARDS = {
    "RTX 3090": Card("86", 82, 1.695, 936, 32, 64, 128, 64, 2048),
    "RTX 4090": Card("89", 128, 2.52, 1008, 40, 64, 128, 64, 2048),
    "RTX 5090": Card("120", 170, 2.41, 1792, 40, 128, 128, 64, 2048),
    "A100": Card("80", 108, 1.41, 2039, 48, 64, 64, 64, 4096),
    "H100": Card("90", 132, 1.755, 3350, 32, 64, 128, 64, 5120),
    "H200": Card("90", 132, 1.755, 4800, 32, 64, 128, 64, 5120),
}
_ALU = frozenset("LOP3 SHF IADD3 IADD PRMT SEL ISETP LEA VIADD VIMNMX MOV IMNMX PLOP3 SGXT BMSK I2FP "
                 "VIADDMNMX CS2R FMNMX FSETP".split())
_FMA = frozenset("FFMA FMUL FADD HFMA2 HADD2 HMUL2".split())
_SLOW = frozenset("I2F F2I MUFU F2F POPC".split())


def find_nvdisasm():
    """Path of nvdisasm: the wheel nvidia-cuda-nvdisasm of this environment, or None."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in sorted(Path(folder).glob("nvidia/*/bin/nvdisasm")):
            return found
    return None


def disassemble(nvdisasm, cubin):
    """{kernel: [(opcode, operands), ...]} of a cubin file."""
    done = subprocess.run([nvdisasm, "-json", cubin], capture_output=True, text=True, check=True)
    functions = json.loads(done.stdout)[1]
    return {f["function-name"]: [(x["opcode"], x.get("operands", ""))
                                 for x in f["sass-instructions"]] for f in functions}


def loops(instructions):
    """(first, last) instruction of every backward branch's loop."""
    found = []
    for i, (opcode, operands) in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) // INSTRUCTION_BYTES < i:
            found.append((int(target[1], 16) // INSTRUCTION_BYTES, i))
    return found


def hot_loop(instructions, key):
    """The shortest loop among those with the most ``key`` instructions; [] without one."""
    best = None
    for first, last in loops(instructions):
        body = instructions[first:last + 1]
        rank = (sum(op.startswith(key) for op, _ in body), first - last)
        if rank[0] and (best is None or rank > best[0]):
            best = rank, body
    return best[1] if best else []


def n_real(body):
    """Instructions that are issued for something."""
    return sum(opcode != "NOP" for opcode, _ in body)


def _width(opcode):
    found = re.search(r"\.(128|64)\b", opcode)
    return int(found[1]) // 8 if found else 4


def model(card, body, weight_bytes, other_bytes):
    """(GB/s of weights, what limits them) for a loop on a card.

    Parameters
    ----------
    card : Card
    body : list of (opcode, operands)
        One turn of the loop, of one warp.
    weight_bytes, other_bytes : float
        Weights and everything else that a turn asks of L2.
    """
    count = Counter(opcode.split(".")[0] for opcode, _ in body)
    mma = sum((8192 if ".16832." in op else 4096 if ".16816." in op else 2048)
              for op, _ in body if op.startswith("IMMA"))
    moved = sum(32 * _width(op) for op, _ in body if re.match(r"LDG|LDS|STS|STG", op))
    slow = 0 if card.arch in ("86", "89", "90", "120") else count["I2FP"]
    pipes = {
        "issue": n_real(body),
        "ALU": sum(count[op] for op in _ALU) * 128 / card.int_lanes,
        "FMA": sum(count[op] for op in _FMA) * 128 / card.float_lanes
        + (count["IMAD"] + count["IDP"]) * 128 / card.imad_lanes,
        "conversions": (sum(count[op] for op in _SLOW) + slow) * 8,
        "tensor": mma / (card.imma / 4),
        "L1": 4 * moved / 128,
    }
    slowest = max(pipes, key=pipes.get)
    clock = card.sms * card.ghz
    limits = {slowest: weight_bytes * 4 * clock / pipes[slowest],
              "L2": card.l2 * clock * weight_bytes / (weight_bytes + other_bytes),
              "DRAM": DRAM_SHARE * card.dram}
    limit = min(limits, key=limits.get)
    return limits[limit], limit
