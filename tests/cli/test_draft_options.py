"""The draft options of `generate`: which draft, how it is used, what is told about it."""

import json

import pytest

from tests.cli.pairs import put_draft, put_target

CONTEXT = ("-c", 256, "-t", 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target with a draft that fits beside it."""
    folder = tmp_path_factory.mktemp("pair")
    put_draft(folder, "dflash-model.gguf")
    return put_target(folder)


def generate(cli, target, *args):
    return cli("generate", target, "-p", "hello", "-n", 24, "--temp", 0, *CONTEXT, *args)


def test_draft_beside_the_model_is_used_and_explained(cli, target):
    """A draft that is used, or not used, without a word."""
    done = generate(cli, target, "--json", "--require-draft", "--speculative", "on")
    assert done.code == 0 and done.json["stats"]["speculative"]["used"]
    first = next(line for line in done.err.splitlines() if "compil" not in line)
    for words in ("draft dflash-model.gguf", "dflash2", "sha256", "taps [4, 2, 0, 1, 3]", "beside"):
        assert words in first
    assert "accepted" in done.err.splitlines()[-1]
    plain = generate(cli, target, "--json", "--no-draft")
    assert plain.json["tokens"] == done.json["tokens"]
    assert plain.json["stats"]["speculative"] is None and "no draft: switched off" in plain.err


def test_two_fitting_drafts_ask(cli, target, tmp_path):
    """The first of two drafts taken because of its name."""
    put_target(tmp_path)
    for name in ("a", "b"):
        put_draft(tmp_path, f"dflash-{name}.gguf")
    done = generate(cli, tmp_path / "model.gguf")
    assert done.code == 2 and "dflash-a.gguf" in done.sentence and "--draft" in done.sentence
    assert generate(cli, tmp_path / "model.gguf", "--draft", "none").code == 0


def test_required_drafts_fail_loudly(cli, target):
    """Plain decoding that passes for drafting in somebody's benchmark."""
    for args, words in (
        (("--no-draft",), "no drafter"),
        (("--speculative", "off"), "switched off with --speculative off"),
        (("-n", 1), "no round"),
    ):
        done = generate(cli, target, "--require-draft", *args)
        assert done.code == 2 and words in done.sentence


def test_verify_length_is_rounded_down_and_said(cli, target):
    """A length that is silently another one, or an illegal one that runs."""
    done = generate(cli, target, "--draft-max", 6, "--json")
    assert "rounded down to 3" in done.err
    assert done.json["receipt"]["speculative"]["verify_length"] == 3
    assert generate(cli, target, "--verify-length", 2).code == 2


def test_receipt_file_is_the_receipt(cli, target, tmp_path):
    """A receipt that is another one than the answer's, or not written at all."""
    path = tmp_path / "receipt.json"
    done = generate(cli, target, "--json", "--receipt", path)
    assert json.loads(path.read_text()) == done.json["receipt"]
    assert generate(cli, target, "--receipt", tmp_path / "no" / "r.json").code == 2


@pytest.mark.parametrize("accept", ["match", "ratio"])
def test_accept_reaches_the_answer(cli, target, accept):
    """A rule that is parsed and dropped."""
    done = generate(cli, target, "--json", "--accept", accept, "--temp", 1, "-s", 3)
    assert done.json["receipt"]["speculative"]["rule"] == accept
