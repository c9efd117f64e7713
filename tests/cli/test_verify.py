"""`cudflash verify`, `cudflash identity`, and the draft options of `generate`."""

import json
import shutil

import pytest

from tests.helpers.draft_vectors import quantised_draft
from tests.helpers.vectors import vector_path

CONTEXT = ("-c", 256, "-t", 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and, beside it, a draft that fits and one that does not."""
    folder = tmp_path_factory.mktemp("pair")
    shutil.copy(vector_path("targets/muse-glimmer-kq.gguf"), folder / "model.gguf")
    shutil.copy(quantised_draft("v2-muse-full"), folder / "dflash-model.gguf")
    return folder


@pytest.fixture
def target(pair):
    return pair / "model.gguf"


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
    shutil.copy(target, tmp_path / "model.gguf")
    for name in ("a", "b"):
        shutil.copy(target.parent / "dflash-model.gguf", tmp_path / f"dflash-{name}.gguf")
    done = generate(cli, tmp_path / "model.gguf")
    assert done.code == 2 and "dflash-a.gguf" in done.sentence and "--draft" in done.sentence
    assert generate(cli, tmp_path / "model.gguf", "--draft", "none").code == 0


def test_required_drafts_fail_loudly(cli, target):
    """Plain decoding that passes for drafting in somebody's benchmark."""
    for args, words in (
        (("--no-draft",), "no drafter"),
        (("--speculative", "off"), "no drafter"),
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


def test_verify_passes_and_reports(cli, target):
    """An exit code that says nothing, or an object that lacks what people compare."""
    done = cli("verify", target, "-p", "hello", "-n", 16, *CONTEXT, "--json", "--no-scripted")
    assert done.code == 0 and done.json["passed"]
    keys = {"first_difference", "plain_id", "drafted_id", "margin", "plain_sha256"}
    assert all(keys <= check.keys() for check in done.json["checks"])
    text = cli("verify", target, target.parent / "dflash-model.gguf", "-p", "hello", "-n", 8,
               *CONTEXT)  # fmt: skip
    assert text.code == 0 and b"everything is equal" in text.out


def test_verify_reads_prompts_line_by_line(cli, target, tmp_path):
    """A file of prompts taken for one prompt."""
    path = tmp_path / "prompts"
    path.write_text("one\n\ntwo\n")
    done = cli("verify", target, "-f", path, "-n", 4, *CONTEXT, "--json",
               "--no-scripted")  # fmt: skip
    assert done.code == 0 and {c["prompt"] for c in done.json["checks"]} == {0, 1, None}
    path.write_text("\n")
    assert cli("verify", target, "-f", path).code == 2


def test_qualify_below_the_floor_fails(cli, target):
    """A floor that is only printed."""
    done = cli("verify", target, "--qualify", "--floor", 0.95, "-p", "hi", "-c", 300, "-t", 1)
    assert done.code == 1 and b"below the floor" in done.out


def test_identity_is_stamped_and_checked(cli, target, tmp_path):
    """An identity file that any pair fits."""
    path = tmp_path / "id.json"
    made = cli("identity", target, "-o", path, "-c", 256)
    assert made.code == 0 and json.loads(path.read_text())["taps"] == [4, 2, 0, 1, 3]
    assert generate(cli, target, "--identity", path).code == 0
    refused = generate(cli, target, "--identity", path, "--activations", "int8")
    assert refused.code == 4 and "activations differs" in refused.sentence
    assert cli("identity", target).code == 2
    assert cli("verify", target, "--identity", tmp_path / "none").code == 2
