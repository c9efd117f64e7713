"""The order of runs, what is taken down, comparisons of answers: on a tiny model."""

from collections import defaultdict

import pytest

from cudflash.bench.lanes import Lane, choose_lanes, make_scripted
from cudflash.bench.prompts import Item
from cudflash.bench.runner import Bench, Group, Settings, measure_verify_cost, verify_curve
from cudflash.bench.statistics import cells, pool
from cudflash.drafters import AlwaysWrong, KeepK, Oracle, TokenDrafter
from cudflash.errors import UsageError
from cudflash.sampling import SamplingConfig
from cudflash.spec.proposals import POINT_MASS, Proposal
from cudflash.spec.verify_length import covering
from tests.helpers.engines import engine
from tests.helpers.speculation import draft_engine

ORACLE, KEEP, WRONG = (Lane(n, 3, "match", True, "on") for n in ("oracle", "keep-2", "wrong"))


def items(n=2):
    return [Item("prose", i, 0, "natural", "", tuple(range(5 + i, 25 + i))) for i in range(n)]


def measured(lanes, n_items=2, **settings):
    """A finished bench on the tiny llama."""
    settings = {"n_tokens": 13, "repetitions": 2, "stops": ("forced",), **settings}
    bench = Bench(Settings(**settings), items(n_items))
    bench.run(Group(engine("llama", threads=1), "none", lanes))
    return bench


def test_lanes_take_turns_and_the_next_prompt_begins_with_the_other():
    """All plain runs first: a machine that warms up, or cools down, then decides the ratio."""
    bench = measured((ORACLE,), n_items=2)
    order = [(run["prompt"], run["repetition"], run["lane"]) for run in bench.runs]
    a, b = "plain", "oracle k3"
    assert order == [(0, 0, a), (0, 0, b), (0, 1, b), (0, 1, a),
                     (1, 0, b), (1, 0, a), (1, 1, a), (1, 1, b)]  # fmt: skip
    assert [run["order"] for run in bench.runs] == [0, 1] * 4
    assert all(run["exact"] for run in bench.runs) and not bench.differences


def test_counters_of_a_script_are_those_counted_by_hand():
    """Counters that are near the truth: 12 tokens after the first, two right of three per round.

    Rounds emit 3 each; the last may draft only 2 (3 tokens are left, one of them the target's).
    """
    bench = measured((KEEP, WRONG, ORACLE), repetitions=1)
    found = defaultdict(list)
    for run in bench.runs:
        assert run["decode_tokens"] == 12 and run["n_tokens"] == 13
        if run["counts"]:
            found[run["lane"]].append(run["counts"])
    keep, wrong, oracle = (pool(found[name]) for name in ("keep-2 k3", "wrong k3", "oracle k3"))
    assert keep["rounds"] == keep["draft_rounds"] == 2 * 4
    assert (keep["drafted"], keep["tested"], keep["accepted"]) == (22, 22, 16)
    assert (keep["corrected"], keep["bonus"], keep["emitted"]) == (6, 2, 24)
    assert (keep["proposed_at"], keep["accepted_at"]) == ([8, 8, 6], [8, 8, 0])
    # one token a round, 12 rounds; the last one has no room for a draft
    assert (wrong["rounds"], wrong["accepted"], wrong["corrected"]) == (24, 0, 22)
    assert (wrong["plain_rounds"], wrong["skipped"] if "skipped" in wrong else None) == (2, None)
    assert (oracle["rounds"], oracle["accepted"], oracle["bonus"]) == (6, 18, 6)
    by_lane = {cell["lane"]: cell["acceptance"] for cell in cells(bench.runs)}
    assert by_lane["keep-2 k3"]["length"] == 3.0 and by_lane["wrong k3"]["length"] == 1.0
    assert by_lane["oracle k3"]["length"] == 4.0


def test_plain_model_without_a_draft():
    """A bench that needs a draft to show plain figures."""
    bench = measured(())
    assert {run["lane"] for run in bench.runs} == {"plain"} and len(bench.runs) == 4
    (cell,) = cells(bench.runs)
    assert cell["tps"] > 0 and cell["speedup"] is None and cell["exact"] is True


def test_stop_modes_are_runs_of_their_own():
    """Forced and natural answers in one figure."""
    bench = measured((), stops=("natural", "forced"), repetitions=1)
    assert [run["stop"] for run in bench.runs] == ["natural"] * 2 + ["forced"] * 2


