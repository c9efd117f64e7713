"""GGUF container: every damage its own sentence, no byte read outside the file, no silent load."""

from __future__ import annotations

import os
import struct
import time

import gguf as gguf_py
import numpy as np
import pytest
from cudflash.loader import gguf_values
from cudflash.loader.ggml_types import SUPPORTED, GGMLType, known_type, row_bytes
from cudflash.loader.gguf import open_gguf
from cudflash.loader.gguf_values import StringArray
from cudflash.loader.summary import summarize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudflash.errors import CudflashError, FormatError, UnsupportedError
from tests.helpers import gguf_writer as w
from tests.helpers.vectors import vector_path

TARGETS = ["gemma3", "llama", "muse-glimmer", "qwen2", "qwen3", "qwen35"]


def small() -> w.GGUFBuilder:
    """A file with every value type and three tensors."""
    b = w.GGUFBuilder()
    b.add("general.architecture", w.STRING, "llama")
    for tag, value in (
        (w.U8, 200), (w.I8, -3), (w.U16, 60000), (w.I16, -300), (w.U32, 4000000000),
        (w.I32, -5), (w.F32, 0.5), (w.BOOL, 1), (w.U64, 1 << 63), (w.I64, -(1 << 40)),
        (w.F64, 0.1),
    ):  # fmt: skip
        b.add(f"k.{tag}", tag, value)
    b.add_array("k.strings", w.STRING, ["a", "", "né"])
    b.add_array("k.floats", w.F32, [1.5, -2.0])
    b.add_array("k.bools", w.BOOL, [1, 0, 1])
    b.add_array("k.none", w.I32, [])
    b.add_f32("a.weight", np.arange(6).reshape(2, 3))
    b.add_q8_0("b.weight", 3, 64, 7)
    b.add_f32("c.weight", np.arange(5))
    return b


def test_open_every_value_type_reads_back(tmp_path):
    """Catches a wrong width or signedness of a value type."""
    g = open_gguf(small().write(tmp_path / "a.gguf"))
    got = {k: v for k, v in g.metadata.items() if k.startswith("k.") and k[2:].isdigit()}
    assert list(got.values()) == [
        200, -3, 60000, -300, 4000000000, -5, 0.5, True, 1 << 63, -(1 << 40), 0.1
    ]  # fmt: skip
    assert got["k.7"] is True
    assert list(g.metadata["k.strings"]) == ["a", "", "né"]
    assert g.metadata["k.strings"].raw() == [b"a", b"", "né".encode()]
    assert g.metadata["k.floats"].tolist() == [1.5, -2.0]
    assert g.metadata["k.bools"].tolist() == [True, False, True]
    assert len(g.metadata["k.none"]) == 0


def test_open_tensor_views_are_read_only_rows_of_the_map(tmp_path):
    """Catches a copy at load, a wrong row split, or ggml order leaking into shapes."""
    b = small()
    g = open_gguf(b.write(tmp_path / "a.gguf"))
    info = g.tensors["b.weight"]
    assert (info.shape, info.type, info.n_bytes) == ((3, 64), GGMLType.Q8_0, 204)
    raw = g.data("b.weight")
    assert raw.shape == (3, 68) and raw.tobytes() == b.tensor("b.weight").data
    assert not raw.flags.writeable and np.shares_memory(raw, g.data("b.weight"))
    values = g.array_f32("a.weight")
    assert values.tolist() == [[0, 1, 2], [3, 4, 5]] and not values.flags.writeable
    assert g.data("c.weight").shape == (1, 20)


@pytest.mark.parametrize("type_id, dtype", [(1, "<f2"), (30, None)])
def test_array_f32_converts_half_types_exactly(tmp_path, type_id, dtype):
    """Catches bfloat16 read as float16 and the reverse."""
    values = np.array([1.0, -2.5, 0.09375, 65280.0], np.float32)
    body = values.astype(dtype).tobytes() if dtype else (values.view("<u4") >> 16).astype("<u2")
    b = w.GGUFBuilder(tensors=[w.TensorSpec("n", (4,), type_id, bytes(body))])
    got = open_gguf(b.write(tmp_path / "a.gguf")).array_f32("n")
    assert got.view(np.uint32).tolist() == values.view(np.uint32).tolist()


def test_array_f32_of_a_packed_tensor_is_refused(tmp_path):
    """Catches a quantised norm read as raw floats."""
    g = open_gguf(small().write(tmp_path / "a.gguf"))
    with pytest.raises(UnsupportedError, match=r"b\.weight has type Q8_0, expected F32"):
        g.array_f32("b.weight")


