"""Text to token ids and back, from GGUF metadata alone.

Owns special tokens, BOS/EOS rules and detokenisation; merging lives in ``bpe`` and ``spm``. Must
not know models or chat templates. Ids equal llama.cpp's for every vocabulary it supports here.

Source: llama.cpp src/llama-vocab.cpp (``tokenizer_st_partition``, ``tokenize``,
``token_to_piece``, ``detokenize``), commit 0c1e57098bba.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cudflash.loader import bpe, spm, vocabulary
from cudflash.loader.pretokenizers import pre_tokenizer
from cudflash.loader.streaming import StreamDecoder
from cudflash.loader.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

from cudflash.errors import FormatError, UnsupportedError, UsageError


class Tokenizer:
    """The tokenizer of one model; made by ``from_gguf``.

    Attributes
    ----------
    vocab_size : int
    bos_id, eos_id : int or None
    eog_ids : frozenset of int
        Tokens that end an answer.
    add_bos, add_eos : bool
        What ``encode(add_special=True)`` adds; each is added once and is not looked for in the
        text (a text that spells BOS itself gets a second one, as in llama.cpp; chat prompts go
        through ``chat_template.encode_chat``, which never doubles it).
    add_space_prefix : bool
        Whether a space is put before the text (SentencePiece's dummy prefix).
    clean_spaces : bool
        Whether ``detokenize`` drops spaces before punctuation.
    """

    def __init__(self, metadata: Mapping, path: str):
        model = metadata.get("tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            found = "is missing" if model is None else f"is {model!r}"
            raise UnsupportedError(
                f"{path}: tokenizer.ggml.model {found}, expected gpt2 (byte-level BPE) or llama "
                "(SentencePiece BPE); use a model with one of these tokenizers"
            )
        is_spm = model == "llama"
        pre = None if is_spm else pre_tokenizer(metadata.get("tokenizer.ggml.pre"), path)
        vocab = vocabulary.read_vocabulary(metadata, path, model)
        self.vocabulary = vocab
        self.vocab_size = len(vocab.tokens)
        self.bos_id, self.eos_id, self.eog_ids = vocab.bos_id, vocab.eos_id, vocab.eog_ids
        self.add_bos = _flag(metadata, "add_bos_token", is_spm or pre.add_bos, path)
        self.add_eos = _flag(metadata, "add_eos_token", False, path)
        self.add_space_prefix = _flag(metadata, "add_space_prefix", is_spm, path)
        self.clean_spaces = bool(pre and pre.clean_spaces)
        for wanted, token, name in (
            (self.add_bos, self.bos_id, "bos"), (self.add_eos, self.eos_id, "eos")
        ):  # fmt: skip
            if wanted and token is None:
                raise FormatError(
                    f"{path}: the tokenizer adds {name.upper()} to every prompt, but "
                    f"tokenizer.ggml.{name}_token_id is missing or outside the vocabulary of "
                    f"{self.vocab_size}; convert the model again"
                )
        if is_spm:
            self._model, self._text_of = spm.SPM(vocab), spm.text_of
        else:
            merges = metadata.get("tokenizer.ggml.merges")
            if merges is None:
                raise FormatError(
                    f"{path}: tokenizer.ggml.merges is missing, expected the merge list of a gpt2 "
                    "tokenizer; convert the model again"
                )
            self._model = bpe.BPE(vocab, merges, pre)
            self._text_of = bpe.text_of
        self._kinds = vocab.kinds.tolist()
        self._pieces: dict[int, bytes] = {}
        self._longest: int | None = None  # bytes of the longest token
        self._specials: dict[str, dict[str, int]] | None = None

    @classmethod
    def from_gguf(cls, gguf) -> Tokenizer:
        """Build the tokenizer of an open file (anything with ``.metadata`` and ``.path``).

        Raises
        ------
        UnsupportedError
            For a tokenizer model or pre-tokenizer name that is not known here.
        FormatError
            For missing or contradictory metadata.
        """
        return cls(gguf.metadata, str(gguf.path))

    # Encoding -----------------------------------------------------------------------------------

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text : str
        add_special : bool
            Add BOS and EOS as the file asks for.
        parse_special : bool
            Whether the text of control tokens stands for the token. User-defined tokens always
            do. Leave it off for text from users.

        Raises
        ------
        UsageError
            If the text is not valid Unicode (a lone surrogate: undecodable input).
        """
        ids = [self.bos_id] if add_special and self.add_bos else []
        self.encode_parts(self.partition(text, parse_special), ids)
        if add_special and self.add_eos:
            ids.append(self.eos_id)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Tokens that a text has at least, from its length alone; at once for any text.

        No token stands for more bytes than it has itself, an unknown one for one character.
        """
        if self._longest is None:
            self._longest = max(4, *map(len, self.vocabulary.tokens))
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._longest)

    def encode_parts(self, parts: Sequence[str | int], ids: list[int]) -> None:
        """Append the ids of a partition: ids as they are, strings as plain text."""
        prefix = self.add_space_prefix
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                prefix = self.add_space_prefix
            else:
                self._model.encode(" " + part if prefix else part, ids)
                prefix = False

    def partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut special tokens out of a text: the longest first, each from left to right.

        Returns
        -------
        list of str and int
            Plain stretches (never empty) and token ids, in order.
        """
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise UsageError(
                f"the text holds {err.object[err.start]!a} at character {err.start}, which is no "
                "character, expected valid Unicode; check the encoding of the input (UTF-8 is read)"
            ) from None
        parts: list[str | int] = [text] if text else []
        for special, token in self._specials_in(text, parse_special):
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int) or special not in part:
                    cut.append(part)
                    continue
                for i, stretch in enumerate(part.split(special)):
                    if i:
                        cut.append(token)
                    if stretch:
                        cut.append(stretch)
            parts = cut
        return parts

    def control_texts_in(self, text: str) -> list[str]:
        """Texts of control tokens that occur in a text (what only ``parse_special`` would parse).

        Returns
        -------
        list of str
            The longest first.
        """
        found = self._specials_in(text, True)
        return [special for special, token in found if self._kinds[token] in (CONTROL, UNKNOWN)]

    def _specials_in(self, text: str, parse_special: bool) -> list[tuple[str, int]]:
        """Special tokens that occur in a text, the longest text (in bytes) first."""
        if self._specials is None:
            self._specials = self._special_table()
        found = []
        for first in self._specials.keys() & set(text):
            bucket = self._specials[first]
            if len(bucket) < 64:
                found += [item for item in bucket.items() if item[0] in text]
                continue
            # thousands of reserved tokens share "<": look up what stands at each "<" instead
            lengths = {len(special) for special in bucket}
            at, here = text.find(first), set()
            while at >= 0:
                here.update(text[at : at + length] for length in lengths)
                at = text.find(first, at + 1)
            found += [(special, bucket[special]) for special in here & bucket.keys()]
        if not parse_special:
            found = [item for item in found if self._kinds[item[1]] == USER_DEFINED]
        return sorted(found, key=lambda item: (-len(item[0].encode()), item[1]))

    def _special_table(self) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = {}
        for token in self.vocabulary.special_ids():
            text = self.token_text(token)
            table.setdefault(text[0], {})[text] = token
        return table

    # Decoding -----------------------------------------------------------------------------------

    def token_text(self, token: int) -> str:
        """Return the text of a token as the vocabulary spells it (not what it decodes to)."""
        return self.vocabulary.tokens[self._checked(token)].decode("utf-8", "replace")

    def decode_piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of one token, a leading space included.

        Parameters
        ----------
        token : int
        special : bool
            Show the text of control and unknown tokens; otherwise they are empty.
        """
        piece = self._pieces.get(token)
        if piece is None:
            kind = self._kinds[self._checked(token)]
            raw = self.vocabulary.tokens[token]
            if kind == NORMAL:
                piece = self._text_of(raw)
            elif kind == BYTE:
                piece = _byte_of(raw, self.vocabulary.path)
            else:  # unused tokens have no text
                piece = raw if kind in (CONTROL, UNKNOWN, USER_DEFINED) else b""
            self._pieces[token] = piece
        if not special and self._kinds[token] in (CONTROL, UNKNOWN):
            return b""
        return piece

    def decode(
        self, ids: Iterable[int], *, special: bool = False, continuation: bool = False
    ) -> bytes:
        """Return the exact bytes of a list of ids; may end inside a UTF-8 character.

        Parameters
        ----------
        ids : iterable of int
        special : bool
            Show the text of control tokens.
        continuation : bool
            The ids follow earlier text (an answer after its prompt). Otherwise the space that a
            SentencePiece encoder put before the text is taken off again.
        """
        data = [piece for token in ids if (piece := self.decode_piece(token, special))]
        if data and self.add_space_prefix and not continuation:
            data[0] = data[0].removeprefix(b" ")
        return b"".join(data)

    def stream(self, *, special: bool = False, continuation: bool = False) -> StreamDecoder:
        """Return an incremental decoder; the arguments mean the same as in ``decode``."""
        return StreamDecoder(self, special=special, continuation=continuation)

    def detokenize(
        self, ids: Sequence[int], *, remove_special: bool = False, unparse_special: bool = False
    ) -> bytes:
        """Return what ``llama_detokenize`` returns, its cleaning of spaces included.

        ``decode`` is exact; this one loses spaces before punctuation where the vocabulary asks for
        it (``clean_spaces``) and exists for comparison with llama.cpp.
        """
        ids, strip = list(ids), self.add_space_prefix
        if remove_special and self.add_bos and ids and ids[0] == self.bos_id:
            ids, strip = ids[1:], False
        if remove_special and self.add_eos and ids and ids[-1] == self.eos_id:
            ids.pop()
        data = [self.decode_piece(token, unparse_special) for token in ids]
        if data and strip:
            data[0] = data[0].removeprefix(b" ")
        joined = b"".join(data)
        return _clean(joined) if self.clean_spaces else joined

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise UsageError(
                f"token id {token} is outside the vocabulary, expected 0 to {self.vocab_size - 1}"
            )
        return token


def _flag(metadata: Mapping, name: str, default: bool, path: str) -> bool:
    value = metadata.get("tokenizer.ggml." + name, default)
    if not isinstance(value, bool):
        raise FormatError(
            f"{path}: tokenizer.ggml.{name} is {value!r}, expected a bool; convert the model again"
        )
    return value


def _byte_of(text: bytes, path: str) -> bytes:
    """Return the byte that a token ``<0xNN>`` stands for."""
    try:
        return bytes([int(text[3:5], 16)])
    except ValueError:
        raise FormatError(
            f"{path}: the byte token {text.decode('utf-8', 'replace')!r} is malformed, expected "
            "<0x00> to <0xFF>; convert the model again"
        ) from None


def _clean(text: bytes) -> bytes:
    """Apply llama.cpp's three passes over spaces; each looks at the text the previous one left.

    Passes: a space before ``? ! . ,``; both spaces around a lone apostrophe; a space before
    ``'s 'm 're 've``.
    """
    out = bytearray(text[:1])
    for i in range(1, len(text)):
        if text[i - 1] == 0x20 and text[i] in b"?!.,":
            del out[-1]
        out.append(text[i])
    text, out, i = bytes(out), bytearray(out[:1]), 1
    while i < len(text):
        if text[i] == 0x27 and text[i - 1 : i] == b" " and text[i + 1 : i + 2] == b" ":
            out[-1:] = b"'"
            # the space after it is gone for the following test too
            text = text[: i + 1] + b"\0" + text[i + 2 :]
            i += 2
            continue
        out.append(text[i])
        i += 1
    text, out = bytes(out), bytearray(out[:1])
    for i in range(1, len(text)):
        contraction = text[i + 1 : i + 2] in (b"s", b"m") or text[i + 1 : i + 3] in (b"re", b"ve")
        if text[i - 1] == 0x20 and text[i] == 0x27 and contraction:
            del out[-1]
        out.append(text[i])
    return bytes(out)
