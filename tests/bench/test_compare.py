"""Comparisons: what is refused, what is labelled, and ratios known by hand."""

from copy import deepcopy

import pytest

from cudflash.compare import OF_DRAFTING, Side, choose_sides, compare, differing, variables
from cudflash.errors import UsageError
from tests.helpers.bench_records import record, run, simple_record


def sides(a, b, **names):
    ((one, other),) = choose_sides(a, b, "a.json", "b.json", **names)
    return one, other


def with_k(made, k):
    """The same record with another verify length."""
    made = deepcopy(made)
    made["groups"][0]["lanes"][1] |= {"name": f"dflash2 k{k}", "verify_length": k}
    for one in made["runs"]:
        if one["lane"] != "plain":
            one["lane"] = f"dflash2 k{k}"
    return made


def test_one_variable_is_measured():
    """A ratio upside down, or one without an interval: 50 ms against 40 ms."""
    found = compare(*sides(simple_record(), with_k(simple_record(ms=40.0), 7)))
    assert found["differs"] == {"verify length": [3, 7]} and found["label"] == "measured"
    (cell,) = found["cells"]
    assert cell["prompts"] == 6 and cell["label"] == "measured" and cell["outputs_differ"] == 0
    assert cell["speed"] == pytest.approx(50 / 40, abs=1e-12)
    assert cell["speed_interval"] == pytest.approx((1.25, 1.25), abs=1e-12)
    assert cell["speedup"] == pytest.approx(1.25, abs=1e-12)  # plain decoding was as quick
    assert cell["length"] == 1.0 and found["drift"]["ratio"] == 1.0


def test_acceptance_lengths_are_pooled_over_prompts():
    """A mean of lengths, in which a short answer weighs as much as a long one."""
    better = simple_record(blocks=(3, 3, 3, 3))
    found = compare(*sides(simple_record(), with_k(better, 7)))
    assert found["cells"][0]["length"] == pytest.approx(4 / 2.5, abs=1e-12)


def test_two_variables_are_refused_and_listed():
    """A new drafter on a new build: the seed's comparison that proves nothing."""
    other = with_k(simple_record(ms=40.0), 7)
    other["versions"]["commit"] = "def"
    pair = sides(simple_record(), other)
    with pytest.raises(UsageError) as err:
        compare(*pair)
    words = str(err.value)
    assert "2 variables" in words and "cudflash: 1 abc and 1 def" in words
    assert "verify length: 3 and 7" in words and "--allow-confounded" in words
    found = compare(*pair, allow_confounded=True)
    assert found["label"] == "confounded" and found["cells"][0]["label"] == "confounded"
    assert found["cells"][0]["speed"] == pytest.approx(1.25, abs=1e-12)
    assert set(found["differs"]) == {"cudflash", "verify length"}


