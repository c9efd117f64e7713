"""Binding of draft tensors: strict, packed, the same from every artifact; and pairing checks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cudflash.loader.config import read_target_config
from cudflash.loader.draft_bind import bind_draft, is_draft_directory, open_draft
from cudflash.loader.ggml_types import GGMLType
from cudflash.loader.gguf import open_gguf
from cudflash.loader.summary import summarize

from cudflash.errors import FormatError, PairingError, UnsupportedError
from tests.helpers import draft_writer as d
from tests.helpers import gguf_writer as w
from tests.helpers.draft_vectors import DRAFTS, QUANTISED, draft_case, quantised_draft
from tests.helpers.vectors import vector_path
from tests.reference.draft import DraftReference
from tests.reference.gguf_tensors import GGUFTensors


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes a GGUF builder and opens it as a draft."""
    return lambda b, **options: open_draft(b.write(tmp_path / "draft.gguf"), **options)


def values_of(ref):
    """Float values of an F32, F16 or BF16 projection."""
    raw = ref.raw.reshape(-1)
    if ref.type is GGMLType.BF16:
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view("<f4" if ref.type is GGMLType.F32 else "<f2").astype(np.float32)
    return values.reshape(ref.shape)


# ---- recorded drafts --------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTS)
def test_directory_tensors_land_in_their_fields(name):
    """Catches two tensors of one shape exchanged (q and o, gate and up, the codebooks)."""
    case = draft_case(name)
    weights = open_draft(case.directory).weights
    table = np.zeros((1, 256))
    expected = DraftReference(case.directory, table, table, dtype=np.float32).weights
    seen = 0
    for field, stored in (("fc", "fc.weight"), ("hidden_norm", "enc.output_norm.weight"),
                          ("output_norm", "output_norm.weight"),
                          ("selector_predecessor", "selector_predecessor.weight"),
                          ("selector_successor", "selector_successor.weight"),
                          ("selector_hidden", "selector_hidden.weight")):  # fmt: skip
        seen += check_field(getattr(weights, field), expected.get(stored))
    for index, layer in enumerate(weights.layers):
        for field, value in vars(layer).items():
            stored = f"blk.{index}.{field}" + ("" if field.endswith("_base") else ".weight")
            seen += check_field(value, expected.get(stored))
    assert seen == len(expected) == (81 if name.startswith("v2") else 58)
    assert weights.token_embd is None and weights.output is None


def check_field(found, expected):
    if expected is None:
        assert found is None
        return 0
    values = found if isinstance(found, np.ndarray) else values_of(found)
    np.testing.assert_array_equal(values, expected)
    assert isinstance(found, np.ndarray) or found.type is GGMLType.BF16
    return 1


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_tensors_stay_packed(name):
    """Catches projections expanded at load, or bytes of another tensor (report A32)."""
    path = quantised_draft(name)
    weights = open_draft(path).weights
    file = GGUFTensors(path)
    refs = [value for layer in weights.layers for value in vars(layer).values()]
    refs += list(vars(weights).values())
    n_bytes = {}
    for ref in refs:
        if not isinstance(ref, np.ndarray | tuple | None):
            assert ref.type.name == file.type_name(ref.name) and ref.shape == file.shape(ref.name)
            assert not ref.raw.flags.writeable and ref.raw.base is not None
            stored = file._tensors[ref.name].data
            assert ref.raw.tobytes() == stored.tobytes()
            n_bytes[ref.type.name] = n_bytes.get(ref.type.name, 0) + ref.raw.nbytes
    assert set(n_bytes) == {"Q4_K", "Q5_K", "Q6_K", "Q8_0"}


def test_directory_projections_are_views_of_the_map():
    """Catches a draft directory copied into memory at load (report A57)."""
    ref = open_draft(draft_case("v1-muse-swa").directory).weights.fc
    assert ref.shape == (256, 1280) and ref.raw.shape == (256, 2560)
    assert not ref.raw.flags.writeable and ref.raw.base is not None


