"""The chain as a user meets it: settings, errors, memory, snapshots, distributions."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.errors import NumericsError, UsageError
from cudflash.sampling import Mt19937, SamplerChain, SamplingConfig, log_softmax_top
from tests.helpers.sampling_cases import apply_all, arrays, build, document

OPEN = {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1}  # nothing but the draw
finite = st.floats(-30, 30, width=32)
rows = st.lists(finite, min_size=2, max_size=60).map(lambda x: np.array(x, np.float32))


def draws(config, seed, row, n):
    chain = SamplerChain(config, seed, n_vocab=len(row))
    out = []
    for _ in range(n):
        out.append(chain.sample(row))
        chain.accept(out[-1])
    return out


def test_defaults_are_llama_cpps():
    """Catches a drifted default: a user who types no flag must get llama.cpp's answer."""
    assert SamplingConfig().to_dict() == {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n", ":", '"', "*"],
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "logit_bias": {},
        "min_keep": 0,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", math.nan),
        ("top_k", True),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("typical_p", 0),
        ("xtc_probability", 2),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("frequency_penalty", math.nan),
        ("dry_base", 0),
        ("dry_sequence_breakers", "abc"),
        ("mirostat", 3),
        ("mirostat_tau", -1),
        ("min_keep", -1),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {5.7: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: 1e39}),
        ("logit_bias", {5: -1e39}),
        ("logit_bias", {5: 1e-60}),
        ("temperature", 1e39),
        ("temperature", 1e-60),
        ("repeat_penalty", 1e39),
        ("frequency_penalty", -1e39),
        ("presence_penalty", 1e39),
        ("mirostat_tau", 3e38),
    ],
)
def test_bad_settings_are_refused_by_name(name, value):
    """Catches a NaN or an out-of-range value that reaches the arithmetic; one sentence, named."""
    with pytest.raises(UsageError, match=f"^{name}: found .*expected") as error:
        SamplingConfig(**{name: value})
    assert "\n" not in str(error.value) or name == "dry_sequence_breakers"


def test_config_survives_json():
    """Catches a receipt from which the run cannot be repeated."""
    config = SamplingConfig(logit_bias={5: -math.inf, 7: 1.5}, dry_sequence_breakers=("a",))
    again = SamplingConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and all(type(ident) is int for ident in again.logit_bias)
    assert hash(again) == hash(config)
    with pytest.raises(UsageError, match="unknown setting 'temprature'"):
        SamplingConfig.from_dict({"temprature": 1})


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-45}, {"temperature": 3e38}, {"repeat_penalty": 3e38},
        {"repeat_penalty": 1e-45}, {"frequency_penalty": -3e38}, {"dynatemp_range": 3e38},
        {"presence_penalty": 3e38, "frequency_penalty": 3e38}, {"mirostat": 2, "mirostat_tau": 1e38},
        {"logit_bias": {1: 3.4e38, 2: 3.4e38}}, {"top_n_sigma": 3e38}, {"logit_bias": {1: -3.4e38}},
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_the_largest_and_smallest_settings_still_choose_a_token(settings):
    """Catches a setting that is allowed and whose arithmetic overflows into a NaN."""
    chain = SamplerChain(SamplingConfig(**settings), 1, n_vocab=300, n_ctx=100)
    chain.accept_prompt([1, 2, 3, 1, 2, 3, 1, 1])
    rng = np.random.default_rng(0)
    for _ in range(4):
        chosen = chain.sample((rng.standard_normal(300) * 5).astype(np.float32))
        assert 0 <= chosen < 300
        chain.accept(chosen)


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(temperature=0)])
@pytest.mark.parametrize("n", [5, 5000])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_stop_before_any_draw(config, n, bad):
    """Catches a NaN that sorts somewhere and becomes a token, or an error after a draw."""
    row = np.zeros(n, np.float32)
    row[n // 2] = bad
    chain = SamplerChain(config, 3, n_vocab=n)
    before = chain.snapshot()
    for call in (chain.sample, chain.probabilities):
        with pytest.raises(NumericsError, match=f"at token id {n // 2}"):
            call(row)
    assert chain.snapshot() == before
    with pytest.raises(NumericsError, match="all are -inf"):
        chain.sample(np.full(n, -np.inf, np.float32))


def test_banned_tokens_never_appear():
    """Catches a ban that only lowers a logit, and -inf logits mistaken for damage."""
    row = np.array([9, 1, -np.inf, 1, 1], np.float32)
    config = SamplingConfig(**OPEN, logit_bias={0: -math.inf})
    assert set(draws(config, 1, row, 300)) == {1, 3, 4}
    greedy = SamplingConfig(temperature=0, logit_bias={0: -math.inf})
    assert SamplerChain(greedy, 1, n_vocab=5).sample(row) == 1
    everything = SamplingConfig(logit_bias={0: -math.inf, 1: -math.inf, 3: -math.inf, 4: -math.inf})
    with pytest.raises(NumericsError, match="4 bans that leave no token"):
        SamplerChain(everything, 1, n_vocab=5).sample(row)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SamplerChain(SamplingConfig(logit_bias={9: 1.0}), 1, n_vocab=9), "token id 9"),
        (lambda: SamplerChain(SamplingConfig(dry_multiplier=1), 1, n_vocab=9), "no tokenizer"),
        (
            lambda: SamplerChain(
                SamplingConfig(repeat_penalty=1.1, repeat_last_n=-1), 1, n_vocab=9
            ),
            "repeat_last_n: found -1",
        ),
        (
            lambda: SamplerChain(SamplingConfig(), 1, n_vocab=9).sample(np.zeros(8, np.float32)),
            "expected float32 of shape",
        ),
        (
            lambda: SamplerChain(SamplingConfig(), 1, n_vocab=9).sample(np.zeros(9)),
            "found float64",
        ),
        (
            lambda: SamplerChain(SamplingConfig(mirostat=2), 1, n_vocab=2).probabilities(
                np.zeros(2, np.float32)
            ),
            "mirostat has no distribution",
        ),
        (lambda: SamplerChain(SamplingConfig(), 1, n_vocab=9).restore(()), "chain snapshot"),
    ],
)
def test_misuse_is_one_sentence(make, text):
    """Catches a stack trace or a silent wrong answer where a setting lacks what it needs."""
    with pytest.raises(UsageError, match=text):
        make()


