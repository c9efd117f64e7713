"""`cudflash inspect` on drafts: alone, with their target, and lying beside a model."""

import pytest
from cudflash.loader.draft_bind import open_draft
from cudflash.loader.draft_config import describe_draft_config
from cudflash.loader.pairing import draft_digest

from tests.cli.pairs import put_directory, put_draft, put_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, two drafts that fit it, one target and one draft of others."""
    folder = tmp_path_factory.mktemp("pairs")
    put_target(folder)
    put_target(folder, "qwen3", "other.gguf")
    put_draft(folder)
    put_directory(folder)
    put_directory(folder, "v1-qwen3-full", "other")
    return folder


@pytest.mark.parametrize("draft", ["draft", "draft.gguf"])
def test_pair_that_fits(cli, folder, draft):
    """A verdict without its numbers, or another configuration than the one that would run."""
    done = cli("inspect", folder / "model.gguf", folder / draft, "--json", "--digest")
    assert done.code == 0 and done.json["role"] == "target"
    found, opened = done.json["pairing"], open_draft(folder / draft)
    assert found["compatible"] and found["reasons"] == []
    expected = describe_draft_config(opened.config)
    expected["vocab_size"] = found["draft"]["vocab_size"]
    assert found["draft"] == expected
    assert found["sha256"] == draft_digest(opened)
    assert {check["what"] for check in found["checks"] if check["fits"]} >= {
        "hidden size", "vocabulary", "target layers", "last tap (0-based)", "mask token id",
    }  # fmt: skip


def test_facts_of_a_draft_carry_their_source(cli, folder):
    """A window that looks trained and was overridden, a tap list that counts from one."""
    text = cli("inspect", folder / "model.gguf", folder / "draft").out.decode()
    for words in (
        "DFlash\n", "5 layers x 5 taps x block 16: the qualified lane",
        "0, 1, 2, 3, 4 (0-based) [dflash_config.target_layer_ids, zero-based]",
        "32 rows on S of SSSSS [file]", "64 rows [default]", "16 rows [file (block_size)]",
        "no layer [file (is_causal)]", "351 [file (dflash_config.mask_token_id)]",
        "split_half, 64 dimensions, base 500000", "BF16", "compatible: yes",
    ):  # fmt: skip
        assert words in text, words
    text = cli("inspect", folder / "model.gguf", folder / "draft.gguf").out.decode()
    for words in (
        "DFlash2 (convolution over 2 rows in groups of 32", "runs, but is not the qualified lane",
        "4, 2, 0, 1, 3 (0-based) [dflash.target_layers, one-based]", "none [absent]",
        "logits times 0.4375 (file), soft cap 12", "note: ", "no sliding window is stated", "Q6_K",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    "target, draft",
    [("other.gguf", "draft.gguf"), ("other.gguf", "draft"), ("model.gguf", "other")],
)
def test_pair_that_does_not_fit_is_exit_4(cli, folder, target, draft):
    """An error instead of the verdict, or a verdict that a script takes for success."""
    done = cli("inspect", folder / target, folder / draft)
    last = done.out.decode().splitlines()[-1]
    assert done.code == 4 and last.startswith("compatible: no; ") and not done.err
    assert "352" in last and "320" in last and "NO" in done.out.decode()
    found = cli("inspect", folder / target, folder / draft, "--json")
    assert found.code == 4 and not found.json["pairing"]["compatible"]
    assert "; ".join(found.json["pairing"]["reasons"]) in last


def test_draft_alone(cli, folder):
    """A draft that can only be looked at together with a target, or called broken."""
    done = cli("inspect", folder / "draft.gguf")
    text = done.out.decode()
    assert done.code == 0 and "can draft      yes" in text and "this is a draft" in text
    assert "4, 2, 0, 1, 3 (0-based)" in text and "no sliding window is stated" in text
    found = cli("inspect", folder / "draft.gguf", "--json").json
    assert found["role"] == "draft" and found["draft"]["config"]["block_size"] == 8


def test_directory_alone(cli, folder):
    """A directory answered with "cannot be opened"."""
    done = cli("inspect", folder / "draft", "--json", "--digest", "--tensors", "--metadata")
    found, opened = done.json, open_draft(folder / "draft")
    assert done.code == 0 and found["role"] == "draft"
    assert found["draft"]["config"] == describe_draft_config(opened.config)
    assert found["sha256"] == draft_digest(opened)
    assert found["metadata"]["block_size"] == 16
    assert len(found["tensors"]) == found["n_tensors"] == found["tensor_types"][0]["tensors"]
    text = cli("inspect", folder / "draft").out.decode()
    assert "directory" in text and "the qualified lane" in text


def test_draft_that_cannot_be_used_is_shown_with_the_reason(cli, folder, tmp_path):
    """A draft of a strange geometry that inspect refuses to show."""
    data = (folder / "draft.gguf").read_bytes()
    key = b"dflash.selector_top_k"
    assert data.count(key) == 1
    (tmp_path / "d.gguf").write_bytes(data.replace(key, b"dflash.selector_top_q"))
    done = cli("inspect", tmp_path / "d.gguf")
    row = next(x for x in done.out.decode().splitlines() if x.startswith("can draft"))
    assert done.code == 0 and "no: " in row and "selector_top_k" in row
    assert "selector_top_q" in done.out.decode()  # what the file does say


def test_draft_beside_the_model_is_mentioned(cli, tmp_path):
    """A draft that generate would use and inspect keeps quiet about."""
    model = put_target(tmp_path)
    assert b"note:" not in cli("inspect", model).out
    put_draft(tmp_path, "dflash-a.gguf")
    last = cli("inspect", model).out.decode().splitlines()[-1]
    assert "dflash-a.gguf found beside the model and used" in last
    put_draft(tmp_path, "dflash-b.gguf")
    two = cli("inspect", model)
    assert two.code == 0 and b"2 drafts beside it fit" in two.out and b"--draft" in two.out
    other = put_target(tmp_path, "qwen3", "other.gguf")
    found = cli("inspect", other, "--json").json["draft_beside"]
    assert found["path"] is None and "none of 2" in found["explanation"]


@pytest.mark.parametrize(
    "first, second, code, words",
    [
        ("model.gguf", "other.gguf", 2, "this is a target"),
        ("draft.gguf", "model.gguf", 2, "this is a draft"),
        ("draft", "model.gguf", 2, "the target first"),
        ("model.gguf", "missing", 3, "missing: cannot be opened"),
        ("missing", "draft", 3, "missing: cannot be opened"),
        ("model.gguf", "", 3, "without config.json"),
        ("", None, 3, "without config.json"),
    ],
)
def test_wrong_files_are_one_sentence(cli, folder, first, second, code, words):
    """Roles that are guessed, or a traceback."""
    done = cli("inspect", *(folder / name for name in (first, second) if name is not None))
    assert done.code == code and words in done.sentence and done.out == b""