# ---- tiny drafts ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("arch", ["dflash", "dflash-draft"])
def test_every_tensor_is_needed_with_its_exact_shape(tmp_path, opened, kind, arch):
    """Catches an unchecked tensor: each one, removed or a row longer, is refused by name."""
    for name in [t.name for t in d.tiny_draft(kind, arch).tensors]:
        with pytest.raises(FormatError, match="are missing"):
            opened(d.tiny_draft(kind, arch).drop_tensor(name))
        b = d.tiny_draft(kind, arch)
        spec = b.tensor(name)
        if len(spec.ne) == 1:
            spec.ne, spec.data = (spec.ne[0] + 1,), spec.data + bytes(4)
        else:
            row = len(spec.data) // np.prod(spec.ne[1:], dtype=int)
            extra = np.prod(spec.ne[1:-1], dtype=int) if len(spec.ne) > 2 else 1
            spec.ne = (*spec.ne[:-1], spec.ne[-1] + 1)
            spec.data += bytes(int(row * extra))
        with pytest.raises(FormatError, match=f"{name} has shape .*expected"):
            opened(b)


def test_missing_tensors_are_listed_together(opened):
    """Catches report A46: a converter's draft with no tensors, or with half of them."""
    b = d.tiny_draft()
    b.tensors = []
    with pytest.raises(FormatError, match=r"holds no tensors at all but 25 of the 25 .*17 more"):
        opened(b)
    b = d.tiny_draft("dflash2")
    b.drop_tensor("blk.1.ffn_conv_base").drop_tensor("selector_hidden.weight")
    with pytest.raises(
        FormatError, match=r"2 of the 36 .*\(selector_hidden.weight, blk.1.ffn_conv_base\)"
    ):
        opened(b)


EXTRA = [
    ("blk.0.attn_sinks.weight", "attention sink logits"),
    ("markov_w1.weight", "a DSpark head"),
    ("conf_proj.weight", "a DSpark head"),
    ("dflash.domino.head.weight", "a Domino head"),
    ("dflash.dspark.w1.weight", "a DSpark head"),
    ("d2t", "a reduced draft vocabulary"),
    ("rope_freqs.weight", "RoPE frequency factors"),
    ("blk.1.attn_q.bias", "biases"),
    ("blk.1.post_ffw_norm.weight", "sandwich norms"),
    ("blk.1.post_attention_norm.weight", "sandwich norms"),
    ("blk.1.layer_gate.weight", "does not: blk.1.layer_gate.weight"),
    ("fc.scale", "does not: fc.scale"),
]


@pytest.mark.parametrize("name, fragment", EXTRA)
def test_extra_tensor_is_refused_by_name(opened, name, fragment):
    """Catches reports A30, A31: a head, a gate or a map of the draft silently ignored."""
    with pytest.raises(UnsupportedError, match=fragment) as caught:
        opened(d.tiny_draft().add_f32(name, [1.0]))
    assert name in str(caught.value)


def test_layers_beyond_the_stated_count_are_refused(opened):
    """Catches a damaged block_count that would run a shorter draft."""
    b = d.tiny_draft().set("dflash.block_count", w.U32, 1)
    b.set("dflash.attention.sliding_window_pattern", w.BOOL, [1])
    with pytest.raises(FormatError, match=r"blk.1.* belongs to layer 1, expected layers below 1"):
        opened(b)


def test_unsupported_types_are_listed(opened):
    """Catches a draft type that reaches the kernels."""
    b = d.tiny_draft()
    b.tensor("blk.0.ffn_up.weight").type_id = 99
    with pytest.raises(UnsupportedError, match=r"blk.0.ffn_up.weight type 99.*Q4_K"):
        opened(b)
    b.tensor("blk.0.ffn_up.weight").type_id = w.TYPE_Q8_0
    b.tensor("blk.0.attn_q_norm.weight").type_id = int(GGMLType.I32)
    with pytest.raises(UnsupportedError, match=r"1 norms or kernels .*attn_q_norm.weight I32"):
        opened(b)


