"""Tokenizer against llama.cpp's recorded ids, two other libraries, and its own invariants."""

import base64
import json
import random
import struct
import types
from functools import cache

import numpy as np
import pytest
from cudflash.loader.bpe import BYTE_TO_CHAR
from cudflash.loader.gguf import open_gguf
from cudflash.loader.merging import NEVER, _merge_by_heap, _merge_by_scan
from cudflash.loader.pretokenizers import PRE_TOKENIZERS
from cudflash.loader.tokenizer import Tokenizer
from cudflash.loader.vocabulary import BYTE, CONTROL, NORMAL, USER_DEFINED
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.errors import FormatError, UnsupportedError, UsageError
from tests.helpers.vectors import ARCHES, vector_path

VOCABULARIES = ("smollm2", "gemma-3", "qwen35", "llama-bpe", "llama-spm", "gpt-2")


@cache
def vocabulary(name, pre=None):
    """Tokenizer of a vector vocabulary, its pre-tokenizer name replaced if given."""
    gguf = open_gguf(vector_path(f"tokenizer/{name}.gguf"))
    if pre is None:
        return Tokenizer.from_gguf(gguf)
    metadata = {**gguf.metadata, "tokenizer.ggml.pre": pre}
    return Tokenizer.from_gguf(types.SimpleNamespace(metadata=metadata, path=gguf.path))


@cache
def recorded(name):
    return json.loads(vector_path(f"tokenizer/{name}.json").read_bytes())


def tokenizer_has(tokenizer, byte):
    """Whether a byte-level vocabulary has a token for a byte."""
    return BYTE_TO_CHAR[byte].encode() in tokenizer.vocabulary.ids