@pytest.mark.parametrize("n", [7, 9000])
def test_greedy_prefers_the_lowest_id(n):
    """Catches a tie broken by a sort; also with penalties, and where typical forces the chain."""
    row = np.zeros(n, np.float32)
    row[[2, 4, n - 1]] = 3
    for extra in ({}, {"repeat_penalty": 1.5}, {"typical_p": 0.9}, {"top_k": 3, "typical_p": 0.99}):
        chain = SamplerChain(SamplingConfig(temperature=0, **extra), 1, n_vocab=n)
        before = chain.snapshot()
        chosen = chain.sample(row)
        assert chosen == 2
        assert chain.probabilities(row).ids.tolist() == [2]
        assert chain.snapshot() == before  # no draw
    penalised = SamplerChain(SamplingConfig(temperature=0, presence_penalty=1), 1, n_vocab=n)
    penalised.accept(2)
    assert penalised.sample(row) == 4


def test_logits_are_not_changed_and_n_vocab_may_come_late():
    """Catches writing into the caller's row, read-only rows included."""
    row = np.random.default_rng(1).standard_normal(6000).astype(np.float32)
    row.flags.writeable = False
    config = SamplingConfig(repeat_penalty=1.3, logit_bias={1: 2.0}, typical_p=0.9, top_n_sigma=2)
    chain = SamplerChain(config, 1)
    known = SamplerChain(config, 1, n_vocab=6000)
    for _ in range(3):
        token = chain.sample(row)
        assert token == known.sample(row)
        chain.accept(token)
        known.accept(token)


def test_config_chain_equals_recorded_default():
    """Catches a chain built from settings in another order than the recorded default one."""
    checked = 0
    for case in document("cases"):
        if case["key"].split("/")[1] != "llamacpp_default":
            continue
        row = arrays("logits")[case["logits"]]
        tokens = arrays("draws")[case["key"] + "/tokens"][:50]
        assert draws(SamplingConfig(), case["chain"][-1][1], row, 50) == tokens.tolist()
        checked += 1
    assert checked >= 20


