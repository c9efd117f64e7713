"""What tests of drafted answers share: scripted drafters, plain answers, engines with drafts."""

from functools import cache

import cudflash
from cudflash.drafters import AlwaysWrong, Cycle, KeepK, Oracle, Random
from tests.helpers.draft_vectors import draft_case
from tests.helpers.engines import engine
from tests.helpers.vectors import target_case

GREEDY = cudflash.SamplingConfig(temperature=0)
SAMPLED = cudflash.SamplingConfig(temperature=0.8)
LENGTHS = (3, 7, 15)
SCRIPTED = {
    "oracle": Oracle,
    "always-wrong": AlwaysWrong,
    "keep-k": lambda ids: KeepK(ids, 2),
    "cycle": lambda ids: Cycle(ids, (15, 0, 3, 1)),
    "random": lambda ids: Random(5),
}
ROWS = 16  # the largest verify block: with no larger chunks the rings of the tiny targets wrap


def long_engine(arch):
    """A tiny target with room for 2,000 tokens; one thread, whose barriers cost nothing."""
    return engine(arch, n_ctx=2100, rows=ROWS, threads=1)


@cache
def plain_answer(one, prompt, sampling, **options):
    """Plain decoding; ids of the prompt as a tuple."""
    return one.generate(list(prompt), sampling=sampling, seed=4, speculative="off", **options)


def same_answer(drafted, plain):
    """Everything an answer consists of is equal."""
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert drafted.logprobs == plain.logprobs
    assert drafted.usage == plain.usage
    assert (drafted.finish_reason, drafted.stopped_by) == (plain.finish_reason, plain.stopped_by)


@cache
def draft_engine(name, variant="f32", **settings):
    """A tiny target with one of the recorded drafts."""
    case = draft_case(name)
    settings = {"n_ctx": 512, "device": "cpu", "threads": 1, **settings}
    return cudflash.load(target_case(case.target, variant).path, case.directory, **settings)
