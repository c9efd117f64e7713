"""Faults of a card at every point: one sentence, nothing leaked, the process usable afterwards."""

import gc

import pytest

import cudflash
from cudflash.errors import DeviceError, OutOfMemoryError
from tests.emulation.cuda import CUDARuntimeError, EmulatedCuda, EmulatedDriver
from tests.emulation.host_module import unavailable
from tests.helpers.draft_vectors import draft_case
from tests.helpers.emulated import emulated_engine
from tests.helpers.vectors import target_case

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

PATH = target_case("llama", "kq").path
GREEDY = cudflash.SamplingConfig(temperature=0)
PROMPT = [7, 3, 250, 11, 42]


def answer(engine_or_session, **options):
    """Greedy tokens."""
    made = engine_or_session.generate(PROMPT, max_tokens=5, sampling=GREEDY, **options)
    return made.tokens if isinstance(made, cudflash.Result) else made.result().tokens


def nothing_left(device):
    """Whether an engine that is gone has left anything on the device."""
    gc.collect()
    runtime = device.runtime
    return (device.used, len(runtime.executables), len(runtime.graphs), len(runtime.events),
            len(runtime.streams), runtime.n_pinned, device.driver.n_modules,
            runtime.capturing) == (0, 0, 0, 0, 0, 0, 0, None)


@pytest.fixture(scope="module")
def right():
    """Tokens of an undisturbed answer."""
    return answer(cudflash.load(PATH, device="cpu", threads=1, n_ctx=256))


def one_sentence(error):
    """The text of an error, checked for its form."""
    text = str(error)
    assert "\n" not in text and len(text) < 500 and "Traceback" not in text
    return text


def test_plan_that_does_not_fit_is_refused_before_anything_is_allocated():
    """A card filled half way through loading, or a message without the two numbers."""
    with pytest.raises(OutOfMemoryError) as caught:
        emulated_engine(PATH, total_bytes=3 << 20)
    text = one_sentence(caught.value)
    assert text.count("MiB") == 2 and "emulated device" in text and "n_ctx" in text


@pytest.mark.parametrize("call", ["malloc", "hostAlloc"])
def test_allocation_that_fails_at_any_point_gives_everything_back(call, monkeypatch, right):
    """Memory lost when another program takes the card's while a model is being loaded."""
    import tests.emulation.cuda as stand_in

    made = []
    init = EmulatedCuda.__init__

    def remember(self, *args, **how):
        init(self, *args, **how)
        made.append(self)
        self.calls.fail(call, CUDARuntimeError("cudaErrorMemoryAllocation: out of memory"), at)

    monkeypatch.setattr(stand_in.EmulatedCuda, "__init__", remember)
    engine = None
    for at in range(12):
        try:
            engine, device = emulated_engine(PATH)
            session = engine.session()
        except (OutOfMemoryError, DeviceError) as err:
            one_sentence(err)
            assert call != "malloc" or isinstance(err, OutOfMemoryError)
            engine = None
        if engine is None:  # outside the handler, which keeps the frames of the error
            made[-1].calls.faults.clear()  # and so does the error itself
            gc.collect()
            assert made[-1].used == 0
            continue
        assert answer(session) == right and at >= (3 if call == "malloc" else 2)
        break
    else:
        pytest.fail("the fault was met at every point")


@pytest.mark.parametrize("call", [
    "launchKernel", "memcpyAsync", "streamSynchronize", "streamBeginCapture", "streamEndCapture",
    "graphInstantiate", "graphLaunch"])
def test_interrupt_in_any_call_of_an_answer_leaves_the_engine_usable(call, right):
    """Ctrl-C in the middle of a graph: a stream left in capture, a cache with half a row."""
    engine, device = emulated_engine(PATH)
    session = engine.session()
    for after in (0, 1, 7, 30):
        device.calls.fail(call, KeyboardInterrupt(), after)
        try:
            answer(session)
        except KeyboardInterrupt:
            pass
        assert device.runtime.capturing is None
        device.calls.faults.clear()
        assert answer(session) == right
    session.close()
    engine.close()
    del session, engine
    assert nothing_left(device)


