"""`--drafter mtp`: drafting with the model's own MTP block from the command line."""

import pytest

from tests.cli.conftest import TEMPLATE, with_template
from tests.helpers.hybrid_model import hybrid_path
from tests.helpers.vectors import vector_path

CONTEXT = ("-c", 256, "-t", 1)
MTP = ("--drafter", "mtp")


def generate(cli, model, *args):
    return cli("generate", model, "-p", "hello", "-n", 16, "--temp", 0, *CONTEXT, *args)


@pytest.mark.parametrize(
    "length, k, covering", [((), 3, 3), (("--verify-length", 5), 5, 7), (("--verify-length", 1), 1, 3)]
)
def test_block_drafts_as_many_tokens_as_asked_for(cli, length, k, covering):
    """A depth that is rounded to a verify length, or dropped; another answer than the plain one."""
    model = hybrid_path()
    done = generate(cli, model, *MTP, *length, "--speculative", "on", "--require-draft", "--json")
    assert done.code == 0, done.err
    plain = generate(cli, model, "--no-draft", "--json")
    assert done.json["tokens"] == plain.json["tokens"]
    drafting = done.json["receipt"]["speculative"]
    assert drafting["verify_length"] == covering
    first = drafting["trace"][0]
    assert len(first["drafted"]) == k, first
    assert f"its own MTP block, {k} token" in done.err and "rounded" not in done.err


def test_draft_beside_the_model_is_left_alone(cli, tmp_path):
    """A draft found beside the model that takes the block's place."""
    model = tmp_path / "model.gguf"
    model.symlink_to(hybrid_path())
    (tmp_path / "dflash-broken.gguf").write_bytes(b"GGUF")
    assert generate(cli, model, *MTP, "-n", 4).code == 0


@pytest.mark.parametrize(
    "args, words",
    [
        (("--draft", "d.gguf"), "--drafter mtp and the draft d.gguf were both given; pass one"),
        (("--no-draft",), "--drafter mtp and --no-draft were both given; pass one"),
        (("--draft-window", 8), "--draft-window is about a draft file"),
        (("--draft-short-block",), "--draft-short-block is about a draft file"),
        (("--identity", "i.json"), "--identity i.json is that of a model and its draft file, and"),
        (("--speculative", "off", "--require-draft"), "drafting was switched off with --speculative"),
        (("--verify-length", 16), "--verify-length is 16, expected 1 to 15 with --drafter mtp"),
        (("--verify-length", 0), "--verify-length is 0, expected 1 to 15 with --drafter mtp"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(cli, args, words):
    """One of two drafters used without a word, or a depth that nobody has."""
    done = generate(cli, hybrid_path(), *MTP, *args)
    assert done.code == 2 and words in done.sentence


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_model_without_the_block_is_refused(cli, command):
    """A model without a block that is answered plainly, as if it had drafted."""
    for model in (hybrid_path(mtp=False), vector_path("targets/llama-kq.gguf")):
        done = cli(command, model, "-p", "hello", *CONTEXT, *MTP)
        assert done.code != 0 and "the file has no MTP block" in done.sentence


def test_bench_names_the_range_of_the_block(cli):
    """Catches the verify lengths of drafts offered where the block takes any k."""
    model = vector_path("hybrid_pair/hybrid-tiny-q4_k_m.gguf")
    done = cli("bench", model, "--drafters", "mtp", "--k", 16)
    assert done.code == 2 and "is 16, expected a whole number from 1 to 15" in done.sentence


def test_chat_drafts_with_the_block(cli, tmp_path):
    """A second answer of a conversation that loses the block's rows."""
    model = with_template(hybrid_path(), tmp_path / "chat.gguf", TEMPLATE)
    lines = b"hello\nagain\n"
    args = (*CONTEXT, "-n", 12, "--temp", 0, "--json")
    done = cli("chat", model, *args, *MTP, "--verify-length", 2, "--speculative", "on", stdin=lines)
    plain = cli("chat", model, *args, "--no-draft", stdin=lines)
    assert done.code == plain.code == 0, done.err
    import json

    answers = [[json.loads(line) for line in run.out.splitlines()] for run in (done, plain)]
    assert [a["tokens"] for a in answers[0]] == [a["tokens"] for a in answers[1]]
    assert all(a["stats"]["speculative"]["used"] for a in answers[0]) and len(answers[0]) == 2


def test_verify_compares_the_block_with_plain_answers(cli):
    """A proof that leaves the drafter out that was asked for."""
    done = cli("verify", hybrid_path(), *MTP, "-p", "hello there", "-n", 12, "--no-scripted",
               *CONTEXT, "--json")  # fmt: skip
    assert done.code == 0 and done.json["passed"]
    made = [c for c in done.json["checks"] if c["drafter"] == "mtp"]
    assert {c["verify_length"] for c in made if c["name"] == "match"} == {3, 7, 15}
    assert any(c["name"] == "ratio-replay" for c in made) and all(c["used"] for c in made[:3])
