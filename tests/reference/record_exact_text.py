"""Record, once, what exact-weight arithmetic says about the perplexity text of the real models.

    python -m tests.reference.record_exact_text

For every position of `ppl_ids` (tests/vectors/real/NAME.npz) the float64 reference gives the most
likely next token, its lead over the second, and the negative log-likelihood of the token that
follows. llama.cpp recorded only the last of the three, and for Gemma with GELU from a float16
table. The result is `tests/vectors/real/NAME-exact.npz`, a few tens of kilobytes; a minute or two
per model on two cores.
"""

import sys

import numpy as np

from tests.helpers.real_models import NAMES, find_model
from tests.helpers.vectors import ROOT, real_case
from tests.reference.forward import Reference

_ROWS_AT_ONCE = 100  # logits of 100 x 262144 float64: 210 MB


def record(name):
    """Run the reference over the text of model `name` and return the arrays to store."""
    ids = real_case(name)["ppl_ids"]  # (2000,)
    reference = Reference(find_model(name))
    leaving = reference.forward(ids, logit_rows=[]).layer_inputs[-1]  # (2000, C)
    n_predicted = len(ids) - 1
    top1 = np.empty(n_predicted, np.int32)
    margin = np.empty(n_predicted, np.float32)
    nll = np.empty(n_predicted, np.float64)
    for first in range(0, n_predicted, _ROWS_AT_ONCE):
        rows = slice(first, min(first + _ROWS_AT_ONCE, n_predicted))
        logits = reference.head(leaving[rows])  # (rows, V)
        second, best = np.partition(logits, -2, axis=1)[:, -2:].T
        top1[rows] = logits.argmax(axis=1)
        margin[rows] = best - second
        log_sum = best + np.log(np.exp(logits - best[:, None]).sum(axis=1))
        following = ids[first + 1 : rows.stop + 1]
        nll[rows] = log_sum - logits[np.arange(len(following)), following]
    return {"ppl_top1": top1, "ppl_margin": margin, "ppl_nll": nll}


def main():
    """Record every model that is there."""
    for name in NAMES:
        if find_model(name) is None:
            print(f"{name}: no model file, nothing recorded", file=sys.stderr)
            continue
        arrays = record(name)
        np.savez_compressed(ROOT / "real" / f"{name}-exact.npz", **arrays)
        off = np.abs(arrays["ppl_nll"] - real_case(name)["deq/ppl_nll"]).max()
        ppl = np.exp(arrays["ppl_nll"].mean())
        print(f"{name}: perplexity {ppl:.6f}; largest difference from llama.cpp's nll {off:.2e}")


if __name__ == "__main__":
    main()
