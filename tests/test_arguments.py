"""Arguments of the public functions: what is refused, in which words, and what is welcome."""

import gc
import weakref

import numpy as np
import pytest

import cudflash
from cudflash import defaults, device
from cudflash.errors import OutOfMemoryError, UsageError
from cudflash.plan import choose_context, plan
from tests.helpers.engines import engine, greedy
from tests.helpers.vectors import target_case

PATH = str(target_case("llama", "kq").path)


def refused(function, *args, **options):
    """The sentence with which a call is refused."""
    with pytest.raises(UsageError) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and "expected" in message
    return message


@pytest.mark.parametrize("target", [None, 5, [], object(), b"a.gguf", "", 1.5])
def test_a_model_that_is_no_path_is_refused(target):
    """Catches a TypeError from deep inside instead of a sentence."""
    for function in (cudflash.load, plan):
        assert "the model is" in refused(function, target)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"draft": 5}, "the draft is 5"),
        ({"kv_type": ["f16"]}, "kv_type"),
        ({"kv_type": None}, "kv_type"),
        ({"device": ["cpu"]}, "device"),
        ({"activations": ["int8"]}, "activations"),
        ({"threads": True}, "threads is True"),
        ({"threads": 1.0}, "threads"),
        ({"threads": np.array([1, 2])}, "threads"),
        ({"n_ctx": True}, "n_ctx"),
        ({"n_ctx": 10**10}, "10000000000"),
        ({"n_ctx": defaults.MAX_N_CTX + 1}, str(defaults.MAX_N_CTX)),
    ],
)
def test_settings_of_a_wrong_kind_are_refused(options, words):
    """Catches unhashable values, bools as numbers, and a context no counter can hold."""
    assert words in refused(cudflash.load, PATH, **options)
    if "threads" not in options:
        assert words in refused(plan, PATH, **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prompt": np.array([[1, 2]])}, "shape (1, 2)"),
        ({"prompt": [[1, 2]]}, "prompt token 0"),
        ({"prompt": np.array(3)}, "shape ()"),
        ({"prompt": [np.array([1])]}, "prompt token 0"),
        ({"stop": None}, "stop is None"),
        ({"stop": b"end"}, "stop is b'end'"),
        ({"stop": [b"end"]}, "stop holds"),
        ({"stop": 1.5}, "stop is 1.5"),
        ({"stop": True}, "stop is True"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": None}, "logprobs"),
    ],
)
def test_requests_of_a_wrong_kind_are_refused(options, words):
    """Catches a TypeError of a request, after or before its work began."""
    options = {"prompt": [1, 2], "max_tokens": 1, **options}
    assert words in refused(engine("llama").generate, options.pop("prompt"), **options)


@pytest.mark.parametrize("layers", [5, None, "12", b"1"])
def test_tap_layers_that_are_no_sequence_are_refused(layers):
    """Catches a TypeError for one layer instead of several."""
    assert "tap layers" in refused(engine("llama").taps, [1], layers)


@pytest.mark.parametrize("tokens", [5, None, "text", np.array([[1]])])
def test_tokens_that_are_no_row_of_ids_are_refused(tokens):
    """Catches a TypeError of the plain passes."""
    assert "the tokens" in refused(engine("llama").logits, tokens)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_numbers(kind):
    """Catches counts that come out of an array and are refused, and a receipt that holds them."""
    one = cudflash.load(PATH, n_ctx=kind(64), threads=kind(1))
    assert type(one.n_ctx) is int
    options = {"max_tokens": kind(3), "logprobs": kind(2)}
    result = greedy(one, np.array([1, 2, 3], kind), stop=kind(5), **options)
    assert result.tokens == greedy(one, [1, 2, 3], 3, stop=[5]).tokens
    assert type(result.receipt["max_tokens"]) is int and 5 in result.receipt["stop"]["ids"]
    assert len(result.logprobs[0].top) == 2


def test_context_is_bounded_in_one_place():
    """Catches a bound that excludes itself."""
    assert choose_context(defaults.MAX_N_CTX, 512) == defaults.MAX_N_CTX
    assert str(defaults.MAX_N_CTX) in refused(choose_context, defaults.MAX_N_CTX + 1, 512)


# -- memory and life ------------------------------------------------------------------------------


def test_model_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    """Catches a process that the system kills half way through loading."""
    needed = plan(PATH, n_ctx=64).total
    allocated = []
    monkeypatch.setattr("cudflash.engine.Allocator", allocated.append)
    monkeypatch.setattr(device, "available_memory", lambda: needed - 1)
    with pytest.raises(OutOfMemoryError) as caught:
        cudflash.load(PATH, n_ctx=64)
    message = str(caught.value)
    assert message.count("MiB") == 2 and "n_ctx" in message and "\n" not in message
    assert not allocated


@pytest.mark.parametrize("room", [0, None])
def test_model_that_just_fits_is_loaded(monkeypatch, room):
    """Catches a bound off by one, and a refusal where the system does not tell."""
    total = plan(PATH, n_ctx=64).total
    monkeypatch.setattr(device, "available_memory", lambda: None if room is None else total + room)
    assert cudflash.load(PATH, n_ctx=64).plan.total == total


def test_available_memory_is_the_least_of_what_limits_grant(monkeypatch):
    """Catches a limit that is forgotten, and an unknown one that counts as none."""
    monkeypatch.setattr(device, "_system_memory", lambda: 30)
    monkeypatch.setattr(device, "_group_memory", lambda: 20)
    monkeypatch.setattr(device, "_address_space", lambda: None)
    assert device.available_memory() == 20
    monkeypatch.setattr(device, "_group_memory", lambda: None)
    assert device.available_memory() == 30
    monkeypatch.setattr(device, "_system_memory", lambda: None)
    assert device.available_memory() is None


def test_available_memory_of_this_machine_is_plausible():
    """Catches units: kibibytes or pages taken for bytes."""
    found = device.available_memory()
    assert found is None or 1 << 24 < found < 1 << 50


def test_engine_frees_its_weights_when_its_block_ends():
    """Catches a closed engine that keeps memory through a session, an answer or a graph."""
    with cudflash.load(PATH, n_ctx=64) as one:
        session = one.session()
        answer = session.generate([1, 2, 3], max_tokens=4)
        next(answer)
        weights = weakref.ref(one.model)
        table = weakref.ref(one.model.layers[0])
        cache = weakref.ref(session._runner.cache.layers[0])
    gc.collect()
    assert (weights(), table(), cache()) == (None, None, None)
    assert answer.result().finish_reason == "cancelled"
    one.close()  # again


def test_closed_engine_says_so():
    """Catches an AttributeError of a half-dismantled engine."""
    one = cudflash.load(PATH, n_ctx=64)
    session, other = one.session(), one.session()
    result = greedy(session, [1, 2, 3], 2)
    other.close()
    with pytest.raises(UsageError, match="session is closed"):
        greedy(other, [1], 1)
    assert greedy(session, [1, 2, 3], 2).tokens == result.tokens
    one.close()
    uses = [
        one.session, one.chat_template, one.__enter__, lambda: one.generate([1], max_tokens=1),
        lambda: greedy(session, [1], 1), lambda: one.logits([1]), lambda: one.taps([1], [0]),
        lambda: one.draft_block(None, 0), lambda: one.tokenizer, lambda: session.tokens,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match="is closed; load the model again"):
            use()
    assert len(result.receipt["target"]["sha256"]) == 64