@pytest.mark.parametrize("call", ["launchKernel", "memcpyAsync", "streamSynchronize", "graphLaunch"])
def test_interrupt_in_any_call_of_a_drafted_round_leaves_the_session_usable(call):
    """Drafts of a round that was dropped, evaluated or told in the next one; half a draft's row."""
    case = draft_case("v2-muse-full")
    engine, device = emulated_engine(target_case(case.target, "kq").path, case.directory)
    session, options = engine.session(), {"speculative": "on", "ignore_eos": True}
    right = answer(engine, speculative="off", ignore_eos=True)
    for after in (1, 6, 40):
        device.calls.fail(call, KeyboardInterrupt(), after)
        try:
            answer(session, **options)
        except KeyboardInterrupt:
            pass
        device.calls.faults.clear()
        again = session.generate(PROMPT, max_tokens=5, sampling=GREEDY, **options).result()
        assert again.tokens == right
        assert any(r["drafted"] for r in again.speculation["trace"])
        assert session.check_draft_context() is None


@pytest.mark.parametrize("call, words", [
    ("launchKernel", "run kernel"), ("graphLaunch", "run a graph"),
    ("graphInstantiate", "record a graph"), ("streamSynchronize", "finish its work"),
    ("memcpyAsync", "copy to the device")])
def test_error_of_the_runtime_is_a_sentence_and_drops_the_block(call, words, right):
    """A traceback of CuPy's, or a session that is broken by one failed call."""
    engine, device = emulated_engine(PATH)
    session = engine.session()
    device.calls.fail(call, CUDARuntimeError("cudaErrorUnknown: unknown error"))
    with pytest.raises(DeviceError) as caught:
        answer(session)
    assert words in one_sentence(caught.value) and "emulated device" in str(caught.value)
    device.calls.faults.clear()
    assert answer(session) == right


def test_device_that_is_lost_is_told_so():
    """A sticky error after which every further call fails with a riddle."""
    engine, device = emulated_engine(PATH)
    device.calls.fail("launchKernel", CUDARuntimeError(
        "cudaErrorIllegalAddress: an illegal memory access was encountered"), 3)
    with pytest.raises(DeviceError, match="start it again"):
        answer(engine)


def test_interrupt_while_weights_are_streamed_gives_everything_back():
    """Page-locked buffers and half a model left behind by a Ctrl-C during a long load."""
    for call in ("launchKernel", "memcpyAsync", "moduleLoadData"):
        held = []

        def remember(cuda, index=0, call=call, held=held):
            held.append(cuda)
            cuda.calls.fail(call, KeyboardInterrupt(), 2)
            return EmulatedDriver(cuda, index)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.emulation.cuda.EmulatedDriver", remember)
            with pytest.raises(KeyboardInterrupt):
                emulated_engine(PATH)
        held[-1].calls.faults.clear()  # the interrupt keeps the frames it went through
        gc.collect()
        assert held[-1].used == 0 and len(held[-1].runtime.events) == 0
        assert held[-1].runtime.n_pinned <= 1  # the driver's own


def test_loading_and_unloading_ten_times_does_not_grow():
    """A leak of a few bytes per model, which a server meets after a day."""
    seen = set()
    engine, device = emulated_engine(PATH)
    driver = engine.ops.driver
    engine.close()
    for _ in range(10):
        with pytest.MonkeyPatch.context() as patch:  # the same device again
            patch.setattr("tests.emulation.cuda.EmulatedDriver", lambda cuda: driver)
            again, _ = emulated_engine(PATH)
        again.session()
        again.close()
        del again
        gc.collect()
        seen.add((device.used, device.runtime.n_pinned, len(device.runtime.events)))
    assert seen == {(0, 1, 0)}
