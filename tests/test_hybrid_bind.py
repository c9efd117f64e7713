"""qwen35 files: what is read from them, and what is refused, each with its sentence."""

import numpy as np
import pytest
from cudflash.loader.bind import bind_target
from cudflash.loader.config import DeltaConfig
from cudflash.loader.gguf import open_gguf
from cudflash.loader.summary import summarize

from cudflash.errors import FormatError, UnsupportedError
from cudflash.model.rope import pair_frequencies, rotated_by_text
from tests.helpers import gguf_writer as w


@pytest.fixture
def opened(tmp_path):
    return lambda builder: open_gguf(builder.write(tmp_path / "model.gguf"))


def test_everything_is_read_from_metadata(opened):
    """Catches a number that the code assumes: interval, heads, taps, rotated dimensions."""
    config = bind_target(opened(w.tiny_hybrid(n_layers=6, interval=3))).config
    assert [layer.delta is None for layer in config.layers] == [False, False, True] * 2
    assert config.layers[0].delta == DeltaConfig(2, 4, 16, 16, 4)
    assert config.layers[0].delta.conv_width == 2 * 32 + 64
    rope = config.layers[2].rope
    assert (rope.style, rope.n_dims, rope.freq_base) == ("split_half", 8, 1e7)
    assert rope.sections == (2, 1, 1, 0) and config.layers[0].rope is None
    assert config.recurrent and config.fused_q_gate and config.mtp.rope == rope
    assert config.n_layers == 6 and config.defaults_taken == ()


def test_layers_may_be_listed_instead_of_counted(opened):
    """Catches a list of recurrent layers that is ignored, or read with the opposite meaning."""
    b = w.tiny_hybrid(n_layers=4, interval=2, mtp=False).drop("qwen35.full_attention_interval")
    b.add_array("qwen35.attention.recurrent_layers", w.BOOL, [True, False, True, False])
    config = bind_target(opened(b)).config
    assert [layer.delta is not None for layer in config.layers] == [True, False, True, False]
    b.set("qwen35.attention.recurrent_layers", w.BOOL, [True, False])
    with pytest.raises(FormatError, match="recurrent_layers is 2 values, expected 4 bools"):
        bind_target(opened(b))


@pytest.mark.parametrize("suffix", [
    "full_attention_interval", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
    "ssm.time_step_rank", "ssm.inner_size", "rope.dimension_sections", "rope.dimension_count",
    "rope.freq_base",
])  # fmt: skip
def test_a_key_that_changes_numbers_is_required(opened, suffix):
    """Catches a silent default."""
    with pytest.raises(FormatError, match=suffix):
        bind_target(opened(w.tiny_hybrid().drop(f"qwen35.{suffix}")))


@pytest.mark.parametrize("suffix, value, words", [
    ("ssm.time_step_rank", 3, "a multiple of the 2 key heads"),
    ("ssm.inner_size", 128, "expected 64, 4 value heads as wide as the key heads"),
    ("ssm.conv_kernel", 99, "expected 2 to 16"),
    ("ssm.state_size", 24, "expected a multiple of 16"),
    ("nextn_predict_layers", 2, "expected 0 or 1 block"),
    ("rope.dimension_count", 7, "an even number up to the head size 32"),
])  # fmt: skip
def test_senseless_shapes_are_refused(opened, suffix, value, words):
    """Catches shapes that would be run as something else."""
    with pytest.raises((FormatError, UnsupportedError), match=words):
        bind_target(opened(w.tiny_hybrid().set(f"qwen35.{suffix}", w.U32, value)))


@pytest.mark.parametrize("sections", [[2, 1], [0, 0, 0, 4], [-1, 1, 1, 0]])
def test_senseless_sections_are_refused(opened, sections):
    """Catches sections that leave no pair to rotate, or are no four numbers."""
    b = w.tiny_hybrid().set("qwen35.rope.dimension_sections", w.I32, sections)
    with pytest.raises(FormatError, match="rope.dimension_sections is"):
        bind_target(opened(b))


