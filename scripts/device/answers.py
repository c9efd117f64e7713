"""Whole answers on the device against the CPU, on the recorded tiny pairs of the tests."""

import cudflash
from cudflash.device import Device
from cudflash.engine import Engine
from cudflash.pair import open_pair

PROMPT = [7, 3, 250, 11, 42, 42, 9, 100, 5, 31, 77, 12]


def pairs(device, cpu, sizes, few=False):
    """Greedy and sampled answers, plain and drafted: tokens and rows of logits."""
    from tests.helpers.draft_vectors import draft_case
    from tests.helpers.vectors import target_case

    rows, faults = [], []
    n_tokens = 6 if few else 48
    for name in sizes.pairs:
        case = draft_case(name)
        target = target_case(case.target, "kq").path
        engines = [_engine(ops, kind, target, case.directory)
                   for ops, kind in ((device, "cuda"), (cpu, "cpu"))]
        for temperature in (0.0,) if few else (0.0, 0.8):
            sampling = cudflash.SamplingConfig(temperature=temperature)
            options = {"max_tokens": n_tokens, "sampling": sampling, "seed": 4, "row_digests": True}
            plain = engines[1].generate(PROMPT, speculative="off", **options)
            for mode in ("off", "on"):
                found = engines[0].generate(PROMPT, speculative=mode, **options)
                same = (found.tokens, found.row_digests) == (plain.tokens, plain.row_digests)
                rows.append({"pair": name, "temperature": temperature, "speculative": mode,
                             "equal": same, "tokens": len(found.tokens)})
                if not same:
                    faults.append(f"{name}, temperature {temperature}, speculative {mode}: another "
                                  "answer than the CPU's plain one")
        engines[0].close()
    return {"rows": rows, "faults": faults}


def _engine(ops, kind, target, draft):
    pair = open_pair(target, draft, draft_window=None, draft_sink=None)
    return Engine(ops, pair, Device(kind, kind, "device check"), 256, "f16", "int8x2")