def test_config_chain_equals_hand_built_with_everything_on():
    """Catches a setting wired to the wrong sampler or argument."""
    config = SamplingConfig(
        temperature=1.1, top_k=30, top_p=0.9, min_p=0.01, typical_p=0.95, top_n_sigma=3,
        xtc_probability=0.5, xtc_threshold=0.05, dynatemp_range=0.3, dynatemp_exponent=1.2,
        repeat_penalty=1.2, repeat_last_n=20, frequency_penalty=0.1, presence_penalty=0.2,
        dry_multiplier=0.5, dry_base=1.5, dry_allowed_length=1, dry_penalty_last_n=30,
        dry_sequence_breakers=(), logit_bias={3: 1.0}, min_keep=2,
    )  # fmt: skip
    row = arrays("logits")["n512"]
    stages = build(
        [
            ["logit_bias", 512, [[3, 1.0]]], ["penalties", 512, 20, 1.2, 0.1, 0.2],
            ["dry", 0.5, 1.5, 1, 30, []], ["top_n_sigma", 3], ["top_k", 30], ["typical", 0.95, 2],
            ["top_p", 0.9, 2], ["min_p", 0.01, 2], ["xtc", 0.5, 0.05, 2, 9],
            ["temp_ext", 1.1, 0.3, 1.2], ["dist", 9],
        ]
    )  # fmt: skip
    expected = []
    for _ in range(100):
        candidates = apply_all(stages, row)
        expected.append(candidates.id_at(candidates.selected))
        for stage in stages:
            stage.accept(expected[-1])
    assert draws(config, 9, row, 100) == expected
    assert len(set(expected)) > 5


