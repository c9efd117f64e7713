"""`cudflash plan` with a draft: its bytes are those of the API, and the choice is generate's."""

from pathlib import Path

import pytest

import cudflash.plan
from tests.cli.pairs import put_directory, put_draft, put_target

HYBRID = Path(__file__).parents[1] / "vectors" / "hybrid_pair"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with a draft beside it that is found, and one that must be named."""
    folder = tmp_path_factory.mktemp("plans")
    put_target(folder)
    put_draft(folder, "dflash-model.gguf")
    put_directory(folder)
    return folder


@pytest.mark.parametrize(
    "args, settings",
    [((), {}), (("--draft-window", 0), {"draft_window": 0}),
     (("--draft-window", 64, "--draft-sink", 16), {"draft_window": 64, "draft_sink": 16}),
     (("--draft-activations", "int8x2"), {"draft_activations": "int8x2"})],
)  # fmt: skip
def test_json_is_the_plan_of_the_api(cli, folder, args, settings):
    """A draft that is counted with other settings than it is loaded with, or not at all."""
    paths = folder / "model.gguf", folder / "draft"
    found = cli("plan", paths[0], "-md", paths[1], "-c", 512, *args, "--json").json
    expected = cudflash.plan.plan(*paths, n_ctx=512, **settings).to_dict()
    assert {name: found[name] for name in expected} == expected
    alone = cli("plan", paths[0], "--no-draft", "-c", 512, "--json").json
    assert found["draft"]["weights"] and found["draft"]["kv"] and found["taps"]
    extra = sum(found["draft"].values()) + found["taps"]
    assert found["total"] == alone["total"] + extra and alone["draft"] == {}


def test_smaller_window_takes_less(cli, folder):
    """An override that changes nothing."""
    plans = [
        cli("plan", folder / "model.gguf", "-md", folder / "draft", "--draft-window", n,
            "--draft-sink", 0, "-c", 512, "--json").json["draft"]["kv"]
        for n in (16, 400)
    ]  # fmt: skip
    assert plans[0] < plans[1]


def test_text_counts_draft_and_taps(cli, folder):
    """A total that cannot be explained by its rows."""
    text = cli("plan", folder / "model.gguf", "-md", folder / "draft").out.decode()
    for words in ("draft: weights", "draft: context rows", "captured layers", ": given"):
        assert words in text


def test_draft_beside_the_model_is_counted_as_generate_would(cli, folder):
    """A plan that fits, of a run that does not."""
    done = cli("plan", folder / "model.gguf", "--json")
    assert done.json["draft_path"].endswith("dflash-model.gguf")
    assert "beside" in done.json["draft_choice"] and done.json["draft"]["weights"]
    for args in (("--no-draft",), ("-md", "none")):
        found = cli("plan", folder / "model.gguf", *args, "--json").json
        assert found["draft_path"] is None and found["draft"] == {} and found["taps"] == 0


def test_largest_context_counts_the_draft(cli, folder):
    """A context that fits only without its draft."""
    model = folder / "model.gguf"
    budget = cudflash.plan.plan(model, folder / "draft", n_ctx=256).total
    found = cli("plan", model, "-md", folder / "draft", "--memory", budget, "--json").json
    fits = found["largest_n_ctx"]
    totals = [cudflash.plan.plan(model, folder / "draft", n_ctx=n).total for n in (fits, fits + 1)]
    assert totals[0] <= budget < totals[1]


@pytest.mark.parametrize(
    "args, code, words",
    [
        (("-md", "model.gguf"), 2, "this is a target"),
        (("-md", "missing"), 3, "missing"),
        (("-md", "other"), 4, "does not belong to the target"),
        (("-md", "draft", "--no-draft"), 2, "contradict"),
        (("--no-draft", "--draft-window", 32), 2, "no draft"),
        (("-md", "draft", "--draft-window", 3), 2, "at least the block size"),
    ],
)
def test_wrong_drafts_are_one_sentence(cli, folder, args, code, words):
    """A plan of a pair that cannot be loaded."""
    if not (folder / "other").exists():
        put_directory(folder, "v1-qwen3-full", "other")
    files = {"model.gguf", "missing", "other", "draft"}
    done = cli("plan", folder / "model.gguf", *(folder / a if a in files else a for a in args))
    assert done.code == code and words in done.sentence and done.out == b""


def test_the_models_own_block_is_counted_as_the_api_counts_it(cli, folder):
    """Memory of --drafter mtp that only the API plans, or a draft file counted beside it."""
    path = HYBRID / "hybrid-tiny-q4_k_m.gguf"
    found = cli("plan", path, "--drafter", "mtp", "-c", 256, "--json").json
    expected = cudflash.plan.plan(path, n_ctx=256, drafter="mtp").to_dict()
    assert {name: found[name] for name in expected} == expected
    assert found["draft"]["weights"] and found["draft_path"] is None
    for args, words in (
        (("--draft-sink", 8), "--draft-sink is about a draft file"),
        (("-md", folder / "draft"), "were both given"),
        (("--no-draft",), "were both given"),
        (("--identity", "id.json"), "no such file"),
    ):
        refused = cli("plan", path, "--drafter", "mtp", *args)
        assert refused.code == 2 and words in refused.sentence
    refused = cli("plan", folder / "model.gguf", "--drafter", "mtp")
    assert refused.code and "has no MTP block" in refused.sentence
