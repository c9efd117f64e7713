"""`cudflash verify`: what it compares, what it tells, its exit codes."""

from dataclasses import replace

import pytest

from cudflash.cli.verify import _lines
from cudflash.verify import Verifier
from tests.cli.pairs import put_directory, put_draft, put_target

CONTEXT = ("-c", 256, "-t", 1)
QUICK = ("-p", "hello", "-n", 10, *CONTEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two targets, the draft of one beside them, and a draft that fits neither."""
    folder = tmp_path_factory.mktemp("verify")
    put_target(folder)
    put_target(folder, "qwen3", "plain.gguf")
    put_draft(folder, "dflash-model.gguf")
    put_directory(folder)
    put_directory(folder, "v1-qwen3-full", "other")
    return folder


@pytest.fixture
def target(folder):
    return folder / "model.gguf"


def kinds(done):
    """Names of the checks of a run with --json."""
    return {check["name"] for check in done.json["checks"]}


def test_pair_passes_and_reports(cli, folder, target):
    """An exit code that says nothing, or an object that lacks what people compare."""
    done = cli("verify", target, folder / "draft", *QUICK, "--json", "--no-scripted")
    assert done.code == 0 and done.json["passed"] and done.json["draft"].endswith("draft")
    assert kinds(done) == {"match", "gate", "auto", "ratio-replay", "rule"}
    keys = {"first_difference", "plain_id", "drafted_id", "margin", "plain_sha256",
            "drafted_sha256", "drafted", "accepted"}  # fmt: skip
    assert all(keys <= check.keys() for check in done.json["checks"])
    match = [c for c in done.json["checks"] if c["name"] == "match"]
    assert {(c["verify_length"], c["temperature"]) for c in match} == {
        (n, t) for n in (3, 7, 15) for t in (0.0, 0.8)
    }
    assert all(c["plain_sha256"] == c["drafted_sha256"] and c["drafted"] for c in match)


def test_text_of_the_draft_beside_the_model(cli, target):
    """A table without the check that one looks for, or without a last word."""
    done = cli("verify", target, *QUICK)
    text = done.out.decode()
    assert done.code == 0 and "everything is equal" in text.splitlines()[-1]
    for words in ("match", "gate", "oracle", "always-wrong", "keep-k", "cycle", "ratio-replay"):
        assert words in text
    assert "dflash-model.gguf" in done.err and "beside" in done.err


@pytest.mark.parametrize("args", [("plain.gguf",), ("model.gguf", "none"), ("model.gguf", None)])
def test_without_a_draft_the_rules_are_compared(cli, folder, args):
    """Nothing at all compared, and called equal."""
    words = ("--no-draft",) if args[1:] == (None,) else args[1:]
    done = cli("verify", folder / args[0], *words, *QUICK, "--json")
    assert done.code == 0 and done.json["draft"] is None
    sessions = {f"session-{name}" for name in ("requests", "shorter", "alternating")}
    assert kinds(done) == {"scripted", "rule"} | sessions
    assert {c["drafter"] for c in done.json["checks"] if c["name"] == "scripted"} == {
        "oracle", "always-wrong", "keep-k", "cycle", "random",
    }  # fmt: skip


def test_difference_is_exit_1_and_named(cli, folder, target, monkeypatch):
    """A difference that is counted, but neither shown nor returned.

    The fault is injected: one token of every answer of verify length 7 is another one.
    """
    answer = Verifier.answer

    def altered(self, prompt, sampling, **options):
        result = answer(self, prompt, sampling, **options)
        if options.get("verify_length") != 7:
            return result
        tokens = (*result.tokens[:3], result.tokens[3] ^ 1, *result.tokens[4:])
        return replace(result, tokens=tokens)

    monkeypatch.setattr(Verifier, "answer", altered)
    args = ("verify", target, folder / "draft", *QUICK, "--no-scripted")
    done = cli(*args, "--json")
    wrong = [check for check in done.json["checks"] if not check["passed"]]
    assert done.code == 1 and not done.json["passed"] and len(wrong) == 2
    for check in wrong:
        assert (check["name"], check["verify_length"], check["first_difference"]) == ("match", 7, 3)
        assert check["drafted_id"] == check["plain_id"] ^ 1 and check["margin"] >= 0
        assert check["plain_sha256"] != check["drafted_sha256"]
    text = cli(*args)
    assert text.code == 1 and "NOT equal" in text.out.decode().splitlines()[-1]
    shown = (wrong[0]["plain_id"], wrong[0]["drafted_id"], wrong[0]["plain_sha256"][:16], "token 3")
    assert all(str(words) in text.out.decode() for words in shown)


def test_prompts_are_read_line_by_line(cli, target, tmp_path):
    """A file of prompts taken for one prompt."""
    path = tmp_path / "prompts"
    path.write_text("one\n\ntwo\n")
    done = cli("verify", target, "-f", path, "-n", 4, *CONTEXT, "--json", "--no-scripted")
    assert done.code == 0 and {c["prompt"] for c in done.json["checks"]} == {0, 1, None}
    path.write_text("\n")
    assert cli("verify", target, "-f", path).code == 2
    path.write_bytes(b"one\r\ntwo\rthree\x0c\xe2\x80\xa8\n")  # no other byte ends a line
    assert _lines(path) == ["one", "two", "three\x0c\u2028"]


@pytest.mark.parametrize("data, words", [
    (None, "cannot be read (No such file or directory); check the path"),
    (b"one\ntwo\xff", "byte 7 is not UTF-8, expected UTF-8 text; convert it first"),
])  # fmt: skip
def test_prompts_that_cannot_be_read_are_one_sentence(cli, tmp_path, data, words):
    """An exception of Python shown to the user as it is."""
    path = tmp_path / "prompts"
    if data is not None:
        path.write_bytes(data)
    done = cli("verify", "no.gguf", "-f", path)
    assert done.code == 2 and done.sentence == f"error: {path}: {words}"


def test_qualify_below_the_floor_fails(cli, target):
    """A floor that is only printed."""
    done = cli("verify", target, "--qualify", "--floor", 0.95, "-p", "hi", "-c", 300, "-t", 1)
    assert done.code == 1 and b"below the floor" in done.out


@pytest.mark.parametrize(
    "files, args, code, words",
    [
        (("model.gguf", "other"), (), 4, "does not belong to the target"),
        (("plain.gguf", "dflash-model.gguf"), (), 4, "does not belong to the target"),
        (("dflash-model.gguf",), (), 2, "this is a draft"),
        (("draft",), (), 2, "this is a draft"),
        (("model.gguf", "plain.gguf"), (), 2, "this is a target"),
        (("missing", "draft"), (), 3, "missing"),
        (("model.gguf", "missing"), (), 3, "missing"),
        (("model.gguf", "draft"), ("--draft", "x"), 2, "given twice"),
        (("plain.gguf",), ("--qualify",), 2, "needs a draft"),
        (("model.gguf", "draft"), ("-n", 2), 2, "at least 3"),
        (("model.gguf", "draft"), ("--temp", 0), 2, "temperature"),
        (("model.gguf", "draft"), ("--qualify", "--floor", 2), 2, "floor"),
        (("model.gguf", "draft"), ("--identity", "none"), 2, "none"),
    ],
)
def test_wrong_arguments_are_one_sentence(cli, folder, files, args, code, words):
    """A traceback, or a code that a script takes for a difference."""
    done = cli("verify", *(folder / name for name in files), "-p", "hi", *CONTEXT, *args)
    assert done.code == code and words in done.sentence and done.out == b""