def test_difference_is_found_and_placed(monkeypatch):
    """A pair of answers that differs and is averaged like any other.

    The fault is injected: token 4 of the drafted answers of prompt 1 is another one.
    """
    answer = Bench._answer

    def altered(self, group, lane, ids, *args, **kwargs):
        from dataclasses import replace

        result = answer(self, group, lane, ids, *args, **kwargs)
        if lane.drafter == "plain" or ids != items()[1].ids:
            return result
        tokens = (*result.tokens[:4], result.tokens[4] ^ 1, *result.tokens[5:])
        return replace(result, tokens=tokens)

    monkeypatch.setattr(Bench, "_answer", altered)
    bench = measured((ORACLE,))
    wrong = [run for run in bench.runs if run["exact"] is False]
    assert len(wrong) == len(bench.differences) == 2
    assert {(run["prompt"], run["lane"]) for run in wrong} == {(1, "oracle k3")}
    first = bench.differences[0]
    assert first["first_difference"] == 4 and first["found"] == first["expected"] ^ 1
    exact = {cell["lane"]: cell["exact"] for cell in cells(bench.runs)}
    assert exact == {"plain": True, "oracle k3": False}


def test_ratio_is_compared_with_itself():
    """Sampled answers under ratio, which need not be plain ones, called different; or unchecked."""
    sampling = SamplingConfig(temperature=0.9)
    lanes = tuple(Lane("random", 3, rule, True, "on") for rule in ("match", "ratio"))
    bench = measured(lanes, sampling=sampling)
    assert not bench.differences
    by_lane = defaultdict(set)
    for run in bench.runs:
        by_lane[run["lane"]].add(run["exact"])
    assert by_lane == {"plain": {True}, "random k3": {True}, "random k3 ratio": {None}}


def test_interrupted_bench_keeps_finished_runs():
    """A Ctrl-C that takes an hour of measurements with it."""
    said = []

    def tell(text):
        said.append(text)
        if len(said) == 6:  # two of the warm-up, the script, two runs; the third is to begin
            raise KeyboardInterrupt

    bench = Bench(Settings(n_tokens=8, stops=("forced",)), items(), tell=tell)
    with pytest.raises(KeyboardInterrupt):
        bench.run(Group(engine("llama", threads=1), "none", (ORACLE,)))
    assert len(bench.runs) == 2
    assert cells(bench.runs)[0]["answers"] == 1


def test_warm_up_is_in_no_run():
    """The first, slow answers of a lane among the measured ones."""
    said = []
    bench = Bench(Settings(n_tokens=4, repetitions=1), items(1), tell=said.append)
    bench.run(Group(engine("llama", threads=1), "none", (ORACLE,)))
    assert said[:2] == ["warm-up: plain", "warm-up: oracle k3"]
    assert len(bench.runs) == 2


def test_verify_cost_covers_1_to_16_and_leaves_nothing():
    """A curve that lacks a width, or a pass that stays in somebody's cache."""
    one = engine("llama", threads=1)
    costs = measure_verify_cost(one, 20, trials=3)
    assert [cost["m"] for cost in costs] == list(range(1, 17))
    assert all(len(cost["ms"]) == 3 and cost["depth"] == 20 for cost in costs)
    curve = verify_curve(costs)
    assert curve[0][0] == 1 and curve[0][2] == 1.0 and all(ms > 0 for _, ms, _ in curve)
    before = one.generate([1, 2, 3], max_tokens=4, sampling=SamplingConfig(temperature=0)).tokens
    measure_verify_cost(one, 0, trials=1)
    assert one.generate([1, 2, 3], max_tokens=4,
                        sampling=SamplingConfig(temperature=0)).tokens == before  # fmt: skip


def test_lanes_of_drafts_and_scripts():
    """A lane on the wrong engine, or a length that a drafter cannot have and silently lacks."""
    blocks = {"dflash": 16, "dflash2": 8}
    kinds = list(blocks)
    lanes = choose_lanes([], kinds, [3, 7, 15], ["match"], blocks)
    assert [lane.name for lane in lanes["dflash"]] == ["dflash k3", "dflash k7", "dflash k15"]
    assert [lane.name for lane in lanes["dflash2"]] == ["dflash2 k3", "dflash2 k7"]
    lanes = choose_lanes(["dflash2", "oracle"], kinds, [], ["match", "ratio"], blocks)
    assert {k: [lane.name for lane in v] for k, v in lanes.items()} == {
        "dflash2": ["dflash2 k7", "dflash2 k7 ratio", "oracle k7", "oracle k7 ratio"]
    }
    assert choose_lanes(["keep-2"], [], [3], ["match"], {}) == {
        None: [Lane("keep-2", 3, "match", True, "on")]
    }
    both = choose_lanes(["dflash2"], kinds, [], ["match"], blocks, ["on", "auto"])
    assert [lane.name for lane in both["dflash2"]] == ["dflash2 k7", "dflash2 k7 auto"]
    with pytest.raises(UsageError, match="speculative is 'off'"):
        choose_lanes([], kinds, [], ["match"], blocks, ["off"])
    assert choose_lanes([], [], [], ["match"], {}) == {None: []}
    for wrong, words in (
        ((["eagle"], kinds, [], ["match"]), "drafter 'eagle' is not there.*dflash, dflash2"),
        ((["mtp"], kinds, [], ["match"]), "drafter 'mtp' is not there: .* no MTP block"),
        ((["keep-x"], kinds, [], ["match"]), "not there"),
        (([], kinds, [16], ["match"]), "is 16, .* 1 to 15 with the drafters dflash, dflash2"),
        ((["dflash2"], kinds, [15], ["match"]), "is 15, .* 1 to 7 with the drafter dflash2"),
        (([], kinds, [], ["often"]), "accept is 'often'"),
        ((["oracle", "oracle"], kinds, [], ["match"]), "twice"),
    ):
        with pytest.raises(UsageError, match=words):
            choose_lanes(*wrong, blocks)


