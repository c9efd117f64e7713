"""Compare the engine with exact-weight logits, and say precisely how it failed when it did."""

import numpy as np

import cudflash


def load_engine(path, **options):
    """`cudflash.load` on the CPU; `options` are its keyword arguments."""
    return cudflash.load(str(path), device="cpu", **options)


def relative_rms(found, expected):
    """sqrt(sum (found - expected)^2 / sum expected^2), in float64."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.sum((found - expected) ** 2) / np.sum(expected**2)))


def assert_close(found, expected, atol, what):
    """Fail unless every element is within `atol`; name the worst one and the share of the bound."""
    found, expected = _same_shape(found, expected, what)
    off = np.abs(found - expected)
    worst = np.unravel_index(np.argmax(off), off.shape)
    assert off[worst] <= atol, (
        f"{what}: shape {found.shape}, largest difference {off[worst]:.3e} at {_index(worst)} "
        f"(found {found[worst]:.6f}, expected {expected[worst]:.6f}), "
        f"{off[worst] / atol:.0%} of the bound {atol:g}; "
        f"relative RMS {relative_rms(found, expected):.2e}"
    )


def assert_relative_rms(found, expected, bound, what):
    """Fail unless the relative RMS difference is within `bound`."""
    found, expected = _same_shape(found, expected, what)
    value = relative_rms(found, expected)
    per_row = np.sqrt(np.sum((found - expected) ** 2, -1) / np.sum(expected**2, -1)).reshape(-1)
    assert value <= bound, (
        f"{what}: shape {found.shape}, relative RMS {value:.3e}, {value / bound:.0%} of the bound "
        f"{bound:g}; worst row {np.argmax(per_row)} has {per_row.max():.3e}, "
        f"best row {np.argmin(per_row)} has {per_row.min():.3e}"
    )


def assert_clear_ids(logits, ids, margins, smallest, what):
    """Fail where argmax differs from `ids` although the recorded margin is above `smallest`.

    Parameters
    ----------
    logits : ndarray of shape (n, V)
    ids, margins : ndarray of shape (n,)
        Recorded best token, and its lead over the second.

    Returns
    -------
    int
        How many ids were clear enough to be compared.
    """
    found = np.argmax(logits, axis=-1)
    clear = np.asarray(margins) > smallest
    wrong = np.flatnonzero(clear & (found != np.asarray(ids)))
    assert wrong.size == 0, (
        f"{what}: step {wrong[0]} gives token {found[wrong[0]]}, recorded is {ids[wrong[0]]} "
        f"with a margin of {margins[wrong[0]]:.4f} (compared above {smallest:g}); "
        f"{wrong.size} of {clear.sum()} clear steps differ"
    )
    return int(clear.sum())


def answer_tokens(engine, prompt, n_tokens):
    """Greedy answer of `engine` to token ids `prompt`, without its end-of-generation token."""
    from cudflash.sampling import SamplingConfig

    result = engine.generate(
        [int(t) for t in prompt], max_tokens=n_tokens, sampling=SamplingConfig(temperature=0.0)
    )
    return until_end(result.tokens, engine.tokenizer.eog_ids)


def until_end(ids, eog_ids):
    """Ids before the first end-of-generation token: the recorded runs went on past it."""
    ids = [int(i) for i in ids]
    return next((ids[:n] for n, i in enumerate(ids) if i in eog_ids), ids)


def _same_shape(found, expected, what):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    assert np.isfinite(found).all(), f"{what}: {np.sum(~np.isfinite(found))} values are not finite"
    return found, expected


def _index(worst):
    return "(" + ", ".join(str(int(i)) for i in worst) + ")"