@pytest.mark.parametrize("name", TARGETS)
def test_open_agrees_with_the_gguf_package(name):
    """Catches any disagreement with an independent reader on real files."""
    path = vector_path(f"targets/{name}-kq.gguf")
    ours, theirs = open_gguf(path), gguf_py.GGUFReader(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for other in theirs.tensors:
        info = ours.tensors[other.name]
        assert info.shape == tuple(int(n) for n in reversed(other.shape))
        assert (info.type_id, info.offset) == (int(other.tensor_type), int(other.data_offset))
        assert ours.data(other.name).tobytes() == other.data.tobytes()
    for key, value in ours.metadata.items():
        other = theirs.fields[key].contents()
        plain = list(value) if isinstance(value, StringArray | np.ndarray) else value
        assert plain == other, key


def test_type_table_agrees_with_the_gguf_package():
    """Catches a wrong block or byte size in the table (only Q8_1 differs: activation only)."""
    for kind, sizes in gguf_py.GGML_QUANT_SIZES.items():
        ours = known_type(int(kind))
        if ours not in (None, GGMLType.Q8_1):
            assert (ours.name, ours.block_size, ours.type_size) == (kind.name, *sizes)
    assert all(known_type(int(kind)) is kind for kind in SUPPORTED)
    with pytest.raises(ValueError, match="300 values"):
        row_bytes(GGMLType.Q4_K, 300)


# ---- damage: one row per kind ----------------------------------------------------------------


def damaged(change) -> bytes:
    """Build the small file, changed; ``change`` may edit the builder or return bytes."""
    b = small()
    data = change(b)
    return data if isinstance(data, bytes) else b.build()


def patched(b: w.GGUFBuilder, name: str, **fields) -> None:
    for key, value in fields.items():
        setattr(b.tensor(name), key, value)


def cut(n: int):
    return lambda b: b.build()[:-n]


DAMAGE = {
    "empty file": (lambda b: b"", "the file is empty"),
    "text file": (lambda b: b"hello, world", "a file beginning with b'hell'"),
    "zip archive": (lambda b: b"PK\x03\x04" + b"0" * 40, "a zip archive"),
    "lfs pointer": (lambda b: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "web page": (lambda b: b"<!DOCTYPE html>" + b" " * 40, "a web page"),
    "safetensors": (lambda b: b'\x40' + b"\0" * 7 + b'{"a":{}}' + b" " * 99, "a safetensors file"),
    "old ggml": (lambda b: b"tjgg" + b"\0" * 40, "older than GGUF"),
    "big-endian magic": (lambda b: b"FUGG" + b"\0" * 40, "big-endian"),
    "big-endian version": (lambda b: setattr(b, "version", 3 << 24), "big-endian"),
    "version 1": (lambda b: setattr(b, "version", 1), "GGUF version 1 .*expected version 2 or 3"),
    "version 0": (lambda b: setattr(b, "version", 0), "GGUF version 0"),
    "version 4": (lambda b: setattr(b, "version", 4), "GGUF version 4.*newer cudflash"),
    "key count": (lambda b: setattr(b, "n_keys", 1 << 60), f"claims {1 << 60} metadata keys"),
    "tensor count": (lambda b: setattr(b, "n_tensors", 1 << 62), f"claims {1 << 62} tensors"),
    "too many keys": (lambda b: setattr(b, "n_keys", 21), "metadata key"),
    "key twice": (lambda b: b.add("k.4", w.U32, 1), "'k.4' appears twice"),
    "empty key": (lambda b: b.add("", w.U32, 1), "empty name"),
    "key not utf-8": (lambda b: b.add(b"k\xff", w.U32, 1), "not UTF-8 .byte 0xff at position 1"),
    "key too long": (lambda b: b.add("k" * 70000, w.U32, 1), "70000 bytes long"),
    "value type": (lambda b: b.keys.append(("k.bad", 13, b"\0" * 8)), "value type 13"),
    "bool of 2": (lambda b: b.keys.append(("k.bad", w.BOOL, b"\2")), "bool stored as 2"),
    "bool array of 9": (lambda b: b.add_array("k.bad", w.BOOL, [1, 9]), "bool stored as 9"),
    "text not utf-8": (lambda b: b.add("k.bad", w.STRING, b"\xc3("), "'k.bad' is not UTF-8"),
    "string length 2^60": (
        lambda b: b.keys.append(("k.bad", w.STRING, struct.pack("<Q", 1 << 60))),
        f"'k.bad' claims {1 << 60} bytes",
    ),
    "array length 2^60": (
        lambda b: b.add_array("k.bad", w.F32, [], count=1 << 60),
        f"'k.bad' claims an array of {1 << 60} elements",
    ),
    "string array length 2^60": (
        lambda b: b.add_array("k.bad", w.STRING, [], count=1 << 60),
        f"claims an array of {1 << 60} elements",
    ),
    "array length wraps 2^64": (
        lambda b: b.add_array("k.bad", w.F64, [], count=1 << 61),
        f"claims an array of {1 << 61} elements",
    ),
    "string in array too long": (
        lambda b: b.keys.append(
            ("k.bad", w.ARRAY, struct.pack("<IQQ", w.STRING, 2, (1 << 64) - 8))
        ),
        f"string 0 of 2 of metadata key 'k.bad' claims {(1 << 64) - 8} bytes",
    ),
    "array of arrays": (
        lambda b: b.keys.append(("k.bad", w.ARRAY, struct.pack("<IQ", w.ARRAY, 1) + b"\0" * 32)),
        "array of arrays",
    ),
    "array element type": (
        lambda b: b.keys.append(("k.bad", w.ARRAY, struct.pack("<IQ", 77, 1) + b"\0" * 32)),
        "array element type 77",
    ),
    "alignment 24": (lambda b: b.add("general.alignment", w.U32, 24), "general.alignment is 24"),
    "alignment 0": (lambda b: b.add("general.alignment", w.U32, 0), "general.alignment is 0"),
    "alignment text": (
        lambda b: b.add("general.alignment", w.STRING, "32"),
        "general.alignment is a string, expected an integer power of two",
    ),
    "split": (
        lambda b: b.add("split.no", w.U16, 1).add("split.count", w.U16, 3),
        "part 2 of a model split into 3 files",
    ),
    "split count text": (lambda b: b.add("split.count", w.STRING, "x"), "split.count is"),
    "tensor twice": (lambda b: b.add_f32("a.weight", [1.0]), "'a.weight' appears twice"),
    "tensor without name": (lambda b: b.add_f32("", [1.0]), "empty name"),
    "5 dimensions": (lambda b: patched(b, "c.weight", ne=(5, 1, 1, 1, 1)), "5 dimensions"),
    "0 dimensions": (lambda b: patched(b, "c.weight", ne=()), "0 dimensions"),
    "2^32-1 dimensions": (
        lambda b: patched(b, "c.weight", n_dims=(1 << 32) - 1),
        "4294967295 dimensions, expected 1 to 4",
    ),
    "dimension 0": (lambda b: patched(b, "c.weight", ne=(5, 0)), "a dimension of 0"),
    "elements overflow": (
        lambda b: patched(b, "c.weight", ne=(1 << 32, 1 << 32)),
        f"has {1 << 64} elements, expected fewer than 2",
    ),
    "row not whole blocks": (
        lambda b: patched(b, "b.weight", ne=(48, 4)),
        "rows of 48 values, expected a multiple of the 32-value block of Q8_0",
    ),
    "bigger than file": (
        lambda b: patched(b, "c.weight", ne=(500,)),
        "'c.weight' has offset 256 and 2000 bytes, so it ends at byte [0-9]+, but the file ends",
    ),
    "offset unaligned": (
        lambda b: patched(b, "c.weight", offset=260),
        "begins at offset 260, expected a multiple of the alignment 32",
    ),
    "offset 2^64-32": (
        lambda b: patched(b, "c.weight", offset=(1 << 64) - 32),
        f"'c.weight' has offset {(1 << 64) - 32} and 20 bytes, so it ends at byte",
    ),
    "unknown type outside": (
        lambda b: patched(b, "c.weight", type_id=99, offset=1 << 40),
        "bytes of unknown number",
    ),
    "overlap": (
        lambda b: patched(b, "c.weight", offset=224),
        "'c.weight' begins at byte [0-9]+ inside tensor 'b.weight', which ends at byte",
    ),
    "same place": (lambda b: patched(b, "c.weight", offset=0), "no overlap"),
    "last byte missing": (cut(1), "'c.weight' has offset 256 and 20 bytes"),
    "data missing": (cut(250), "'b.weight' has offset 32 and 204 bytes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_has_its_own_sentence_with_path(tmp_path, kind):
    """Catches damage that loads, crashes, or is reported without the object and the numbers."""
    change, fragment = DAMAGE[kind]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged(change))
    with pytest.raises(FormatError, match=fragment) as caught:
        open_gguf(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text


@pytest.mark.parametrize("kind", ["missing", "directory", "NUL in path"])
def test_unreadable_path_is_a_format_error(tmp_path, kind):
    """Catches an OSError or ValueError escaping to the user."""
    path = {"missing": tmp_path / "no.gguf", "directory": tmp_path, "NUL in path": "a\0b"}[kind]
    with pytest.raises(FormatError, match="cannot be opened|not a regular file"):
        open_gguf(path)


def test_fifo_is_refused_at_once(tmp_path):
    """Catches a program that waits for ever for somebody to write into a FIFO."""
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        open_gguf(tmp_path / "a.gguf")


def test_empty_name_says_so():
    """Catches a sentence that begins with a colon."""
    with pytest.raises(FormatError, match="^the name of the file is empty"):
        open_gguf("")


def test_truncation_at_every_byte_is_a_format_error(tmp_path):
    """Catches any read past the end, any other exception, and any partial load."""
    whole = small().build()
    path = tmp_path / "cut.gguf"
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError) as caught:
            open_gguf(path)
        assert str(path) in str(caught.value), n
    path.write_bytes(whole)
    assert len(open_gguf(path).tensors) == 3


def test_truncation_of_a_real_file_at_every_97th_byte_is_a_format_error(tmp_path):
    """Catches what the small file's layout hides (report A41: every count modulo 97)."""
    whole = vector_path("targets/qwen2-kq.gguf").read_bytes()
    directory_end = 12000  # beyond it every cut falls into tensor data
    path = tmp_path / "cut.gguf"
    for n in [*range(0, directory_end, 97), *range(directory_end, len(whole), 9700)]:
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError, match="cut.gguf"):
            open_gguf(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_damage_is_refused_or_readable(tmp_path, data):
    """Catches an escape on arbitrary damage: nothing but CudflashError, and views that work."""
    blob = bytearray(w.tiny_model("llama", 1).build())
    limit = 1800  # the directory of this file; damage to data is not detectable
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, limit))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.integers(0, 256**width - 1))
        blob[at : at + width] = value.to_bytes(width, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(blob)
    try:
        g = open_gguf(path)
        summary = summarize(g)
        assert summary["file_bytes"] == len(blob)
    except CudflashError as err:
        assert str(path) in str(err)
        return
    for name, info in g.tensors.items():
        if info.type is not None:
            assert g.data(name).nbytes == info.n_bytes


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    strings=st.lists(st.text(max_size=20), max_size=30),
    numbers=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=30),
    alignment=st.sampled_from([1, 8, 32, 64, 4096]),
    version=st.sampled_from([2, 3]),
)
def test_round_trip_of_values_and_alignment(tmp_path, strings, numbers, alignment, version):
    """Catches a parse that depends on alignment, version or the place of an array."""
    b = w.GGUFBuilder(version=version, alignment=alignment)
    b.add("general.alignment", w.U32, alignment)
    b.add_array("s", w.STRING, strings).add_array("n", w.I32, numbers)
    b.add_f32("x", np.arange(3)).add_q8_0("y", 2, 32, 3).add_f32("z", np.arange(7))
    g = open_gguf(b.write(tmp_path / "a.gguf"))
    assert list(g.metadata["s"]) == strings and g.metadata["n"].tolist() == numbers
    assert g.alignment == alignment and g.version == version
    assert g.array_f32("z").tolist() == list(range(7))
    assert g.data("y").tobytes() == b.tensor("y").data


