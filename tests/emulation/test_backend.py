"""The whole CUDA backend on the emulated device: models and drafted answers have the CPU's bits.

The op set, its buffers, launches and graphs are the shipped ones; only ``cupy.cuda`` is a stand-in
(cuda.py), which runs the shipped kernels.
"""

import gc

import numpy as np
import pytest

import cudflash
from cudflash import defaults
from cudflash.errors import DeviceError, UsageError
from cudflash.events import RoundFinished
from cudflash.model.outcome import outcome_words
from cudflash.ops import cpu
from scripts.device import twins
from tests.emulation.cuda import emulated_ops
from tests.emulation.host_module import unavailable
from tests.helpers.draft_vectors import draft_case
from tests.helpers.emulated import both, emulated_engine
from tests.helpers.hybrid_model import hybrid_path
from tests.helpers.ops_checks import assert_same_bits
from tests.helpers.vectors import target_case

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

GREEDY = cudflash.SamplingConfig(temperature=0)
SAMPLED = cudflash.SamplingConfig(temperature=0.9)
PROMPT = [7, 3, 250, 11, 42, 42, 9, 100, 5, 31, 77, 12]


def answers(pair, **options):
    """The same answer from both backends."""
    options = {"max_tokens": 6, "seed": 3, **options}
    return [engine.generate(PROMPT, **options) for engine in (pair.cuda, pair.cpu)]


def assert_same_answer(found, expected):
    """Tokens, log-probabilities and the bits of the rows they were decided from."""
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs
    assert found.row_digests == expected.row_digests and found.row_digests


@pytest.mark.parametrize("arch, variant, settings", [
    ("llama", "kq", {}), ("llama", "leg", {"activations": "int8"}), ("qwen2", "kq", {}),
    ("qwen3", "kq", {"kv_type": "f32"}), ("gemma3", "kq", {"rows": 8}),
    ("muse-glimmer", "kq", {"rows": 24}), ("muse-glimmer", "f32", {}), ("qwen35", "kq", {"rows": 24}),
    ("qwen35", "f32", {"kv_type": "f32"})])
def test_model_has_the_cpus_bits(arch, variant, settings):
    """A wrong launch: a buffer, stride, scale, window, layout or order that only the device has."""
    pair = both(target_case(arch, variant).path, **settings)
    ids = np.random.default_rng(1).integers(0, pair.cpu.config.vocab_size, 21)
    assert_same_bits(pair.cuda.logits(ids), pair.cpu.logits(ids))
    assert_same_answer(*answers(pair, sampling=SAMPLED, logprobs=2, row_digests=True))


@pytest.mark.parametrize("name, variant, settings", [
    ("v1-muse-swa", "f32", {"draft_sink": 0}), ("v1-qwen3-full", "kq", {}),
    ("v2-muse-full", "kq", {"full_block": False}), ("v2-muse-full", "kq", {"rows": 8}),
    ("v1-qwen3-full", "kq", {"draft_activations": "int8x2"}),
    ("v2-muse-full", "kq", {"draft_activations": "int8x2", "rows": 8}),
    ("v2-qwen35-mixed", "kq", {"draft_sink": 0, "rows": 8})])
def test_drafted_rounds_have_the_cpus_bits(name, variant, settings):
    """A draft pass, context row, sink or selector that differs; rounds in another order."""
    case = draft_case(name)
    pair = both(target_case(case.target, variant).path, case.directory, **settings)
    found, expected = answers(pair, sampling=GREEDY, speculative="on", max_tokens=7, logprobs=1,
                              row_digests=True)
    assert_same_answer(found, expected)
    records = [[(r["drafted"], r["accepted"]) for r in a.receipt["speculative"]["trace"]]
               for a in (found, expected)]
    assert records[0] == records[1] and records[0]
    block = [e.draft_block(e.taps(PROMPT, case_taps(e)), 5) for e in (pair.cuda, pair.cpu)]
    for field in ("context_k", "context_v", "hidden", "logits"):
        assert_same_bits(getattr(block[0], field), getattr(block[1], field))


def case_taps(engine):
    """Layers that the loaded draft reads."""
    return engine.draft_config.taps


def test_rounds_drafted_by_the_targets_own_block_have_the_cpus_bits():
    """A hidden row carried over wrongly, a step of the chain at another position, a state that keeps
    rejected rows."""
    pair = both(hybrid_path(), drafter="mtp", rows=24)
    found, expected = answers(pair, sampling=GREEDY, speculative="on", max_tokens=7, row_digests=True)
    assert_same_answer(found, expected)
    records = [[(r["drafted"], r["accepted"]) for r in a.receipt["speculative"]["trace"]]
               for a in (found, expected)]
    assert records[0] == records[1] and any(drafted for drafted, _ in records[0])
    sampled = answers(pair, sampling=SAMPLED, speculative="on", accept="ratio", max_tokens=5,
                      row_digests=True)
    assert_same_answer(*sampled)