def test_scripted_drafters_by_name():
    """A name that makes another script than it says."""
    ids = (1, 2, 3)
    assert type(make_scripted("oracle", ids)) is Oracle
    assert type(make_scripted("wrong", ids)) is AlwaysWrong
    kept = make_scripted("keep-2", ids)
    assert type(kept) is KeepK and kept._k == 2


def test_mtp_takes_any_length_beside_drafts():
    """The control of the seed (MTP at the depth of the draft) that cannot be asked for."""
    blocks = {"dflash2": 8}
    args = (["dflash2", "mtp"], ["dflash2"], [1, 2, 3, 5, 7], ["match"], blocks)
    lanes = choose_lanes(*args, has_mtp=True)["dflash2"]
    assert [lane.name for lane in lanes] == [
        *(f"dflash2 k{k}" for k in (1, 2, 3, 5, 7)),
        "mtp k1", "mtp k2", "mtp k3", "mtp k5", "mtp k7",
    ]  # fmt: skip
    assert [covering(k) for k in (1, 3, 4, 7, 8, 15)] == [3, 3, 7, 7, 15, 15]
    with pytest.raises(UsageError, match="no MTP block"):
        choose_lanes(*args)
    assert choose_lanes(["mtp"], [], [], ["match"], {}, has_mtp=True)[None][0].verify_length == 3
    for k in (0, 16):
        with pytest.raises(UsageError, match=f"is {k}, .* from 1 to 15 with the drafter mtp"):
            choose_lanes(["mtp"], [], [k], ["match"], {}, has_mtp=True)


def test_mtp_lane_keeps_its_drafter_and_its_conversation(monkeypatch):
    """A drafter made anew for each answer, or shown another lane's conversation."""
    made = []

    class Steps(TokenDrafter):
        name, block_size = "mtp", None

        def __init__(self, k):
            super().__init__()
            self.k = k
            made.append(k)

        def propose(self, anchor, n, context):
            return Proposal((anchor,) * min(n, self.k), POINT_MASS)

    one = engine("llama", threads=1)
    monkeypatch.setattr(one, "mtp_drafter", Steps, raising=False)
    bench = Bench(Settings(n_tokens=9, repetitions=1, stops=("forced",)), items())
    group = Group(one, "none", [Lane("mtp", k, "match", False, "on") for k in (2, 5)])
    bench.run(group)
    assert made == [2, 5] and not bench.differences
    proposed = {run["lane"]: len(run["counts"]["proposed_at"]) for run in bench.runs if run["counts"]}
    assert proposed == {"mtp k2": 2, "mtp k5": 5}
    assert len({id(group.session(lane)) for lane in group.lanes}) == 3


def test_draft_held_to_a_number_keeps_its_drafter_and_its_conversation():
    """Passes recorded anew in every answer of the lanes that no verify length fits, and timed."""
    one = draft_engine("v2-muse-full")
    bench = Bench(Settings(n_tokens=9, repetitions=2, stops=("forced",)), items())
    lanes = [Lane("dflash2", k, "match", False, "on") for k in (2, 3, 5)]
    group = Group(one, "dflash2", lanes)
    bench.run(group)
    assert not bench.differences
    kept = [group.drafter(lane) for lane in lanes]
    assert kept[1] is None and kept == [group.drafter(lane) for lane in lanes]
    sessions = [group.session(lane) for lane in group.lanes]
    assert len({id(session) for session in sessions}) == 4
    proposed = {run["lane"]: len(run["counts"]["proposed_at"]) for run in bench.runs if run["counts"]}
    assert proposed == {"dflash2 k2": 2, "dflash2 k3": 3, "dflash2 k5": 5}
    # nothing was recorded again: each drafter has seen every prompt in its own conversation
    assert all(drafter.length >= len(items()[0].ids) for drafter in (kept[0], kept[2]))
