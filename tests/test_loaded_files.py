"""What happens to a loaded model when its files change, and what outlives it."""

import gc
import hashlib
import os
import pickle
import shutil
import weakref

import pytest

import cudflash
from cudflash.errors import FormatError
from tests.helpers.engines import greedy
from tests.helpers.vectors import target_case

SOURCE = target_case("llama", "kq").path


@pytest.fixture
def loaded(tmp_path):
    """A copy of a target, and an engine on it."""
    path = tmp_path / "model.gguf"
    shutil.copy(SOURCE, path)
    return path, cudflash.load(path, n_ctx=64, device="cpu", threads=1)


def test_receipt_is_that_of_the_loaded_file(loaded):
    """Catches a digest of whatever file lies at the path by now."""
    path, one = loaded
    result = greedy(one, [1, 2, 3], 2)
    shutil.copy(path, path.with_suffix(".new"))
    with open(path.with_suffix(".new"), "ab") as file:
        file.write(b"x")
    os.replace(path.with_suffix(".new"), path)
    with pytest.raises(FormatError, match="no longer the file that was loaded") as caught:
        _ = result.receipt
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    # the map still holds the old file, so answers go on
    assert greedy(one, [1, 2, 3], 2).tokens == result.tokens


def test_receipt_read_before_a_change_stays(loaded):
    """Catches a digest that is read again, and a wrong one."""
    path, one = loaded
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert greedy(one, [1, 2, 3], 1).receipt["target"]["sha256"] == expected
    path.unlink()
    assert greedy(one, [4, 5], 1).receipt["target"]["sha256"] == expected


def test_file_written_to_refuses_further_answers(loaded):
    """Catches answers from weights that were overwritten under the map."""
    path, one = loaded
    session = one.session()
    greedy(session, [1, 2, 3], 1)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(0, 0))  # the clock of a file system may be coarse
    with pytest.raises(FormatError, match="changed while loaded") as caught:
        greedy(session, [1, 2, 3], 1)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_threads_are_those_of_the_answer(loaded):
    """Catches a receipt that tells the threads of a later answer."""
    _, one = loaded
    result = greedy(one, [1, 2, 3], 1)
    cudflash.load(SOURCE, n_ctx=64, threads=2)
    assert result.receipt["threads"] == 1
    assert greedy(one, [1, 2, 3], 1).receipt["threads"] == 2


def test_engine_and_weights_die_while_a_result_lives():
    """Catches any way from a result to the weights."""
    one = cudflash.load(SOURCE, n_ctx=64, device="cpu")
    result = greedy(one, [1, 2, 3], 2)
    refs = [weakref.ref(one), weakref.ref(one.model), weakref.ref(one.work)]
    del one
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert len(result.receipt["target"]["sha256"]) == 64


def test_result_can_be_pickled(loaded):
    """Catches a closure in a result: answers go through queues between processes."""
    _, one = loaded
    result = greedy(one, [1, 2, 3], 2, logprobs=1)
    again = pickle.loads(pickle.dumps(result))
    assert (again.tokens, again.logprobs, again.stats) == (
        result.tokens, result.logprobs, result.stats,
    )  # fmt: skip
    assert again.receipt == result.receipt


def test_cancelled_prompt_counts_the_rows_it_evaluated():
    """Catches a speed made of rows that were never evaluated."""
    from tests.helpers.engines import SMALL_ROWS, engine

    session = engine("llama", rows=SMALL_ROWS).session()
    answer = session.generate(list(range(30)), max_tokens=3)
    next(answer), next(answer)  # it has started, and evaluated the first chunk
    answer.cancel()
    stats = answer.result().stats
    assert stats["prompt_tokens_evaluated"] == SMALL_ROWS == len(session.tokens)
