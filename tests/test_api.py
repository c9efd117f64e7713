"""The package as users meet it: names, import cost, loading errors."""

import subprocess
import sys

import numpy as np
import pytest

import cudflash
from cudflash import defaults, device
from cudflash.errors import CudflashError, DeviceError, UnsupportedError, UsageError
from tests.helpers.engines import engine
from tests.helpers.vectors import target_case

PATH = str(target_case("llama", "kq").path)


def test_import_is_light():
    """Catches a module at the top that costs every command: numba, llvmlite, jinja2, rich..."""
    code = (
        "import sys, cudflash; heavy = {'numba', 'llvmlite', 'jinja2', 'tokenizers', 'rich', "
        "'numpy', 'click', 'cupy'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [n for n in cudflash.__all__ if n != "quant"])
def test_public_names_exist(name):
    """Catches a lazy name that points nowhere."""
    assert getattr(cudflash, name) is not None
    assert name in dir(cudflash)


def test_unknown_names_are_attribute_errors():
    """Catches a lazy package that breaks hasattr."""
    assert not hasattr(cudflash, "no_such_name")


def test_engine_tells_what_it_is():
    """Catches attributes of the contract that are missing, or a device without its reason."""
    one = engine("llama")
    assert one.config.arch == "llama" and one.draft_config is None
    assert one.device.kind == "cpu" and one.device.name and one.device.reason
    assert one.tokenizer.encode("a") and one.plan.total > 0
    automatic = cudflash.load(PATH, n_ctx=64)
    assert automatic.device.kind == "cpu" and len(automatic.device.reason) > 10


def test_context_defaults_to_the_model_up_to_a_limit():
    """Catches a context longer than the model's by default, or a silent excess."""
    from cudflash.plan import choose_context

    assert choose_context(None, 100_000) == defaults.N_CTX
    assert choose_context(None, 512) == 512
    assert choose_context(70_000, 512) == 70_000
    long = cudflash.load(PATH, n_ctx=engine("llama").config.context_length + 1)
    assert any("trained for" in note for note in long.notes)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"draft": "x.gguf"}, CudflashError, "x.gguf"),
        ({"draft": PATH}, UsageError, "this is a target"),
        ({"draft": "x.gguf", "drafter": object()}, UsageError, "both"),
        ({"draft_window": 8}, UsageError, "draft_window"),
        ({"draft_sink": 8}, UsageError, "draft_sink"),
        ({"draft_activations": "int8"}, UsageError, "draft_activations"),
        ({"draft": "demo:dflash", "draft_activations": "int4"}, UsageError, "draft_activations"),
        ({"drafter": object()}, UsageError, "drafter"),
        ({"device": "cuda"}, DeviceError, "cuda"),
        ({"device": "tpu"}, UsageError, "tpu"),
        ({"kv_type": "q8_0"}, UsageError, "q8_0"),
        ({"activations": "int4"}, UsageError, "int4"),
        ({"n_ctx": 0}, UsageError, "n_ctx"),
        ({"n_ctx": 12.0}, UsageError, "n_ctx"),
        ({"threads": 0}, UsageError, "0"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(options, error, words):
    """Catches a setting that is silently ignored: one sentence that names it."""
    with pytest.raises(error, match=words) as caught:
        cudflash.load(PATH, **options)
    assert "\n" not in str(caught.value)


def test_missing_file_names_its_path(tmp_path):
    """Catches a traceback instead of a sentence."""
    with pytest.raises(CudflashError, match="nothing.gguf"):
        cudflash.load(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("layers", [[], [-1], [99], ["1"], [True], [1.0]])
def test_tap_layers_outside_the_model_are_refused(layers):
    """Catches taps counted from one, or from the end."""
    with pytest.raises(UsageError, match="tap layer"):
        engine("llama").taps([1], layers)


def test_plain_passes_check_their_tokens():
    """Catches ids outside the vocabulary, and an empty pass that returns nothing."""
    one = engine("llama")
    for tokens, words in (([], "no tokens"), ([10**7], "vocabulary"), ([1.5], "token id")):
        with pytest.raises(UsageError, match=words):
            one.logits(tokens)
    assert one.logits(np.array([1, 2], np.int32)).dtype == np.float32
    assert one.taps([1, 2, 3], [0, 0]).shape == (3, 2, one.config.hidden_dim)
    with pytest.raises(UnsupportedError, match="draft"):
        one.draft_block(None, 0)


def test_progress_of_loading_ends_at_the_total():
    """Catches progress that jumps back or never arrives."""
    seen = []
    cudflash.load(PATH, n_ctx=64, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_physical_cores_are_counted_within_limits():
    """Catches hyper-threads counted as cores, and a quota that gives zero."""
    assert 1 <= device.physical_cores() <= 4096