CHANGES = {
    "machine": lambda m: m["machine"].update(cpu="another"),
    "device": lambda m: m["groups"][0]["device"].update(name="another"),
    "kernel path": lambda m: m["groups"][0].update(kernel_path="generic"),
    "threads": lambda m: m["groups"][0].update(threads=2),
    "cudflash": lambda m: m["versions"].update(cudflash="2"),
    "numerics": lambda m: m["groups"][0].update(numerics="2"),
    "python": lambda m: m["versions"].update(python="4"),
    "numpy": lambda m: m["versions"].update(numpy="3"),
    "numba": lambda m: m["versions"].update(numba="1"),
    "target": lambda m: m["groups"][0]["target"].update(sha256="b" * 64),
    "activations": lambda m: m["groups"][0].update(activations="int8"),
    "draft activations": lambda m: m["groups"][0]["draft"].update(activations="int8x2"),
    "KV type": lambda m: m["groups"][0].update(kv_type="f32"),
    "context": lambda m: m["groups"][0].update(n_ctx=512),
    "sampling": lambda m: m["settings"].update(sampling={"temperature": 0.7}),
    "tokens per answer": lambda m: m["settings"].update(n_tokens=32),
    "draft": lambda m: m["groups"][0]["draft"].update(sha256="c" * 64),
    "draft window": lambda m: m["groups"][0]["draft"].update(
        window={"value": 32, "source": "override", "file_value": 64}),
    "draft sink": lambda m: m["groups"][0]["draft"].update(
        sink={"value": 0, "source": "override", "file_value": None}),
    "draft block": lambda m: m["groups"][0]["draft"].update(full_block=False),
    "verify length": lambda m: m["groups"][0]["lanes"][1].update(verify_length=7),
    "mode": lambda m: m["groups"][0]["lanes"][1].update(mode="auto"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_declared_variable_is_seen(name):
    """A thing that changed and is not declared: the comparison is called measured."""
    other = simple_record()
    CHANGES[name](other)
    one, two = sides(simple_record(), other)
    assert list(differing(one, two)) == [name]
    assert differing(one, one) == {}


def test_the_list_of_variables_is_tested():
    """A variable that was added without a test."""
    one, _ = sides(simple_record(), simple_record())
    assert set(variables(one)) - {"seed", "acceptance rule"} == set(CHANGES)
    assert set(OF_DRAFTING) <= set(variables(one))


def test_seed_and_rule_count_where_something_is_drawn():
    """A seed that cannot matter at temperature 0; one that decides everything above it."""
    records = [simple_record() for _ in range(2)]
    records[1]["settings"]["seed"] = 2
    records[1]["groups"][0]["lanes"][1]["accept"] = "ratio"
    assert differing(*sides(*records)) == {}
    for made in records:
        made["settings"]["sampling"]["temperature"] = 0.8
    assert set(differing(*sides(*records))) == {"seed", "acceptance rule"}


def test_a_drafts_own_geometry_is_one_variable():
    """Two drafts with windows of their own, refused as three variables."""
    other = simple_record()
    other["groups"][0]["draft"].update(
        sha256="c" * 64, kind="dflash", window={"value": 9, "source": "file", "file_value": 9}
    )
    assert list(differing(*sides(simple_record(), other))) == ["draft"]


def test_mtp_beside_a_draft_is_not_that_draft():
    """The seed's comparison: another drafter at another depth are two variables, not one."""
    made = simple_record()
    lanes = made["groups"][0]["lanes"]
    lanes += [lanes[1] | {"name": f"mtp k{k}", "drafter": "mtp", "verify_length": k} for k in (3, 7)]
    made["runs"] += [run(f"mtp k{k}", p, blocks=[2, 1]) for k in (3, 7) for p in range(6)]
    one, same = sides(made, made, lane_a="dflash2 k3", lane_b="mtp k3")
    assert list(differing(one, same)) == ["draft"] and variables(same)["draft"] == "mtp"
    pair = sides(made, made, lane_a="dflash2 k3", lane_b="mtp k7")
    assert list(differing(*pair)) == ["draft", "verify length"]
    with pytest.raises(UsageError, match="2 variables"):
        compare(*pair)


def test_lanes_of_one_record():
    """Plain against drafted: the draft is what differs, its verify length follows from it."""
    made = simple_record()
    pair = sides(made, made, lane_a="plain", lane_b="dflash2 k3")
    assert list(differing(*pair)) == ["draft"]
    found = compare(*pair)
    assert found["cells"][0]["speed"] == pytest.approx(2, abs=1e-12) and found["drift"] is None
    assert found["cells"][0]["length"] is None


def test_one_prompt_is_refused():
    """n = 1 called evidence."""
    with pytest.raises(UsageError, match="1 prompt in common.*one observation is no evidence"):
        compare(*sides(simple_record(n=1), with_k(simple_record(n=1), 7)))


def test_other_prompts_are_refused():
    """Code against prose: the text decides acceptance."""
    other = with_k(simple_record(), 7)
    other["prompts"]["sha256"] = "f" * 64
    other["prompts"]["items"] = other["prompts"]["items"][:5]
    with pytest.raises(UsageError, match=r"different prompts \(6 and 5, 5 of them equal\)"):
        compare(*sides(simple_record(), other))


def test_interval_around_1_is_insufficient():
    """Noise called an effect."""
    noisy = with_k(simple_record(ms=lambda prompt: (45.0, 55.0)[prompt % 2]), 7)
    found = compare(*sides(simple_record(), noisy))
    assert found["label"] == found["cells"][0]["label"] == "insufficient"
    few = compare(*sides(simple_record(n=3), with_k(simple_record(ms=20.0, n=3), 7)))
    assert few["label"] == "insufficient"


def test_different_outputs_are_marked():
    """Speeds of different texts compared as if they were equal."""
    other = with_k(simple_record(), 7)
    other["runs"][1]["tokens_sha256"] = "0" * 63 + "f"
    found = compare(*sides(simple_record(), other))
    assert found["cells"][0]["outputs_differ"] == 1
    assert any("outputs differ" in note for note in found["notes"])


def test_drift_of_the_machine_is_told_and_taken_out():
    """A quieter machine in the second run, reported as the effect of a verify length."""
    other = with_k(simple_record(), 7)
    for one in other["runs"]:
        one["decode_ms"] /= 2
    found = compare(*sides(simple_record(), other))
    (cell,) = found["cells"]
    assert found["drift"]["ratio"] == pytest.approx(2, abs=1e-12)
    assert any("not held still" in note for note in found["notes"])
    assert cell["speed"] == pytest.approx(2, abs=1e-12)
    assert cell["speedup"] == pytest.approx(1, abs=1e-12) and cell["label"] == "insufficient"


def test_a_change_that_touches_plain_decoding_is_no_drift():
    """A faster build taken for a drift of the machine, and divided away from its own speed."""
    other = simple_record()
    other["versions"]["commit"] = "def"
    for one in other["runs"]:
        one["decode_ms"] /= 2
    found = compare(*sides(simple_record(), other))
    assert found["drift"] is None
    assert found["cells"][0]["speed"] == pytest.approx(2, abs=1e-12)
    assert found["label"] == "measured"  # both lanes are twice as fast: the speed is what changed


def test_partial_records_are_compared_where_they_overlap():
    """A partial record refused, or taken for a whole one."""
    other = with_k(simple_record(ms=40.0), 7)
    other["status"], other["runs"] = "interrupted", other["runs"][:10]
    found = compare(*sides(simple_record(), other))
    assert found["cells"][0]["prompts"] == 5 and "is interrupted" in found["notes"][0]


def test_lanes_that_do_not_pair_are_listed():
    """A comparison of whatever comes first."""
    lanes = deepcopy(simple_record()["groups"][0]["lanes"])
    lanes.append(lanes[1] | {"name": "dflash2 k7", "verify_length": 7})
    both = record(
        [run(lane=lane["name"], prompt=p, blocks=None if lane["name"] == "plain" else [1, 2])
         for p in range(3) for lane in lanes], lanes)  # fmt: skip
    pairs = choose_sides(both, both, "a.json", "b.json")
    assert [(a.lane["name"], b.lane["name"]) for a, b in pairs] == [
        ("dflash2 k3", "dflash2 k3"), ("dflash2 k7", "dflash2 k7"),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="--lane and --lane-b"):
        choose_sides(both, both, "a.json", "a.json")
    with pytest.raises(UsageError, match="no lane 'x', expected one of plain, dflash2 k3"):
        choose_sides(both, both, "a.json", "b.json", lane_a="x")


def test_answers_without_speed_do_not_count():
    """One-token answers counted as observations."""
    made = with_k(simple_record(ms=40.0), 7)
    for one in made["runs"][:6]:
        one |= {"decode_ms": 0.0, "decode_tokens": 0, "n_tokens": 1}
    found = compare(*sides(simple_record(), made))
    assert found["cells"][0]["prompts"] == 3 and found["label"] == "insufficient"


def test_side_names_lane_and_file():
    """Two lanes called by the same name."""
    one, _ = sides(simple_record(), simple_record())
    assert isinstance(one, Side) and one.name == "dflash2 k3 (a.json)"
