"""Every recorded llama.cpp chain, token for token, candidate list for candidate list."""

import numpy as np
import pytest

from cudflash.sampling import samplers as s
from cudflash.sampling.candidates import draw_index
from cudflash.sampling.floatmath import expf, logf
from cudflash.sampling.sorting import Ordering, heap_select, introsort
from tests.helpers.sampling_cases import apply_all, arrays, build, document

CASES = document("cases")
EXTRA = document("extra")["cases"]
LARGE = 5000  # above: chains without memory run once and only their draw is repeated


def _chains(name, agreed):
    return [
        c for c in CASES if c["logits"] == name and (c["independent_agreement"] == 1.0) == agreed
    ]


def test_no_recorded_case_is_left_out():
    """Catches a case dropped from the comparison: all 552 run, and none is excepted."""
    agreed = sum(c["independent_agreement"] == 1.0 for c in CASES)
    assert (len(CASES), agreed, len(CASES) - agreed) == (552, 495, 57)
    names = {c["logits"] for c in CASES}
    assert sum(len(_chains(n, a)) for n in names for a in (True, False)) == 552
    assert names == set(arrays("logits"))


@pytest.mark.parametrize("agreed", [True, False], ids=["unambiguous", "ties"])
@pytest.mark.parametrize("name", sorted(arrays("logits")))
def test_recorded_chains_are_reproduced(name, agreed):
    """Catches any departure from llama.cpp: order of samplers and sums, rounding, ties, draws.

    "ties" holds the cases where an implementation with stable sorting differs from llama.cpp:
    they pass only if libstdc++'s placement of equal logits is reproduced.
    """
    row = arrays("logits")[name]
    before = row.copy()
    faults = []
    for case in _chains(name, agreed):
        faults += _compare(case, row)
    assert faults == []
    np.testing.assert_array_equal(row.view(np.int32), before.view(np.int32))


def _compare(case, row):
    stages = build(case["chain"])
    tokens = arrays("draws")[case["key"] + "/tokens"]
    memory = any(isinstance(x, (s.Penalties, s.Xtc)) for x in stages)
    once = len(row) > LARGE and not memory
    faults = []
    for step, token in enumerate(tokens):
        if step == 0 or not once:
            candidates = apply_all(stages, row)
            weights = candidates.weights()
        elif isinstance(stages[-1], s.Dist):
            candidates.selected = draw_index(weights, stages[-1].rng.uniform_double())
        if candidates.id_at(candidates.selected) != token:
            faults.append((case["key"], step, "token"))
        for stage in stages:
            stage.accept(int(token))
        if step in (0, len(tokens) - 1):
            faults += _compare_list(case, candidates, step, isinstance(stages[-1], s.Dist))
    return faults


def _compare_list(case, candidates, step, has_p):
    key = f"{case['key']}/cand{step}"
    draws = arrays("draws")
    if key + "_id" not in draws:
        return []
    faults = []
    if not np.array_equal(candidates.ids[:256], draws[key + "_id"]):
        faults.append((case["key"], step, "ids"))
    if has_p and not np.array_equal(
        candidates.p[:256].view(np.int32), draws[key + "_p"].view(np.int32)
    ):
        faults.append((case["key"], step, "probabilities"))
    expected = case["n_final_candidates"], case["final_sorted"]
    if step == 0 and (len(candidates), candidates.sorted) != expected:
        faults.append((case["key"], step, "size or order flag"))
    return faults


@pytest.mark.parametrize("case", EXTRA, ids=lambda c: c["key"])
def test_dry_mirostat_bias_and_full_sorts(case):
    """Catches a wrong DRY match, breaker, mirostat update, or bucket sort: list, p and token."""
    recorded = {
        field: arrays("extra")[f"{case['key']}/{field}"]
        for field in ("tokens", "sizes", "ids", "probs")
    }
    base = arrays("extra")["logits/" + case["logits"]]
    stages = build(case["chain"])
    for token in case["prompt"]:
        for stage in stages:
            stage.accept(token)
    for step, token in enumerate(recorded["tokens"]):
        candidates = apply_all(stages, np.roll(base, case["shift"] * step))
        assert candidates.id_at(candidates.selected) == token, step
        assert len(candidates) == recorded["sizes"][step], step
        head = min(len(candidates), 8)
        np.testing.assert_array_equal(candidates.ids[:head], recorded["ids"][step][:head])
        if not isinstance(stages[-1], s.Greedy):
            np.testing.assert_array_equal(candidates.p[:head], recorded["probs"][step][:head])
        for stage in stages:
            stage.accept(int(token))


def test_dry_cases_differ_from_each_other():
    """Catches vectors that test nothing: DRY and each breaker set must change some token."""
    runs = [arrays("extra")[f"vocab/dry/{i}/tokens"].tolist() for i in range(3)]
    assert len({tuple(run) for run in runs}) == 3
    plain, dry = (arrays("extra")[f"n12/{key}/tokens"].tolist() for key in ("bias", "dry/0.8"))
    assert plain != dry


@pytest.mark.parametrize(
    "name", sorted(k[:-3] for k in arrays("cpp") if k.endswith("/in") and k[0] in "sp")
)
def test_sorts_place_equal_values_as_libstdcxx(name):
    """Catches a wrong pivot, scan, heap step or insertion order: compared with compiled C++."""
    values, expected = arrays("cpp")[name + "/in"], arrays("cpp")[name + "/out"]
    if name.startswith("partial"):
        np.testing.assert_array_equal(heap_select(values, len(expected)), expected)
        settled = Ordering(values, len(expected))
        tied = settled.tied(0, len(expected))
        settled.order[tied] = settled.exact(tied)
        np.testing.assert_array_equal(settled.order, expected)
        return
    np.testing.assert_array_equal(introsort(values), expected)
    some = np.arange(len(values) // 3, len(values), 7)
    np.testing.assert_array_equal(introsort(values, some), expected[some])


@pytest.mark.parametrize(("name", "function"), [("expf", expf), ("logf", logf)])
def test_float_functions_equal_glibc(name, function):
    """Catches a last-bit difference of the vectorised libm functions."""
    got = function(arrays("cpp")[name + "/in"])
    expected = arrays("cpp")[name + "/out"]
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def test_float_functions_at_their_ends():
    """Catches wrong limits: zero, subnormal, underflow, -inf, and the chunked path."""
    x = np.array([0, -0.0, -103.0, -104.0, -1e30, -np.inf], np.float32)
    assert expf(x).tolist() == [1, 1, np.float32(1.401298464324817e-45), 0, 0, 0]
    y = np.array([0, 1, 1.401298464324817e-45], np.float32)
    assert logf(y).tolist() == [-np.inf, 0, np.float32(-103.27893)]
    many = np.linspace(-20, 0, 20001, dtype=np.float32)
    pieces = np.concatenate([expf(many[i : i + 100]) for i in range(0, 20001, 100)])
    np.testing.assert_array_equal(expf(many), pieces)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("n", [1, 2, 300, 20000])
def test_float32_sum_of_doubles_equals_the_loop(n, scale):
    """Catches a shortcut of top-n-sigma's sum that rounds once where C++ rounds at each step."""
    rng = np.random.default_rng(n)
    deviation = (rng.standard_normal(n) * scale).astype(np.float32).astype(np.float64)
    deviation[: n // 3] = np.round(deviation[: n // 3] * 8 / scale) / 8 * scale  # exact halves
    terms = deviation * deviation
    acc = np.float32(0)
    for term in terms:
        acc = np.float32(np.float64(acc) + term)
    assert s.float32_sum_of_doubles(terms) == acc