def test_unknown_type_survives_opening_and_is_shown_by_number(tmp_path):
    """Catches a reader whose type table has to know every file in the wild (report A50)."""
    b = small()
    patched(b, "c.weight", type_id=99)
    g = open_gguf(b.write(tmp_path / "a.gguf"))
    assert (g.tensors["c.weight"].type, g.tensors["c.weight"].n_bytes) == (None, None)
    shown = {row["type"]: row["bytes"] for row in summarize(g)["tensor_types"]}
    assert shown == {"Q8_0": 204, "F32": 24, "type 99": None}
    with pytest.raises(UnsupportedError, match="c.weight has type 99"):
        g.data("c.weight")


def test_typed_access_refuses_other_types(tmp_path):
    """Catches an integer taken for a float, a bool for an integer, or an absent key for zero."""
    g = open_gguf(small().write(tmp_path / "a.gguf"))
    assert g.require("k.4", int) == 4000000000 and g.get("absent", 5) == 5
    for key, kind, text in (
        ("k.4", float, "k.4 is an integer, expected a floating-point number"),
        ("k.7", int, "k.7 is a bool, expected an integer"),
        ("k.strings", str, "k.strings is an array of strings, expected a string"),
        ("absent", int, "metadata key absent is missing, expected an integer"),
    ):
        with pytest.raises(FormatError, match=text):
            g.require(key, kind)
    with pytest.raises(FormatError, match="tensor nope is missing among 3 tensors"):
        g.data("nope")


