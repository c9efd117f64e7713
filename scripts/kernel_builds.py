"""The builds of the CUDA kernels that a launcher asks for, and what a turn of their loops reads."""

import re
from itertools import product
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "raw_kernels"
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
FORMATS_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
FORMATS_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
FLOATS = ("F16", "BF16", "F32")
PRECISIONS = tuple(product((1, 2), (1, 2)))  # (PLANES, TOKEN_TILES)


def shipped():
    """(file, defines) of every build that a launcher will ask for."""
    plain = [(name, ()) for name in ("accept", "argmax", "check_finite", "delta_gates", "dynamic_conv",
                                     "elementwise", "gated_rms_norm", "l2_norm", "recurrent_open",
                                     "rms_norm", "selector", "top_k")]
    plain += [("delta_rule", ("K_DIM=128",)), ("short_conv", ("TAPS=4",))]
    plain += [("rope", (f"SPLIT_HALF={half}",)) for half in (0, 1)]
    plain += [("kv_write", (f"KV_BITS={bits}",)) for bits in (16, 32)]
    plain += [(name, (f"HEAD_DIM={d}", f"KV_BITS={bits}"))
              for name, d, bits in product(("attention", "attention_prefill", "attention_span"),
                                           (64, 128, 256), (16, 32))]
    plain += [("embed_rows", (f"FORMAT={f}",)) for f in (*FORMATS_32, *FORMATS_256, *FLOATS)]
    plain += [("retile", (f"FORMAT={f}", f"TILE_ROWS={rows}"))
              for formats, rows in ((FORMATS_32, 32), (FORMATS_256, 16)) for f in formats]
    plain += [("matmul_float", (f"FORMAT={f}", f"TOKENS={tokens}", "SLICES=8"))
              for f, tokens in product(FLOATS, (1, 2, 4, 8, 16))]
    plain += [(name, (f"LAYOUT={layout}", f"PLANES={planes}", f"TOKEN_TILES={tiles}"))
              for name, layout, planes, tiles in product(("norm_quantize", "glu_quantize"), (32, 256),
                                                         (1, 2), (1, 2, 4))]
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
    """Name of a build in reports and records."""
    return " ".join([file, *(d.split("=")[1] if d.startswith("FORMAT") else d for d in defines)])


def weight_loop(file, defines, arch):
    """What one unit of a product's loop over K is made of, or None for other kernels.

    Returns
    -------
    opcode : str
        The multiply instruction of the loop.
    n_multiplies, weight_bytes, other_bytes : int, int, float
        Of one unit and one warp; activations shared by the warps of a block are counted in parts.
    """
    if not file.startswith(("matmul_", "prefill_")):
        return None
    value = dict(d.split("=") for d in defines)
    if file == "matmul_float":
        tokens, size = int(value["TOKENS"]), 4 if value["FORMAT"] == "F32" else 2
        return "FFMA", 16 // size * tokens, 512, 16 / size * 4 * tokens
    planes, tiles = int(value["PLANES"]), int(value["TOKEN_TILES"])
    tokens, groups = 8 * tiles, int(value["ROW_GROUPS"])
    fmt = _format(value["FORMAT"])
    wide, narrow = (1, 1) if int(arch) >= 80 else (4, 2)  # sm_75 has 8-row steps of 16 values
    if file.endswith("q32"):
        other = (32 * planes + 12) * tokens
        return "IMMA", 2 * tiles * planes * wide, fmt["kTileBytes"], other / groups
    row_tiles = int(value["ROW_TILES"])
    main = 8 * wide if fmt["kSub"] == 32 else 16 * narrow
    extra = 2 * narrow * (bool(fmt["kHasMin"]) + bool(fmt["kBias"]))
    other = (256 * planes + 32 * planes * bool(extra) + 6) * tokens
    return ("IMMA", (main + extra) * planes * tiles * row_tiles, fmt["kTileBytes"] * row_tiles,
            other / groups)


def _format(name):
    """Constants of a format's struct in common/formats*.cuh."""
    text = "".join(path.read_text() for path in sorted((KERNELS / "common").glob("formats*.cuh")))
    struct = re.search(rf"^struct {name} {{.*?static __device__", text, re.S | re.M)[0]
    found = dict(re.findall(r"(k\w+) = (-?\d+|true|false)", struct))
    return {key: {"true": 1, "false": 0}.get(v) if v in ("true", "false") else int(v)
            for key, v in found.items()}