CONFIGS = {
    "default": SamplingConfig(),
    "open": SamplingConfig(**OPEN),
    "memory": SamplingConfig(repeat_penalty=1.3, presence_penalty=0.5, xtc_probability=0.5),
    "dry": SamplingConfig(dry_multiplier=1, dry_sequence_breakers=()),
    "dynatemp": SamplingConfig(dynatemp_range=0.5, typical_p=0.8),
    "mirostat1": SamplingConfig(mirostat=1),
    "mirostat2": SamplingConfig(mirostat=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_seed_decides_everything(name):
    """Catches a seed without effect and a generator shared between chains (interleaved runs)."""
    row = np.random.default_rng(5).standard_normal(200).astype(np.float32)
    config = CONFIGS[name]
    first = draws(config, 1, row, 40)
    assert draws(config, 1, row, 40) == first
    assert draws(config, 2, row, 40) != first
    one, two = SamplerChain(config, 1, n_vocab=200), SamplerChain(config, 2, n_vocab=200)
    mixed = []
    for _ in range(40):
        mixed.append(one.sample(row))
        one.accept(mixed[-1])
        two.accept(two.sample(row))
    assert mixed == first
    one.reset()
    assert one.sample(row) == first[0]


@pytest.mark.parametrize("name", CONFIGS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_restore_replays(name, data):
    """Catches state outside the snapshot: after restore the same tokens follow, on any history."""
    row = np.random.default_rng(6).standard_normal(100).astype(np.float32)
    chain = SamplerChain(CONFIGS[name], 7, n_vocab=100)
    chain.accept_prompt(data.draw(st.lists(st.integers(0, 99), max_size=80)))

    def run(n):
        out = []
        for _ in range(n):
            out.append(chain.sample(row))
            chain.accept(out[-1])
        return out

    run(data.draw(st.integers(0, 5)))
    snapshot = chain.snapshot()
    first = run(12)
    chain.restore(snapshot)
    assert run(12) == first
    chain.restore(snapshot)
    assert run(12) == first


@given(row=rows, k=st.integers(1, 60), p=st.floats(0.05, 0.99), temperature=st.floats(0.2, 3))
@settings(deadline=None)
def test_truncation_keeps_what_it_promises(row, k, p, temperature):
    """Catches cuts that grow or shrink the wrong way, lose the best token, or do not sum to one."""

    def kept(**changes):
        options = {**OPEN, "temperature": temperature, **changes}
        chain = SamplerChain(SamplingConfig(**options), 1, n_vocab=len(row))
        result = chain.probabilities(row)
        assert abs(float(result.probs.sum(dtype=np.float64)) - 1) < 1e-5
        assert len(set(result.ids.tolist())) == len(result.ids)
        return result

    assert sorted(kept().ids.tolist()) == list(range(len(row)))
    small, large = kept(top_k=k), kept(top_k=k + 1)
    assert len(small.ids) == min(k, len(row))
    assert row[small.ids].tolist() == np.sort(row)[::-1][:k].tolist()
    assert row[large.ids][:k].tolist() == row[small.ids].tolist()
    low, high = kept(top_p=p / 2), kept(top_p=p)
    assert row[high.ids][: len(low.ids)].tolist() == row[low.ids].tolist()
    strict, loose = kept(min_p=p), kept(min_p=p / 2)
    assert set(strict.ids.tolist()) <= set(loose.ids.tolist())
    for result in (low, strict):
        assert row[result.ids].max() == row.max()
    for result in (small, low, strict):  # truncation happens before the probabilities are formed
        inside = np.exp((row[result.ids] - row.max()).astype(np.float64) / temperature)
        np.testing.assert_allclose(result.probs, inside / inside.sum(), rtol=3e-5, atol=1e-7)


def test_penalties_reach_prompt_and_answer():
    """Catches penalties that ignore the prompt, count outside the window, or have the wrong sign."""
    row = np.array([2.0, 1.0, -1.0, 0.5], np.float32)
    options = dict(OPEN, repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    chain = SamplerChain(SamplingConfig(**options, repeat_last_n=3), 1, n_vocab=4)
    chain.accept_prompt([3, 0, 0, 2])  # the 3 has left the window
    penalised = np.array([2 / 2 - 0.5 - 0.5, 1.0, -1 * 2 - 0.25 - 0.5, 0.5])
    got = chain.probabilities(row)
    expected = np.exp(penalised) / np.exp(penalised).sum()
    np.testing.assert_allclose(got.probs, expected, rtol=1e-6)
    chain.accept(1)
    assert chain.probabilities(row).probs[1] < got.probs[1]


@pytest.mark.parametrize("kind", ["sample", "probabilities"])
def test_draws_follow_the_distribution(kind):
    """Catches a biased draw: chi-square of 200,000 draws within 5 standard errors of its mean."""
    probs = np.array([0.3, 0.5, 0.15, 0.04, 0.01])
    row = np.log(probs).astype(np.float32)
    chain = SamplerChain(SamplingConfig(**OPEN), 20261129, n_vocab=5)
    n = 200_000
    if kind == "sample":
        n = 20_000
        got = [chain.sample(row) for _ in range(n)]
    else:
        fixed = chain.probabilities(row)
        weights = np.add.accumulate(fixed.weights, dtype=np.float64)
        uniforms = np.array([chain.rng.uniform_double() for _ in range(n)])
        got = fixed.ids[np.searchsorted(weights, uniforms * weights[-1])]
        assert [fixed.draw(float(u)) for u in uniforms[:500]] == got[:500].tolist()
    counts = np.bincount(got, minlength=5)
    chi_square = float(((counts - n * probs) ** 2 / (n * probs)).sum())
    assert chi_square < 4 + 5 * math.sqrt(2 * 4)  # 4 degrees of freedom: mean 4, variance 8


def test_probabilities_and_sample_agree():
    """Catches a ratio rule fed with another p than the chain draws from."""
    row = arrays("logits")["n512_ties"]
    config = SamplingConfig(repeat_penalty=1.2, top_k=50)
    one, two = SamplerChain(config, 4, n_vocab=512), SamplerChain(config, 4, n_vocab=512)
    for _ in range(200):
        token = one.sample(row)
        assert two.probabilities(row).draw(two.rng.uniform_double()) == token
        one.accept(token)
        two.accept(token)


@pytest.mark.parametrize("n", [40, 9000])
def test_logprobs_are_of_the_raw_distribution(n):
    """Catches logprobs after temperature or top-k, a wrong sum, and ties out of id order."""
    row = (np.random.default_rng(n).standard_normal(n) * 4).round(1).astype(np.float32)
    exact = row.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    result = log_softmax_top(row, 20)
    expected = np.lexsort((np.arange(n), -row))[:20]
    assert [i for i, _ in result.top] == expected.tolist()
    np.testing.assert_allclose([p for _, p in result.top], exact[expected], rtol=0, atol=1e-6)
    np.testing.assert_allclose([result.of(i) for i in range(n)], exact, rtol=0, atol=1e-6)
    assert log_softmax_top(row, 0).top == []


@given(row=rows, seed=st.integers(0, 2**32 - 2))
@settings(deadline=None, max_examples=50)
def test_one_double_per_draw(row, seed):
    """Catches a draw skipped for a single candidate, which would shift every later token."""
    for config in (SamplingConfig(), SamplingConfig(top_k=1)):
        chain = SamplerChain(config, seed, n_vocab=len(row))
        chain.sample(row)
        expected = Mt19937(seed)
        expected.uniform_double()
        assert chain.rng.next_u32() == expected.next_u32()
