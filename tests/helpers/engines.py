"""Engines on the tiny recorded targets, loaded once per setting."""

from functools import cache
from unittest import mock

import cudflash
from cudflash import defaults
from tests.helpers.vectors import target_case

SMALL_ROWS = 8  # prefill rows small enough that the rings of the tiny targets wrap


@cache
def engine(arch, variant="kq", *, rows=defaults.PREFILL_ROWS, **settings):
    """Load a tiny target; ``rows`` is the largest prefill chunk."""
    settings.setdefault("n_ctx", 512)
    settings.setdefault("device", "cpu")
    with mock.patch.object(defaults, "PREFILL_ROWS", rows):
        return cudflash.load(target_case(arch, variant).path, **settings)


def greedy(engine_or_session, prompt, max_tokens, **options):
    """Greedy answer to token ids."""
    sampling = cudflash.SamplingConfig(temperature=0)
    answer = engine_or_session.generate(
        prompt, max_tokens=max_tokens, sampling=sampling, **options
    )
    return answer if isinstance(answer, cudflash.Result) else answer.result()
