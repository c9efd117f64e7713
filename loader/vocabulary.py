"""The vocabulary of a GGUF file: token texts, their kinds, special ids, end-of-generation ids.

Owns everything that is known about a token before any text is encoded. Must not know BPE or SPM.
Invariant: after ``read_vocabulary`` every id handed out is inside the vocabulary.

Some files mark end-of-turn tokens as ordinary text. Like llama.cpp, tokens with a well-known text
are taken as control tokens whatever the file says; ``overridden`` lists them.

Source: llama.cpp src/llama-vocab.cpp ``llama_vocab::impl::load``, commit 0c1e57098bba.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cudflash.errors import FormatError

# Token types of the file (tokenizer.ggml.token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# role -> (metadata keys, texts that mean the role when no key is present)
_ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "eot": (
        ("eot_token_id",),
        (
            "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
            "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>",
            "<end_of_utterance>",
        ),
    ),
    "eom": (("eom_token_id",), ("<|eom_id|>",)),
    "fim_pre": (
        ("fim_pre_token_id", "prefix_token_id"),
        (
            "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>",
            "▁<PRE>", "<|code_prefix|>", "<|prefix|>",
        ),
    ),
    "fim_suf": (
        ("fim_suf_token_id", "suffix_token_id"),
        (
            "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>",
            "▁<SUF>", "<|code_suffix|>", "<|suffix|>",
        ),
    ),
    "fim_mid": (
        ("fim_mid_token_id", "middle_token_id"),
        (
            "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
            "▁<MID>", "<|code_middle|>", "<|middle|>",
        ),
    ),
    "fim_pad": (
        ("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ),
    "fim_rep": (
        ("fim_rep_token_id",),
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ),
    "fim_sep": (("fim_sep_token_id",), ("<|file_sep|>",)),
}
_ENDING_ROLES = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")

# Texts that end generation in any vocabulary.
_ENDING_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# Channel markers that are shown as text although files mark them as control tokens.
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass
class Vocabulary:
    """What a file says about its tokens.

    ``ids`` maps a text to its id; ``kinds`` holds the token types after the overrides.
    """

    path: str
    tokens: list[bytes]
    ids: dict[bytes, int]
    kinds: np.ndarray  # (vocab_size,), int32
    scores: np.ndarray  # (vocab_size,), float32
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    roles: dict[str, int] = field(default_factory=dict)  # eot, eom, fim_*: id
    eog_ids: frozenset[int] = frozenset()
    overridden: dict[int, int] = field(default_factory=dict)  # id -> type the file gave

    def special_ids(self) -> list[int]:
        """Ids of the tokens that are cut out of a text before it is split into words."""
        kinds = self.kinds
        special = (kinds == CONTROL) | (kinds == USER_DEFINED) | (kinds == UNKNOWN)
        return np.flatnonzero(special).tolist()


def raw_strings(array: Sequence) -> list[bytes]:
    """Return a string array as bytes, without decoding where the array allows it."""
    raw = getattr(array, "raw", None)
    return raw() if raw else [item.encode() for item in array]


def read_vocabulary(metadata: Mapping, path: str, model: str) -> Vocabulary:
    """Read the vocabulary out of the metadata of a file.

    Parameters
    ----------
    metadata : mapping of key to value
    path : str
        For messages.
    model : str
        ``gpt2`` or ``llama``; decides the default special ids.

    Raises
    ------
    FormatError
        If arrays are missing or disagree in length, or two tokens have the same text.
    """
    array = metadata.get("tokenizer.ggml.tokens")
    if array is None or isinstance(array, str) or not len(array):
        raise FormatError(
            f"{path}: tokenizer.ggml.tokens is missing or empty, expected the token texts; "
            "convert the model again with its tokenizer"
        )
    tokens = raw_strings(array)
    if b"" in tokens:  # an empty text would match everywhere
        tokens = [token or b"[EMPTY_%d]" % i for i, token in enumerate(tokens)]
    n = len(tokens)
    ids = dict(zip(tokens, range(n)))
    if len(ids) < n:
        _report_duplicate(tokens, path)
    vocabulary = Vocabulary(
        path=path,
        tokens=tokens,
        ids=ids,
        kinds=_numbers(metadata, "token_type", n, np.int32, NORMAL, path).copy(),
        scores=_numbers(metadata, "scores", n, np.float32, 0, path),
    )
    if "tokenizer.ggml.token_type" not in metadata:
        # old files have no types; <|...|> is the one spelling that is never ordinary text
        for i, token in enumerate(tokens):
            if token.startswith(b"<|") and token.endswith(b"|>"):
                vocabulary.kinds[i] = CONTROL
    _find_special(vocabulary, metadata, model)
    _find_endings(vocabulary)
    return vocabulary


def _report_duplicate(tokens: list[bytes], path: str) -> None:
    first: dict[bytes, int] = {}
    for i, token in enumerate(tokens):
        if first.setdefault(token, i) != i:
            raise FormatError(
                f"{path}: the tokens {first[token]} and {i} have the same text "
                f"{token.decode('utf-8', 'replace')!r}, expected every text once; "
                "convert the model again"
            )


def _numbers(metadata: Mapping, name: str, n: int, dtype, default, path: str) -> np.ndarray:
    values = metadata.get("tokenizer.ggml." + name)
    if values is None:
        return np.full(n, default, dtype=dtype)
    values = np.asarray(values)
    if values.dtype.kind not in "iuf" or values.ndim != 1 or len(values) < n:
        raise FormatError(
            f"{path}: tokenizer.ggml.{name} has {values.size} entries of type {values.dtype}, "
            f"expected {n} numbers, one for each token; convert the model again"
        )
    return values[:n].astype(dtype, copy=False)


def _find_special(vocabulary: Vocabulary, metadata: Mapping, model: str) -> None:
    n = len(vocabulary.tokens)

    def declared(*names: str) -> int | None:
        found = None
        for name in names:  # the last key present wins
            value = metadata.get(f"tokenizer.ggml.{name}")
            # an id outside the vocabulary is ignored: published files have 2^32 - 1 for "none"
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < n:
                found = value
        return found

    vocabulary.bos_id = declared("bos_token_id")
    vocabulary.eos_id = declared("eos_token_id")
    vocabulary.unk_id = declared("unknown_token_id")
    vocabulary.pad_id = declared("padding_token_id")
    if model == "llama":  # SentencePiece's own ids, only if the texts are SentencePiece's own
        for name, text in (("unk_id", b"<unk>"), ("bos_id", b"<s>"), ("eos_id", b"</s>")):
            if getattr(vocabulary, name) is None:
                setattr(vocabulary, name, vocabulary.ids.get(text))
    for role, (keys, texts) in _ROLES.items():
        token = declared(*keys)
        if token is None:
            token = min(
                (vocabulary.ids[t.encode()] for t in texts if t.encode() in vocabulary.ids),
                default=None,
            )
            if token is not None:
                _set_kind(vocabulary, token, CONTROL)
        if token is not None:
            vocabulary.roles[role] = token


def _find_endings(vocabulary: Vocabulary) -> None:
    ids = vocabulary.ids
    ending = {vocabulary.roles[role] for role in _ENDING_ROLES if role in vocabulary.roles}
    for text in _ENDING_TEXTS:
        token = ids.get(text.encode())
        if token is not None:
            ending.add(token)
            _set_kind(vocabulary, token, CONTROL)
    for text in _SHOWN_TEXTS:
        token = ids.get(text.encode())
        if token is not None:
            _set_kind(vocabulary, token, USER_DEFINED)
    if vocabulary.eos_id is not None:
        ending.add(vocabulary.eos_id)
    texts = {vocabulary.tokens[token] for token in ending}
    # <|end|> closes a channel, not the answer, in vocabularies that also have these
    calls = {b"<|call|>", b"<|calls|>"} & texts
    if b"<|end|>" in texts and calls and {b"<|return|>", b"<|flush|>"} & texts:
        ending.remove(ids[b"<|end|>"])
        _set_kind(vocabulary, ids[b"<|end|>"], USER_DEFINED)
    # ... and </s> is plain text (strike-through markup) where <|tool_response> exists
    if {b"<|tool_response>", b"</s>"} <= texts:
        ending.remove(ids[b"</s>"])
        _set_kind(vocabulary, ids[b"</s>"], NORMAL)
    vocabulary.eog_ids = frozenset(ending)


def _set_kind(vocabulary: Vocabulary, token: int, kind: int) -> None:
    found = int(vocabulary.kinds[token])
    if found != kind:
        vocabulary.overridden.setdefault(token, found)
        vocabulary.kinds[token] = kind
