"""`cudflash plan`: the numbers of the API, the largest context, the verdict."""

import pytest

import cudflash.plan
from cudflash.cli.plan import parse_size
from cudflash.errors import UsageError


def total(model, n_ctx, **settings):
    """Bytes of a plan."""
    return cudflash.plan.plan(model, n_ctx=n_ctx, **settings).total


def test_json_is_the_plan_of_the_api(cli, model):
    """Numbers that differ between the command and what is then loaded."""
    args = ("-c", 128, "--kv-type", "f32", "--activations", "int8x2")
    found = cli("plan", model, *args, "--json").json
    settings = {"n_ctx": 128, "kv_type": "f32", "activations": "int8x2"}
    expected = cudflash.plan.plan(model, **settings).to_dict()
    assert {name: found[name] for name in expected} == expected
    assert found["context_length"] == 512


def test_text_shows_every_kind_and_context(cli, model):
    """A table without the row one looks for."""
    text = cli("plan", model, "-c", 0).out.decode()
    for words in ("weights", "KV cache", "scratch", "total", "context", "512"):
        assert words in text


def test_largest_context_is_the_largest_that_fits(cli, model):
    """Off by one: a context that does not fit, or one that could be larger."""
    budget = total(model, 300)
    found = cli("plan", model, "--memory", budget, "--json").json
    largest = found["largest_n_ctx"]
    assert total(model, largest) <= budget < total(model, largest + 1)
    assert found["memory"] == budget
    assert cli("plan", model, "--memory", "1G", "--json").json["largest_n_ctx"] == 512


def test_what_does_not_fit_is_exit_5(cli, model):
    """A script that starts a model which cannot be loaded."""
    done = cli("plan", model, "-c", 512, "--memory", total(model, 512) - 1)
    assert done.code == 5 and "512" in done.err and "largest that fits" in done.err
    none = cli("plan", model, "--memory", "1K", "--json")
    assert none.code == 5 and none.json["largest_n_ctx"] == 0
    assert cli("plan", model, "-c", 512, "--memory", total(model, 512)).code == 0


def test_sizes_are_read_in_powers_of_1024():
    """A size that means something else than it says, or nothing."""
    assert parse_size("24G") == parse_size("24GiB") == parse_size("24 gb") == 24 << 30
    assert parse_size("1.5k") == 1536 and parse_size("77") == 77
    for text in ("", "0", "-1G", "lots", "1 X", "G"):
        with pytest.raises(UsageError):
            parse_size(text)


@pytest.mark.parametrize(
    "args, words", [(["x"], "'x'"), (["--memory", "much"], "much"), (["-c", "-3"], "n_ctx"),
                    (["--kv-type", "q1"], "f16"), (["--device", "tpu"], "tpu")]
)  # fmt: skip
def test_bad_arguments_are_one_sentence(cli, model, args, words):
    """A traceback of the planner."""
    done = cli("plan", model, *args)
    assert done.code in (2, 6) and words in done.sentence


def test_plan_for_a_gpu_needs_none(cli, model):
    """Whether a model fits a card can only be asked where the card is; or the CPU's sizes."""
    gpu, cpu = (cli("plan", model, "--json", "--device", d).json for d in ("cuda", "cpu"))
    assert gpu["workspace"] > 0 and gpu["embedding"] > 0 and gpu["mapped"] == 0
    assert cpu["workspace"] == cpu["embedding"] == 0 and cpu["mapped"] > 0
    assert b"scratch of a GPU's ops" in cli("plan", model, "--device", "cuda:1").out
