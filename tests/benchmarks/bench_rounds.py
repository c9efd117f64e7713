"""Round-level benchmarks on the embedded pair: step, verify blocks, draft pass, whole answers."""

from functools import cache

import numpy as np
import pytest

import cudflash
from cudflash.drafters import Oracle
from cudflash.model.draft_runner import DraftRunner
from cudflash.model.runner import ALL, Runner

N_CTX, DEPTH, TOKENS = 512, 256, 48
GREEDY = cudflash.SamplingConfig(temperature=0.0)
PROMPT = "def median(values):\n    \"\"\"Return the median of a list of numbers.\"\"\"\n"


@cache
def pair(kind="dflash2"):
    """The embedded pair on one thread."""
    demo = pytest.importorskip("cudflash.demo", reason="there is no embedded pair")
    target, drafts = demo.demo_files()
    return cudflash.load(target, drafts[kind], device="cpu", threads=1, n_ctx=N_CTX)


@cache
def runner():
    """A target with some context."""
    engine = pair()
    made = Runner(engine.ops, engine.model, engine.work, N_CTX, engine.kv_type)
    made.set_taps(engine.draft_config.taps)
    ids = [token % engine.config.vocab_size for token in range(1000, 1000 + DEPTH)]
    for start in range(0, DEPTH, made.max_rows):
        part = ids[start : start + made.max_rows]
        made.prefill_chunk(part, start + len(part) == DEPTH)
    return made


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def bench_verify(measured, rows):
    """One target pass with all logits and taps; M = 1 is a plain step."""
    one, ids = runner(), list(range(300, 300 + rows))

    def step():
        one.step(ids, ALL)
        one.rollback()

    measured(step, rows=rows, depth=DEPTH)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def bench_draft(measured, kind):
    """One draft pass over a full window of context."""
    engine = pair(kind)
    made = DraftRunner(engine.ops, engine.draft.model, engine.draft.work)
    config = engine.draft_config
    rows = engine.ops.upload(
        np.random.default_rng(0)
        .standard_normal((DEPTH, len(config.taps), engine.config.hidden_dim))
        .astype(np.float32)
    )
    made.observe(rows, DEPTH)
    length = config.block_size - 1
    measured(lambda: made.propose(5, length), kind=kind, depth=DEPTH, length=length)


@pytest.mark.parametrize("lane", ["plain", "oracle", "dflash2"])
def bench_answer(measured, lane):
    """An answer of 48 tokens: plain, with every draft right, with the draft as it is."""
    engine = pair()
    ids = engine.tokenizer.encode(PROMPT)
    plain = engine.generate(ids, max_tokens=TOKENS, sampling=GREEDY, speculative="off",
                            ignore_eos=True)  # fmt: skip
    options = {"speculative": "off"} if lane == "plain" else {"speculative": "on"}
    if lane != "plain":
        options["verify_length"] = 7
    if lane == "oracle":
        options["drafter"] = Oracle(plain.tokens)
    session = engine.session()

    def answer():
        result = session.generate(
            ids, max_tokens=TOKENS, sampling=GREEDY, ignore_eos=True, **options
        ).result()
        assert result.tokens == plain.tokens

    measured(answer, tokens=TOKENS, lane=lane)