def test_sessions_of_a_hybrid_go_back_to_the_cpus_state():
    """A checkpoint that is copied from or to another slot, or of another position."""
    pair, found = both(hybrid_path(mtp=False), rows=16), []
    for engine in (pair.cuda, pair.cpu):
        session = engine.session()
        for prompt in (PROMPT * 3, PROMPT * 2 + [1, 2], PROMPT * 3):
            answer = session.generate(prompt, max_tokens=4, sampling=GREEDY, row_digests=True).result()
            found.append((answer.tokens, answer.row_digests, answer.usage.cached_tokens))
    assert found[:3] == found[3:] and found[2][2] == 24
    assert found[2][:2] == found[0][:2]


@pytest.mark.parametrize("arch, length", [("muse-glimmer", 3), ("muse-glimmer", 15), ("qwen35", 7)])
def test_verify_widths_have_the_cpus_bits_and_keep_accepted_rows(arch, length):
    """A graph of one width replayed for another; rows of a rejected draft that stay visible."""
    path = target_case(arch, "kq").path
    plain = cudflash.load(path, device="cpu", threads=1, n_ctx=256).generate(
        PROMPT, max_tokens=24, sampling=GREEDY)
    drafter = cudflash.drafters.Cycle(plain.tokens, (length, 0, 2))
    engine, _ = emulated_engine(path, drafter=drafter)
    found = engine.generate(PROMPT, max_tokens=24, sampling=GREEDY, speculative="on",
                            verify_length=length)
    assert found.tokens == plain.tokens
    assert found.stats["speculative"]["accepted"] > 0


def test_graphs_change_nothing_and_are_replayed():
    """--no-graph with other bits; a graph that is recorded anew each round, or never used."""
    path, digests = target_case("qwen3", "kq").path, []
    for graphs in (True, False):
        engine, device = emulated_engine(path, graphs=graphs)
        answer = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY, row_digests=True)
        digests.append(answer.row_digests)
        counts = device.calls.counts
        if graphs:  # the first decoding step runs plainly, the second records, all later ones replay
            assert counts["graphInstantiate"] == 1 and counts["graphLaunch"] == 6
        else:
            assert counts["graphInstantiate"] == counts["graphLaunch"] == 0
        assert engine.receipt({})["kernel_path"] == f"sm_90, {'' if graphs else 'no '}graphs"
    assert digests[0] == digests[1]


def test_plain_step_moves_two_small_buffers():
    """Logits or whole rows that travel to the host at every token of a greedy answer."""
    engine, device = emulated_engine(target_case("llama", "kq").path)
    runtime, before = device.runtime, None
    for index, _ in enumerate(engine.session().generate(PROMPT, max_tokens=5, sampling=GREEDY)):
        if index >= 2:
            now = device.calls.counts["memcpyAsync"], runtime.n_copied
            if before is not None and device.calls.counts["graphLaunch"]:
                assert now[0] - before[0] <= 2 and now[1] - before[1] <= 2 * 4 * 256 + 8
            before = now