def test_non_finite_norm_is_refused(opened):
    """Catches damage that would make every draft logit NaN."""
    b = d.tiny_draft("dflash2")
    values = np.ones((2, 2, 64), "<f4")
    values[1, 0, 3] = np.inf
    b.tensor("blk.1.ffn_conv_base").data = values.tobytes()
    with pytest.raises(FormatError, match="blk.1.ffn_conv_base holds inf at index 131"):
        opened(b)


def test_own_embedding_and_head_are_bound(opened, tmp_path):
    """Catches report A31: the draft's own tables replaced by the target's."""
    plain = opened(d.tiny_draft())
    assert not plain.config.own_embedding and not plain.config.own_head
    b = d.tiny_draft().add_q8_0("output.weight", w.VOCAB, w.HIDDEN, 50)
    head = opened(b)
    assert head.config.own_head and not head.config.own_embedding
    assert head.weights.output.raw.tobytes() == b.tensor("output.weight").data
    b = d.tiny_draft().add_q8_0("token_embd.weight", w.VOCAB, w.HIDDEN, 51)
    tied = opened(b)  # llama.cpp: its own table is its head, too
    assert tied.config.own_embedding and tied.config.own_head
    assert tied.weights.output is tied.weights.token_embd
    tensors = d.hf_tensors() | {"model.embed_tokens.weight": np.ones((7, 64), np.float16)}
    hf = open_draft(d.write_hf(tmp_path / "a", d.hf_config(), tensors))
    assert hf.config.own_embedding and not hf.config.own_head and hf.weights.output is None
    config = d.hf_config() | {"tie_word_embeddings": True}
    assert open_draft(d.write_hf(tmp_path / "a", config, tensors)).weights.output is not None


def test_reduced_head_is_refused(opened):
    """Catches a 5-row head read as if its rows were the target's tokens."""
    b = d.tiny_draft().add_q8_0("output.weight", 5, w.HIDDEN, 50)
    with pytest.raises(FormatError, match=r"output.weight has shape \(5, 64\).*reduced draft voc"):
        opened(b)


def test_shards_are_read_as_one_directory(tmp_path):
    """Catches a sharded draft read from its first file only, and tensors stored twice."""
    path = d.write_hf(tmp_path / "a", d.hf_config("dflash2"), d.hf_tensors("dflash2"), shards=3)
    draft = open_draft(path)
    assert len(draft.files) == 4 and draft.config.kind == "dflash2"
    d.write_hf(tmp_path / "a", d.hf_config("dflash2"), d.hf_tensors("dflash2"))
    with pytest.raises(FormatError, match="expected it once"):
        open_draft(path)


def test_directory_types_and_names_are_checked(tmp_path):
    """Catches an int8 draft, or one with unknown modules, bound as if it were plain."""
    tensors = d.hf_tensors()
    tensors["layers.0.mlp.up_proj.weight"] = np.ones((w.FFN, w.HIDDEN), np.int8)
    with pytest.raises(UnsupportedError, match="layers.0.mlp.up_proj.weight I8"):
        open_draft(d.write_hf(tmp_path / "a", d.hf_config(), tensors))
    tensors = d.hf_tensors() | {"layers.1.self_attn.q_proj.bias": np.ones(128, np.float32)}
    with pytest.raises(UnsupportedError, match=r"biases.: layers.1.self_attn.q_proj.bias"):
        open_draft(d.write_hf(tmp_path / "b", d.hf_config(), tensors))
    tensors = d.hf_tensors()
    del tensors["layers.1.self_attn.o_proj.weight"]
    with pytest.raises(FormatError, match=r"1 of the 25 .*\(layers.1.self_attn.o_proj.weight\)"):
        open_draft(d.write_hf(tmp_path / "c", d.hf_config(), tensors))


def test_draft_directory_is_recognised(tmp_path):
    """Catches a draft directory given as the main model being called 'not a file'."""
    assert is_draft_directory(draft_case("v1-muse-swa").directory)
    assert is_draft_directory(d.write_hf(tmp_path / "a", d.hf_config(), d.hf_tensors()))
    assert not is_draft_directory(tmp_path) and not is_draft_directory(tmp_path / "absent")