def test_bad_utf8_inside_a_string_array_names_the_entry(tmp_path):
    """Catches a vocabulary entry that is not text: reported when read, never replaced."""
    b = small()
    b.keys.append(("k.bad", w.ARRAY, struct.pack("<IQ", w.STRING, 2) + w.string("ok")
                   + w.string(b"\xff")))  # fmt: skip
    tokens = open_gguf(b.write(tmp_path / "a.gguf")).metadata["k.bad"]
    assert tokens.raw() == [b"ok", b"\xff"]
    with pytest.raises(FormatError, match="entry 1 of k.bad is not UTF-8"):
        tokens[0]


def test_large_vocabulary_opens_without_decoding_a_string(tmp_path, monkeypatch):
    """Catches a reader that makes a string (or a list) per token when only the number is needed."""
    n = 250_000
    b = w.tiny_model("llama", 1)
    b.drop("tokenizer.ggml.tokens")
    words = b"".join(w.string(f"token {i}") for i in range(n))
    b.keys.append(("tokenizer.ggml.tokens", w.ARRAY, struct.pack("<IQ", w.STRING, n) + words))
    b.keys.append(("tokenizer.ggml.merges", w.ARRAY, struct.pack("<IQ", w.STRING, n) + words))
    b.keys.append(("tokenizer.ggml.scores", w.ARRAY, struct.pack("<IQ", w.F32, n) + b"\0" * 4 * n))
    path = b.write(tmp_path / "big.gguf")
    calls = []
    whole = gguf_values.decode_text
    monkeypatch.setattr(gguf_values, "decode_text", lambda *a: calls.append(a) or whole(*a))
    began = time.process_time()
    g = open_gguf(path)
    summary = summarize(g)
    seconds = time.process_time() - began
    tokens = g.metadata["tokenizer.ggml.tokens"]
    assert summary["tokenizer"]["vocab_size"] == len(tokens) == n
    assert not tokens.is_decoded and len(calls) < 200
    assert seconds < 1.0, f"{seconds:.3f} s for 750,000 entries; about 0.1 s expected"
    assert (tokens[0], tokens[n - 1], tokens.is_decoded) == ("token 0", f"token {n - 1}", True)