def make(tokens, *, kinds=None, model="gpt2", **keys):
    """Tokenizer of a hand-made vocabulary."""
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": np.array(kinds or [NORMAL] * len(tokens), dtype=np.int32),
    }
    if model == "gpt2":
        metadata |= {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": []}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return Tokenizer.from_gguf(types.SimpleNamespace(metadata=metadata, path="made.gguf"))


# Recorded by llama.cpp ----------------------------------------------------------------------


@pytest.mark.parametrize("name", VOCABULARIES)
def test_encode_recorded_cases_equal_llama_cpp(name):
    """Catches any deviation of splitting, merging, special tokens or BOS/EOS from llama.cpp."""
    tokenizer = vocabulary(name)
    for case in recorded(name)["cases"]:
        text = base64.b64decode(case["text_b64"]).decode()
        for add in (0, 1):
            for parse in (0, 1):
                found = tokenizer.encode(text, add_special=bool(add), parse_special=bool(parse))
                assert found == case[f"ids_add{add}_parse{parse}"], (text, add, parse)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_detokenize_recorded_cases_equal_llama_cpp(name):
    """Catches wrong bytes: space prefix, clean_spaces, hidden control tokens, byte tokens."""
    tokenizer = vocabulary(name)
    for case in recorded(name)["cases"]:
        for key, expected in case["detok_b64"].items():
            ids, flags = key.split("__")
            found = tokenizer.detokenize(
                case["ids_" + ids],
                remove_special="remove1" in flags,
                unparse_special="unparse1" in flags,
            )
            assert found == base64.b64decode(expected), (case["text"], key)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_decode_pieces_and_bytes_equal_llama_cpp(name):
    """Catches lossy pieces: bytes of a cut character must come out as they are."""
    tokenizer, data = vocabulary(name), recorded(name)
    for token, (plain, special) in data["pieces"].items():
        assert tokenizer.decode_piece(int(token)) == base64.b64decode(plain)
        assert tokenizer.decode_piece(int(token), special=True) == base64.b64decode(special)
    for case in data["byte_detok"]:
        if case["ids"] is not None:
            expected = base64.b64decode(case["detok_b64"])
            assert tokenizer.detokenize(case["ids"], unparse_special=True) == expected
            pieces = [base64.b64decode(piece) for piece in case["pieces_b64"]]
            assert [tokenizer.decode_piece(token) for token in case["ids"]] == pieces


@pytest.mark.parametrize("name", VOCABULARIES)
def test_special_ids_equal_llama_cpp(name):
    """Catches a wrong end-of-generation set (answers that never end) or BOS/EOS rule."""
    tokenizer, data = vocabulary(name), recorded(name)
    special = data["special"]
    assert sorted(tokenizer.eog_ids) == data["eog_ids"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (special["bos"], special["eos"])
    assert (tokenizer.add_bos, tokenizer.add_eos) == (special["add_bos"], special["add_eos"])
    assert tokenizer.vocab_size == data["n_vocab"]


def test_encode_fuzz_corpus_equals_llama_cpp():
    """Catches a wrong pre-tokenizer pattern, also where a name has no vocabulary of its own."""
    fuzz = recorded("fuzz")
    for entry in fuzz["sets"]:
        tokenizer = vocabulary(entry["vocab"], entry["pre"])
        for i, text in enumerate(fuzz["texts"]):
            for add in (False, True):
                found = tokenizer.encode(text, add_special=add, parse_special=add)
                expected = entry[f"ids_add{add:d}_parse{add:d}"][i]
                assert found == expected, (entry["vocab"], entry["pre"], text)


@pytest.mark.parametrize("arch", ARCHES)
def test_encode_tiny_target_vocabularies_equal_llama_cpp(arch):
    """Catches a vocabulary of a complete model file that reads differently from a bare one."""
    tokenizer = Tokenizer.from_gguf(open_gguf(vector_path(f"targets/{arch}-f32.gguf")))
    for case in recorded("tiny")[arch]:
        for key in ("ids_add0_parse0", "ids_add0_parse1", "ids_add1_parse0", "ids_add1_parse1"):
            flags = {"add_special": "add1" in key, "parse_special": "parse1" in key}
            assert tokenizer.encode(case["text"], **flags) == case[key], (case["text"], key)
        expected = base64.b64decode(case["detok_add0_parse1_b64"])
        assert tokenizer.detokenize(case["ids_add0_parse1"], unparse_special=True) == expected


# Second opinions ----------------------------------------------------------------------

ALPHABETS = (
    "abcdefXYZ", "éüñÅßø", "0123456789", " \t\n\r", "'stremvdl", "!?.,;:/()<>|", "你好世界日本語",
    "😀👍🏽", "e\u0301a\u0300\u0323", "नमस्ते", "Привет",
)  # fmt: skip


def corpus(n, seed):
    rng = random.Random(seed)
    texts = []
    for _ in range(n):
        parts = []
        for _ in range(rng.randint(1, 12)):
            letters = rng.choice(ALPHABETS)
            parts.append("".join(rng.choices(letters, k=rng.randint(1, 6))))
            parts.append(rng.choice(["", " ", "  ", "\r\n"]))
        texts.append("".join(parts))
    return texts


def test_encode_bpe_equals_hugging_face_tokenizers():
    """Catches an error shared with the recorded vectors: an independent merge and regex engine."""
    tokenizers = pytest.importorskip("tokenizers")
    gguf = open_gguf(vector_path("tokenizer/smollm2.gguf"))
    tokens = list(gguf.metadata["tokenizer.ggml.tokens"])
    merges = [tuple(line.split(" ")) for line in gguf.metadata["tokenizer.ggml.merges"]]
    other = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    )
    other.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    ours = vocabulary("smollm2")
    for text in corpus(300, seed=1):
        assert ours.encode(text, add_special=False) == other.encode(text).ids, text


def _protobuf(number, value):
    """One field of a protocol buffer message: int, float, str or bytes."""

    def varint(n):
        out = b""
        while n > 127:
            out += bytes([n & 127 | 128])
            n >>= 7
        return out + bytes([n])

    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


@pytest.mark.parametrize("name", ["llama-spm", "gemma-3"])
def test_encode_spm_equals_sentencepiece(name):
    """Catches an error of merging by score: SentencePiece itself, fed with the file's pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    ours = vocabulary(name)
    vocab = ours.vocabulary
    # field numbers of sentencepiece_model.proto: pieces 1 (piece 1, score 2, type 3),
    # trainer_spec 2 (model_type 3 = BPE, byte_fallback 35), normalizer_spec 3
    pieces = []
    for token, score, kind in zip(vocab.tokens, vocab.scores, vocab.kinds):
        if kind == USER_DEFINED:  # the converter wrote these with plain spaces
            token = token.replace(b" ", "\u2581".encode())
        fields = _protobuf(1, token) + _protobuf(2, float(score)) + _protobuf(3, int(kind))
        pieces.append(_protobuf(1, fields))
    ids = {40: vocab.unk_id, 41: vocab.bos_id, 42: vocab.eos_id}
    trainer = _protobuf(3, 2) + _protobuf(35, 1)
    trainer += b"".join(_protobuf(number, token) for number, token in ids.items())
    normalizer = _protobuf(1, "identity") + _protobuf(3, int(ours.add_space_prefix))
    normalizer += _protobuf(4, 0) + _protobuf(5, 1)
    other = sentencepiece.SentencePieceProcessor()
    other.LoadFromSerializedProto(
        b"".join(pieces) + _protobuf(2, trainer) + _protobuf(3, normalizer)
    )
    for text in corpus(200, seed=2):
        assert ours.encode(text, add_special=False) == other.encode(text), text


# Rules ----------------------------------------------------------------------


@pytest.mark.parametrize("name", VOCABULARIES)
def test_encode_special_text_gives_one_id(name):
    """Catches think tags or turn markers split into sub-words, and markers parsed in user text."""
    tokenizer = vocabulary(name)
    kinds = tokenizer.vocabulary.kinds
    for token in tokenizer.vocabulary.special_ids()[:400]:
        text = tokenizer.token_text(token)
        assert tokenizer.encode(text, add_special=False, parse_special=True) == [token]
        plain = tokenizer.encode(text, add_special=False, parse_special=False)
        if kinds[token] == USER_DEFINED:
            assert plain == [token]
        elif tokenizer.vocabulary.overridden.get(token) != NORMAL:
            assert token not in plain, text


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
@pytest.mark.parametrize("name", ["smollm2", "qwen35", "llama-spm", "gemma-3"])
def test_decode_of_encode_returns_the_text(name, text):
    """Catches lost or invented bytes for any text, NUL and unassigned characters too.

    smollm2 has no token for some bytes (0x1d, 0xf1, ...): that must be an error, not a loss.
    """
    tokenizer = vocabulary(name)
    missing = {b for b in range(256) if name == "smollm2" and not tokenizer_has(tokenizer, b)}
    if missing & set(text.encode()):
        with pytest.raises(UsageError, match="has no token"):
            tokenizer.encode(text)
        return
    if "\u2581" in text:  # SentencePiece cannot tell its space marker from a space
        return
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_split_words_joined_are_the_text(pre, text):
    """Catches a pattern that drops a character."""
    words = PRE_TOKENIZERS[pre].split(text)
    assert "".join(words) == text
    assert all(words)


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab", min_size=1, max_size=24),
    st.dictionaries(st.text(alphabet="ab", min_size=2, max_size=4), st.integers(0, 3)),
)
def test_merge_heap_and_scan_agree(text, costs):
    """Catches a stale heap entry or a tie taken from the right: repeated costs force both."""

    def cost(left, right):
        return costs.get((left + right).decode(), NEVER)

    symbols = [bytes([byte]) for byte in text.encode()]
    assert _merge_by_heap(list(symbols), cost) == _merge_by_scan(list(symbols), cost)


def test_encode_long_words_take_the_heap_and_stay_fast():
    """Catches quadratic time on text without spaces (CJK, base64)."""
    tokenizer = vocabulary("qwen35")
    text = "世界你好" * 2500
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()


def test_encode_eog_text_overrides_the_file():
    """Catches trust in a file that marks </s> as ordinary text (gemma-3 does)."""
    tokenizer = vocabulary("gemma-3")
    token = tokenizer.vocabulary.ids[b"</s>"]
    assert tokenizer.vocabulary.overridden == {token: USER_DEFINED}
    assert token not in tokenizer.encode("</s>")
    assert tokenizer.encode("</s>", add_special=False, parse_special=True) == [token]


def test_encode_muse_glimmer_pre_tokenizer_is_llama4():
    """Catches a name that issue and converter use for the same tokenizer being split apart."""
    assert PRE_TOKENIZERS["muse-glimmer"] is PRE_TOKENIZERS["llama4"]
    words = PRE_TOKENIZERS["llama4"].split("HTTPServer don't 12345 a/b/\n\n  x")
    assert words == ["HTTPServer", " don't", " ", "123", "45", " a", "/b", "/\n\n", " ", " x"]


def test_encode_decomposed_text_is_not_composed():
    """Catches silent NFC: llama.cpp does not normalise, so composed and decomposed differ."""
    tokenizer = vocabulary("qwen35")
    assert tokenizer.encode("é") != tokenizer.encode("e\u0301")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "e\u0301".encode()


def test_encode_byte_without_token_is_an_error():
    """Catches dropped bytes, which change the prompt without a word."""
    alphabet = [char for char in BYTE_TO_CHAR if char != "!"]
    with pytest.raises(UsageError, match="byte 0x21, for which .* no token"):
        make(alphabet).encode("hi!")
    spm = make(["<unk>", "<s>", "</s>", "a"], model="llama")
    with pytest.raises(UsageError, match="no token"):
        spm.encode("b")


def test_encode_byte_fallback_in_bpe():
    """Catches vocabularies that spell missing bytes as <0xNN>."""
    tokenizer = make(["a", "<0x21>"], kinds=[NORMAL, BYTE])
    assert tokenizer.encode("a!") == [0, 1]
    assert tokenizer.decode([0, 1]) == b"a!"


def test_encode_specials_longest_first():
    """Catches the order of special tokens: the longest wins wherever it stands, as in llama.cpp."""
    tokens = [*BYTE_TO_CHAR, "<ab>", "<a", "b><x>"]
    tokenizer = make(tokens, kinds=[NORMAL] * 256 + [CONTROL] * 3)
    first, second, third = 256, 257, 258
    assert tokenizer.encode("<ab><a", parse_special=True) == [first, second]
    assert tokenizer.encode("<ab><x>", parse_special=True) == [second, third]


def test_encode_many_specials_with_one_first_character():
    """Catches the look-up by position that vocabularies with thousands of reserved tokens take."""
    reserved = [f"<unused{i}>" for i in range(100)]
    tokenizer = make([*BYTE_TO_CHAR, *reserved], kinds=[NORMAL] * 256 + [CONTROL] * 100)
    found = tokenizer.encode("<unused7><unused77><<unused100>", parse_special=True)
    assert found[:2] == [263, 333]
    assert all(token < 256 for token in found[2:])


@pytest.mark.parametrize(
    ("keys", "text", "expected"),
    [
        ({"add_bos_token": True, "bos_token_id": 0}, "b", [0, 2]),
        ({"add_bos_token": False, "bos_token_id": 0}, "b", [2]),
        ({"add_eos_token": True, "eos_token_id": 0}, "b", [2, 0]),
        ({"add_bos_token": True, "bos_token_id": 0}, "", [0]),
    ],
)
def test_encode_bos_and_eos_follow_the_file(keys, text, expected):
    """Catches BOS or EOS that is missing, doubled, or added against the file's word."""
    tokenizer = make(["<s>", "a", "b"], kinds=[CONTROL, NORMAL, NORMAL], **keys)
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode(text, add_special=False) == [i for i in expected if i]


def test_decode_keeps_the_first_space_of_a_continuation():
    """Catches an answer that loses its first space because the decoder took it for the prefix."""
    tokenizer = vocabulary("llama-spm")
    ids = tokenizer.encode("Hello world", add_special=False)
    assert tokenizer.decode(ids) == b"Hello world"
    assert tokenizer.decode(ids, continuation=True) == b" Hello world"
    assert tokenizer.decode(tokenizer.encode("Hello")) == b"Hello"


def test_detokenize_cleans_spaces_where_llama_cpp_does():
    """Catches cleaning in the exact decoder, and its absence in the comparison one."""
    tokenizer = vocabulary("gpt-2")
    ids = tokenizer.encode("a , b ' c 's d ! 've x 't")
    assert tokenizer.decode(ids) == b"a , b ' c 's d ! 've x 't"
    assert tokenizer.detokenize(ids) == b"a, b'c's d!'ve x 't"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "no-such"}, UnsupportedError, "is 'no-such', expected one of .*llama-bpe.*smollm"),
        ({"pre": None}, UnsupportedError, "tokenizer.ggml.pre is missing"),
        ({"model": "bert"}, UnsupportedError, "is 'bert', expected gpt2"),
        ({"merges": None}, FormatError, "merges is missing"),
        ({"tokens": []}, FormatError, "tokens is missing or empty"),
        ({"tokens": ["a", "b", "a"]}, FormatError, "tokens 0 and 2 have the same text"),
        ({"token_type": np.ones(1, np.int32)}, FormatError, "1 entries .* expected 2"),
        ({"add_bos_token": True}, FormatError, "bos_token_id is missing"),
        ({"add_bos_token": 1}, FormatError, "expected a bool"),
    ],
)
def test_from_gguf_bad_metadata_is_one_sentence(changes, error, message):
    """Catches a guess where the file is silent or wrong: each case has its own message."""
    model = changes.pop("model", "gpt2")
    with pytest.raises(error, match=message) as caught:
        metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": "gpt-2"}
        metadata |= {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": []}
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        Tokenizer.from_gguf(types.SimpleNamespace(metadata=metadata, path="made.gguf"))
    assert str(caught.value).startswith("made.gguf: ")


def test_encode_invalid_unicode_is_refused():
    """Catches undecodable input slipping in as something else: llama.cpp itself dies on some."""
    with pytest.raises(UsageError, match=r"'\\udcff' at character 2"):
        vocabulary("smollm2").encode("ab\udcff")


def test_decode_id_outside_the_vocabulary_is_refused():
    """Catches Python's negative indexing turning id -1 into the last token."""
    tokenizer = vocabulary("smollm2")
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            tokenizer.decode([token])


def test_eog_harmony_end_is_no_end():
    """Catches answers cut at <|end|>, which only closes a channel beside <|return|>, <|call|>."""
    texts = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    tokenizer = make(texts, kinds=[CONTROL] * 4)
    assert tokenizer.eog_ids == {1, 2}
    assert tokenizer.decode([3]) == b"<|channel|>"