def test_pairs_of_the_fourth_section_do_not_turn(opened):
    """Catches sections that are read but not applied: [3, 3, 2, 0] covers 8 pairs, fewer do not."""
    assert rotated_by_text((3, 3, 2, 0), 8).all() and rotated_by_text((11, 11, 10, 0), 32).all()
    np.testing.assert_array_equal(rotated_by_text((1, 1, 1, 1), 4), [True, True, True, False])
    np.testing.assert_array_equal(
        rotated_by_text((4, 0, 0, 0), 4), [True, False, False, True]
    )
    b = w.tiny_hybrid().set("qwen35.rope.dimension_sections", w.I32, [1, 1, 1, 1])
    frequencies, _ = pair_frequencies(bind_target(opened(b)).config.layers[1].rope)
    assert frequencies[3] == 0 and (frequencies[:3] > 0).all()


@pytest.mark.parametrize("name", [
    "blk.0.ssm_conv1d.weight", "blk.0.ssm_dt.bias", "blk.0.ssm_a", "blk.0.ssm_norm.weight",
    "blk.0.attn_qkv.weight", "blk.1.attn_q_norm.weight", "blk.2.post_attention_norm.weight",
    "blk.4.nextn.eh_proj.weight", "blk.4.nextn.hnorm.weight", "blk.4.attn_q.weight",
])  # fmt: skip
def test_a_missing_tensor_is_named(opened, name):
    """Catches a layer that is run without one of its parts."""
    with pytest.raises(FormatError, match=name):
        bind_target(opened(w.tiny_hybrid().drop_tensor(name)))


@pytest.mark.parametrize("name", ["blk.1.ssm_conv1d.weight", "blk.0.attn_q.weight"])
def test_a_layer_of_the_other_kind_is_not_overlooked(opened, name):
    """Catches a file whose pattern of layers is not the one its keys state."""
    b = w.tiny_hybrid().set("qwen35.full_attention_interval", w.U32, 3)
    with pytest.raises(FormatError, match="are missing"):
        bind_target(opened(b))
    b = w.tiny_hybrid().add_f32("blk.1.ssm_conv1d.weight", np.ones((128, 4)))
    with pytest.raises(UnsupportedError, match="blk.1.ssm_conv1d.weight"):
        bind_target(opened(b))


def test_mtp_block_is_bound_and_optional(opened):
    """Catches a file without the block that is refused, or one with it that loses its parts."""
    mtp = bind_target(opened(w.tiny_hybrid())).weights.mtp
    assert mtp.eh_proj.shape == (w.HIDDEN, 2 * w.HIDDEN)
    assert mtp.token_embd is None and mtp.head is None
    assert mtp.layer.attn_q.shape == (2 * w.HEADS * w.HEAD_DIM, w.HIDDEN)
    without = bind_target(opened(w.tiny_hybrid(mtp=False)))
    assert without.weights.mtp is None and without.config.mtp is None
    b = w.tiny_hybrid().drop_tensor("blk.4.nextn.shared_head_norm.weight")
    b.add_q8_0("blk.4.nextn.shared_head_head.weight", w.VOCAB, w.HIDDEN, 9)
    mtp = bind_target(opened(b)).weights.mtp
    assert mtp.head is not None and mtp.head_norm.shape == (w.HIDDEN,)


def test_a_tied_head_is_the_embedding(opened):
    """Catches a tied head that is required as a tensor, or tied without being told."""
    target = bind_target(opened(w.tiny_hybrid().drop_tensor("output.weight")))
    assert target.weights.output is target.weights.token_embd
    assert any("tied" in line for line in target.config.defaults_taken)


def test_inspect_tells_the_two_kinds_of_layers(opened):
    """Catches a summary that shows a delta net as an attention layer with no heads."""
    model = summarize(opened(w.tiny_hybrid()))["model"]
    assert model["window_pattern"] == "DFDF"
    assert model["n_heads"] == 4 and model["n_kv_heads"] == 2
    assert model["delta_net"] == {
        "n_k_heads": 2, "n_v_heads": 4, "k_dim": 16, "v_dim": 16, "conv_taps": 4,
    }  # fmt: skip
    assert model["mtp"] is True and model["rope"]["sections"] == [2, 1, 1, 0]