STRINGS = {
    "ordinary": [f"token {i}" for i in range(3000)],
    "more than a window": [f"{i:0200d}" for i in range(12_000)],
    "around one byte of length": ["x" * (i % 3 + 254) for i in range(2000)] + ["y" * 70_000, "z"],
    "long ones between": [("x" * 300 if i % 500 == 7 else f"t{i}") for i in range(4000)],
    "empty ones": [("" if i % 3 else f"t{i}") for i in range(3000)] + [""] * 20,
    "zeros in the text": ["a\0\0\0\0\0\0\0b" if i % 700 == 9 else f"t{i}" for i in range(3000)],
    "nothing but zeros": ["\0" * (i % 20) for i in range(1500)],
    "none": [],
}  # fmt: skip


@pytest.mark.parametrize("kind", STRINGS)
def test_strings_of_every_shape_are_found(tmp_path, kind):
    """Catches a text taken for a length, where many strings are looked for at once."""
    b = w.tiny_model("llama", 1)
    b.add_array("k.strings", w.STRING, STRINGS[kind]).add("k.after", w.U32, 77)
    g = open_gguf(b.write(tmp_path / "m.gguf"))
    assert list(g.metadata["k.strings"]) == STRINGS[kind] and g.metadata["k.after"] == 77


@pytest.mark.parametrize("at", [0, 1, 2999, 5999])
@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 1 << 26])
def test_a_wrong_length_in_a_long_array_names_the_string(tmp_path, at, length):
    """Catches a jump outside the file from the middle of strings that are looked for at once."""
    entries = [w.string(f"token {i}") for i in range(6000)]
    entries[at] = struct.pack("<Q", length) + b"token"
    b = w.tiny_model("llama", 1)
    b.keys.append(("k.bad", w.ARRAY, struct.pack("<IQ", w.STRING, 6000) + b"".join(entries)))
    with pytest.raises(FormatError, match=f"string {at} of 6000 of metadata key 'k.bad' claims"):
        open_gguf(b.write(tmp_path / "m.gguf"))
