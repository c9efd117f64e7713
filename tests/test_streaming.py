"""Incremental text: no replacement character before the character is known to be broken."""

import json
import types
from functools import cache

import numpy as np
import pytest
from cudflash.loader.bpe import BYTE_TO_CHAR
from cudflash.loader.gguf import open_gguf
from cudflash.loader.tokenizer import Tokenizer
from cudflash.loader.vocabulary import CONTROL, NORMAL
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.vectors import vector_path

EMOJI = "😀"  # four bytes


@cache
def byte_tokenizer():
    """Tokenizer whose token i is byte i; 256 is a control token."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*BYTE_TO_CHAR, "<|end|>"],
        "tokenizer.ggml.token_type": np.array([NORMAL] * 256 + [CONTROL], np.int32),
        "tokenizer.ggml.merges": [],
    }
    return Tokenizer.from_gguf(types.SimpleNamespace(metadata=metadata, path="made.gguf"))


def pieces_tokenizer(pieces):
    """Tokenizer whose token i decodes to pieces[i]."""
    tokens = ["".join(BYTE_TO_CHAR[byte] for byte in piece) for piece in pieces]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<pad>"],
        "tokenizer.ggml.merges": [],
    }
    return Tokenizer.from_gguf(types.SimpleNamespace(metadata=metadata, path="made.gguf"))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_push_emoji_split_over_two_tokens_comes_whole(first):
    """Catches decoding each token alone: splits 1+3, 2+2 and 3+1 all gave U+FFFD elsewhere."""
    data = EMOJI.encode()
    stream = pieces_tokenizer([data[:first], data[first:]]).stream()
    assert stream.push(0) == ""
    assert stream.pending == data[:first]
    assert stream.push(1) == EMOJI
    assert stream.finish() == ""


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_push_text_split_at_every_byte_has_no_replacement(text):
    """Catches any premature U+FFFD and any lost byte: one token per byte."""
    stream = byte_tokenizer().stream()
    deltas = [stream.push(byte) for byte in text.encode()]
    assert "".join(deltas) + stream.finish() == text
    # a delta is whole characters of the text, never part of one
    position = 0
    for delta in deltas:
        assert text.startswith(delta, position)
        position += len(delta)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_push_any_bytes_joined_equal_full_decode(ids):
    """Catches a stream that treats broken UTF-8 unlike a decode of the whole."""
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream()
    joined = "".join(map(stream.push, ids)) + stream.finish()
    assert joined == tokenizer.decode(ids).decode("utf-8", "replace")


def test_finish_truncated_tail_is_flushed():
    """Catches the end of a cut answer being swallowed, and a stream that is dead afterwards."""
    stream = byte_tokenizer().stream()
    data = EMOJI.encode()
    assert [stream.push(byte) for byte in data[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"
    assert "".join(map(stream.push, data)) == EMOJI


def test_push_control_token_is_silent_unless_asked_for():
    """Catches end-of-turn markers leaking into the answer."""
    tokenizer = byte_tokenizer()
    assert tokenizer.stream().push(256) == ""
    assert tokenizer.stream(special=True).push(256) == "<|end|>"


@pytest.mark.parametrize("name", ["smollm2", "gemma-3", "qwen35", "llama-spm"])
@pytest.mark.parametrize("continuation", [False, True])
def test_push_recorded_cases_joined_equal_full_decode(name, continuation):
    """Catches differences between stream and decode on real vocabularies (prefix, byte tokens)."""
    tokenizer = Tokenizer.from_gguf(open_gguf(vector_path(f"tokenizer/{name}.gguf")))
    for case in json.loads(vector_path(f"tokenizer/{name}.json").read_bytes())["cases"]:
        ids = case["ids_add1_parse1"]
        for special in (False, True):
            flags = {"special": special, "continuation": continuation}
            stream = tokenizer.stream(**flags)
            joined = "".join(map(stream.push, ids)) + stream.finish()
            assert joined == tokenizer.decode(ids, **flags).decode()