# ---- against the target -----------------------------------------------------------------------


def target(**changes):
    """A stand-in with what the pairing reads."""
    fields = {"arch": "llama", "name": "tiny", "hidden_dim": 64, "vocab_size": 7, "n_layers": 3}
    return SimpleNamespace(**fields | changes)


def test_recorded_pairs_fit_their_targets():
    """Catches a check that refuses a sound pair."""
    for name in ("v1-muse-swa", "v1-qwen3-full", "v2-muse-full"):
        case = draft_case(name)
        config = read_target_config(open_gguf(vector_path(f"targets/{case.target}-f32.gguf")))
        draft = open_draft(case.directory)
        bound = bind_draft(draft, config)
        assert bound.config.vocab_size == config.vocab_size and bound.warnings == draft.warnings


MISFITS = [
    ({"hidden_dim": 128}, "hidden size is 64, the target's 128"),
    ({"vocab_size": 8}, "vocabulary has 7 tokens, the target's 8"),
    ({"n_layers": 4}, "for a target of 3 layers, the target has 4"),
    ({"n_layers": 2}, r"reads layers \[2, 0\] .0-based., the target has layers 0 to 1"),
    ({"vocab_size": 6}, "mask token is 6, the target has tokens 0 to 5"),
]


@pytest.mark.parametrize("changes, fragment", MISFITS)
def test_misfit_names_both_numbers(tmp_path, changes, fragment):
    """Catches report A29: a wrong pair failing with a shape error at the first decode step."""
    draft = open_draft(d.write_hf(tmp_path / "a", d.hf_config(), d.hf_tensors()))
    with pytest.raises(PairingError, match=fragment) as caught:
        bind_draft(draft, target(**changes))
    assert "\n" not in str(caught.value) and "llama 'tiny'" in str(caught.value)


def test_all_misfits_are_in_one_sentence(opened):
    """Catches one reason per run."""
    with pytest.raises(PairingError) as caught:
        bind_draft(opened(d.tiny_draft()), target(hidden_dim=32, vocab_size=5, n_layers=1))
    assert str(caught.value).count("; ") >= 4


def test_unstated_vocabulary_becomes_the_targets(opened):
    """Catches a mask token outside the target when the draft states no vocabulary."""
    draft = opened(d.tiny_draft(arch="dflash-draft").drop("tokenizer.ggml.tokens"))
    assert draft.config.vocab_size is None
    assert bind_draft(draft, target()).config.vocab_size == 7
    with pytest.raises(PairingError, match="mask token is 6, the target has tokens 0 to 4"):
        bind_draft(draft, target(vocab_size=5))


def test_tap_of_the_last_layer_is_said_aloud_for_directories(tmp_path, opened):
    """Catches the one tap that means another thing in transformers (after the final norm)."""
    draft = open_draft(d.write_hf(tmp_path / "a", d.hf_config(), d.hf_tensors()))
    assert "before the final norm" in bind_draft(draft, target()).warnings[-1]
    assert bind_draft(opened(d.tiny_draft()), target()).warnings == ()


def test_summary_of_a_draft_shows_its_configuration(tmp_path):
    """Catches report A17: inspect must print layer masks, taps and window of a draft."""
    summary = summarize(open_gguf(d.tiny_draft("dflash2").write(tmp_path / "draft.gguf")))
    config = summary["draft"]["config"]
    assert (config["window_pattern"], config["window"]) == ("SF", d.WINDOW)
    assert config["taps"] == list(d.TAPS) and config["kind"] == "dflash2"
    assert summary["role"] == "draft" and summary["draft"]["problem"] is None
    b = d.tiny_draft().drop("dflash.target_layers")
    broken = summarize(open_gguf(b.write(tmp_path / "draft.gguf")))["draft"]
    assert "target_layers is missing" in broken["problem"] and broken["config"] is None
    assert summarize(open_gguf(w.tiny_model("llama").write(tmp_path / "x.gguf")))["draft"] is None
