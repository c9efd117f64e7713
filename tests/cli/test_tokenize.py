"""`cudflash tokenize`: ids, pieces, and the way back."""

import pytest

from cudflash.cli.tokenize import parse_ids
from cudflash.errors import UsageError
from tests.helpers.engines import engine
from tests.helpers.vectors import vector_path

TEXT = "Hello wörld 🙂\n\ttab"


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_ids_are_those_of_the_tokenizer_and_decode_back(cli, arch):
    """Bytes that are lost on the way to ids and back."""
    path, tokenizer = vector_path(f"targets/{arch}-kq.gguf"), engine(arch).tokenizer
    done = cli("tokenize", path, "-p", TEXT, "--json", "--no-special")
    assert done.json["ids"] == tokenizer.encode(TEXT, add_special=False)
    assert [t["id"] for t in done.json["tokens"]] == done.json["ids"]
    assert bytes(b for t in done.json["tokens"] for b in t["bytes"]).endswith(TEXT.encode())
    back = cli("tokenize", path, "--decode", "-p", str(done.json["ids"]))
    assert back.out == TEXT.encode()
    assert cli("tokenize", path, "--decode", "--json", stdin=b"263").json["ids"] == [263]


def test_ids_alone_are_a_list(cli, model):
    """Output that the --decode of the same command cannot read."""
    done = cli("tokenize", model, "-p", "a b", "--ids")
    assert done.out.startswith(b"[1, ") and parse_ids(done.out.decode())[0] == 1


def test_table_shows_bytes_that_are_no_character(cli, model):
    """Half an emoji shown as a replacement character."""
    text = cli("tokenize", model, "-p", "🙂\n").out.decode()
    assert r"'\xf0'" in text and r"'\n'" in text and "\ufffd" not in text


def test_special_tokens_are_parsed_only_when_asked(cli, model):
    """Control tokens smuggled in by text; or no way to write a prompt by hand."""
    text, parsed = (
        cli("tokenize", model, "-p", "</s>", "--no-bos", "--json", *more).json["ids"]
        for more in ([], ["--parse-special"])
    )
    assert parsed == [2] and len(text) > 1


def test_chat_shows_the_ids_of_the_template(cli, chat_model):
    """A template that users cannot look at."""
    done = cli("tokenize", chat_model, "--chat", "-p", "hi", "--json")
    text = "".join(token["text"] for token in done.json["tokens"])
    assert text == "<s> <user>hi\n<assistant>"


@pytest.mark.parametrize(
    "args, words",
    [
        (["--decode", "--ids", "-p", "1"], "--ids"),
        (["--decode", "--no-special", "-p", "1"], "--no-special"),
        (["--chat", "--parse-special", "-p", "x"], "--chat"),
        (["--decode", "-p", "1 x"], "'x'"),
        (["--decode", "-p", "-1"], "'-1'"),
        (["--decode", "-p", "320"], "319"),
    ],
)
def test_contradictions_and_wrong_ids_are_one_sentence(cli, model, args, words):
    """A flag that is silently ignored, or an id that becomes another."""
    done = cli("tokenize", model, *args)
    assert done.code == 2 and words in done.sentence


def test_parse_ids_reads_the_usual_forms():
    """Ids copied from a program's output that are refused."""
    for text in ("1 2 3", "1,2,3", "[1, 2, 3]", " [1\n2\t3] "):
        assert parse_ids(text) == [1, 2, 3]
    assert parse_ids("[]") == parse_ids("") == []
    with pytest.raises(UsageError):
        parse_ids("1.5")