@pytest.mark.parametrize("kind", ["v1-muse-swa", "v2-muse-full", "v2-qwen35-mixed", "mtp"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafted_round_makes_one_small_copy_to_the_host(kind, sampling):
    """A host that waits for the drafts before the target may see them; whole rows that travel."""
    if kind == "mtp":
        pair = both(hybrid_path(), drafter="mtp")
    else:
        case = draft_case(kind)
        pair = both(target_case(case.target, "kq").path, case.directory,
                    draft_sink=0 if "qwen35" in kind else None)
    driver, copies, found = pair.cuda.ops.driver, [], []
    options = {"max_tokens": 9, "sampling": sampling, "seed": 3, "speculative": "on",
               "ignore_eos": True}
    runtime = pair.device.runtime
    for event in pair.cuda.session().generate(PROMPT, **options):
        if isinstance(event, RoundFinished):
            copies.append((driver.n_copies_out, runtime.n_copied))
            found.append(event.record)
    small = 4 * outcome_words(defaults.LOGIT_ROWS)
    assert len(found) > 2 and any(record.drafted for record in found)
    for (before, after) in zip(copies, copies[1:]):
        assert after[0] - before[0] == 1
        assert after[1] - before[1] <= small + 8192  # both ways: ids, positions and spans go down
    expected = pair.cpu.generate(PROMPT, **options)
    assert [record.to_dict() for record in found] == expected.speculation["trace"]


def test_pause_of_a_closed_gate_makes_one_small_copy_a_round():
    """Rows kept for the draft that travel to the host and back, at every token of a pause."""
    case = draft_case("v1-muse-swa")
    pair = both(target_case(case.target, "kq").path, case.directory, rows=64)
    options = {"max_tokens": 70, "sampling": GREEDY, "speculative": "auto", "ignore_eos": True,
               "verify_length": 3}
    driver, copies, found = pair.cuda.ops.driver, [], []
    for engine in (pair.cuda, pair.cpu):  # times would decide otherwise
        engine.__dict__["round_costs"] = None
    for event in pair.cuda.session().generate(PROMPT, **options):
        if isinstance(event, RoundFinished):
            copies.append(driver.n_copies_out)
            found.append(event.record)
    paused = [i for i, record in enumerate(found) if record.skipped == "gate"]
    assert paused, "the gate stayed open: nothing was tested"
    assert [copies[i] - copies[i - 1] for i in paused[1:]] == [1] * (len(paused) - 1)
    assert [r.to_dict() for r in found] == pair.cpu.generate(PROMPT, **options).speculation["trace"]


def test_memory_is_what_plan_says_and_all_of_it_comes_back():
    """Memory that plan does not know; arrays, graphs or page-locked memory that outlive the engine."""
    case = draft_case("v2-muse-full")
    path = target_case(case.target, "kq").path
    for _ in range(3):
        engine, device = emulated_engine(path, case.directory)
        session = engine.session()
        # every array counts its bytes; pieces are whole pages of 2 MiB, two of them begun at most
        arrays = engine.allocator.total + engine.draft.allocator.total + engine.plan.workspace
        arrays += session._runner.allocator.total
        arrays += session._drafter.drafter.runner.allocator.total
        assert abs(arrays - engine.plan.total) <= 0.01 * engine.plan.total
        assert engine.plan.total <= device.used + (1 << 20) <= engine.plan.total + (6 << 20)
        before = device.used
        session.generate(PROMPT, max_tokens=4, sampling=GREEDY, speculative="on").result()
        assert device.used <= before
        engine.close()
        del session
        gc.collect()
        assert device.used == 0 and not device.runtime.executables and not device.runtime.graphs
        assert len(device.runtime.events) == 0 and device.runtime.n_pinned == 1  # the driver's own
        del engine
        gc.collect()
        assert not device.runtime.streams and device.runtime.n_pinned == device.driver.n_modules == 0


def test_plan_for_a_card_needs_no_card():
    """A plan that can only be made where the model would run, or that has the CPU's sizes."""
    path = target_case("llama", "kq").path
    plan = cudflash.plan.plan(path, device="cuda", n_ctx=256)
    engine, _ = emulated_engine(path)
    assert plan == engine.plan
    assert plan.embedding > 0 and plan.mapped == 0 and plan.workspace > 0


def test_scratch_of_ops_is_there_before_the_first_pass():
    """An allocation in the middle of an answer, which fails when the card is full."""
    engine, device = emulated_engine(target_case("gemma3", "kq").path, rows=8)
    session = engine.session()
    before = device.calls.counts["malloc"]
    session.generate(PROMPT, max_tokens=4, sampling=GREEDY).result()
    assert device.calls.counts["malloc"] == before


@pytest.mark.parametrize("case", ["product Q4_K M=1 ", "product Q4_K M=17", "attention M=16 f32",
                                  "attention M=20", "attention_span", "selection", "delta norms",
                                  "delta state"])
def test_launches_are_clean_in_the_checking_build(case):
    """Scratch, strides or a grid of the op set with which a kernel leaves its arrays, or races."""
    ops, _ = emulated_ops(mode="check", schedule="random", seed=3)
    (run,) = (run for name, run in twins.cases(few=True) if name.startswith(case))
    for found, expected in zip(run(ops), run(cpu)):
        assert_same_bits(ops.download(found), cpu.download(expected))


def test_scratch_that_is_too_small_is_seen_by_the_checking_build(monkeypatch):
    """A check of bounds that takes every address for a good one."""
    ops, _ = emulated_ops(mode="check")

    def halved(*needs):
        return [ops.empty((shape[0], *shape[1:-1], shape[-1] // 2), t) for shape, t in needs]

    monkeypatch.setattr(ops, "workspace", halved)
    with pytest.raises(DeviceError, match="attention"):
        twins.attention(ops, 1)


def test_rows_are_moved_on_the_device_and_only_as_they_are():
    """A way through the host, which waits for everything; a copy into the gaps between rows."""
    ops, device = emulated_ops()
    source = ops.upload(np.arange(12, dtype=np.float32).reshape(3, 4))
    to = ops.zeros((3, 4), np.float32)
    before = ops.driver.n_copies_out
    ops.move(to[1], source[2])
    assert ops.driver.n_copies_out == before
    assert ops.download(to).tolist() == [[0] * 4, [8, 9, 10, 11], [0] * 4]
    for wrong in (source[:2], source.view(np.int32), source[:, :2]):
        with pytest.raises(UsageError, match="move"):
            ops.move(to if wrong.shape != (3, 2) else to[:, :2], wrong)
