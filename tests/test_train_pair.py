"""Functions of `scripts/train_pair/` that need no torch: what goes into a training, what comes out."""

import random

import numpy as np
import pytest

import cudflash
from scripts.train_pair import (
    corpus,
    depth,
    export,
    hybrid_export,
    measure,
    prompts,
    shapes,
    tokenizer,
)

WORDS = [f"w{i}" for i in range(50)]


def test_held_out_files_depend_on_the_seed_alone():
    """Held-out files that move into the training set when another machine lists them otherwise."""
    names = [f"f{i}" for i in range(60)]
    sizes = [1000 * i for i in range(60)]
    kept = corpus.split(names, sizes, 10, 3)
    assert kept == corpus.split(names, sizes, 10, 3) != corpus.split(names, sizes, 10, 4)
    least, most = corpus.HELD_OUT_BYTES
    assert len(kept) == 10 and all(least <= 1000 * int(n[1:]) <= most for n in kept)


def test_cleaned_text_has_no_trailing_blanks_and_one_line_end():
    """Line ends of another system, or invisible blanks, that a model would have to guess."""
    assert corpus.clean("a  \r\n\tb\n\n\n") == "a\n        b\n"


def test_files_of_tests_and_generated_tables_are_left_out(tmp_path):
    """Test suites and tables of character sets in the training text."""
    for name in ("json/decoder.py", "test/test_json.py", "encodings/cp037.py", "small.py"):
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * (10 if name == "small.py" else 5000))
    (tmp_path / "docs").mkdir()
    found = corpus.find_files(tmp_path / "docs", tmp_path / "code")
    assert [p.name for p in found["code"]] == ["decoder.py"] and found["docs"] == []


@pytest.mark.parametrize("seed", range(12))
def test_record_lines_have_one_length_and_repeat_the_line_above(seed):
    """A line that is a token longer: the copied field is no longer at a fixed distance."""
    distance = shapes.RECORD_DISTANCE
    lines = corpus.record_lines(random.Random(seed), WORDS, 12, distance)
    rows = [line.split() for line in lines]  # each word and each bar is one token
    assert {len(row) + 1 for row in rows} == {distance}  # and the line end
    pairs = [(a, b) for above, row in zip(rows, rows[1:]) for a, b in zip(above, row)]
    assert 0.5 < np.mean([a == b for a, b in pairs]) < 1.0


def test_record_distance_lies_between_half_the_window_and_the_window():
    """Structure that a halved window still sees: the window fault would not show."""
    for shape in (shapes.DFLASH, shapes.DFLASH2):
        assert shape.window // 2 < shapes.RECORD_DISTANCE < shape.window


def test_a_deepened_stack_keeps_its_layers_in_order_and_of_their_kind():
    """Layers that change kind or place when others are put in: the stack would compute another
    thing than it had learnt."""
    sources = shapes.grown_from(8, 32, 4)
    assert [source for source, silent in sources if not silent] == list(range(8))
    assert all(source % 4 == layer % 4 for layer, (source, _) in enumerate(sources))
    assert sorted({source for source, _ in sources}) == list(range(8)) and len(sources) == 32
    assert shapes.grown_from(8, 8, 4) == [(layer, False) for layer in range(8)]


def test_some_groups_of_a_stack_are_repeated_not_the_last():
    """New layers behind the last tap, which no draft would see; or beside a tap, where a tap one
    layer off would read what the right one reads."""
    sources = shapes.grown_from(32, 40, 4)
    assert [source for source, silent in sources if not silent] == list(range(32))
    assert all(source % 4 == layer % 4 for layer, (source, _) in enumerate(sources))
    new = {layer for layer, (_, silent) in enumerate(sources) if silent}
    assert len(sources) == shapes.TARGET.n_layers and new == {8, 9, 10, 11, 28, 29, 30, 31}
    for tap in shapes.DFLASH.taps:
        assert not new & {tap - 1, tap, tap + 1}


def test_layers_of_each_deepening_are_told_apart():
    """Layers counted as put in last that were there from the beginning: the card would say that
    these are worth nothing."""
    first, last = depth.added([8, 32, 40], 4)
    assert len(first) == 24 and last == {8, 9, 10, 11, 28, 29, 30, 31} and not first & last
    assert set(range(40)) - first - last == {0, 1, 2, 3, 20, 21, 22, 23}
    weights = {f"layers.{i}.{name}": np.ones(2) for i in range(3)
               for name in (*depth.NORMS, "attn_norm")}  # fmt: skip
    found = depth.without(weights, {1})
    assert {k for k, v in found.items() if not v.any()} == {f"layers.1.{n}" for n in depth.NORMS}


def test_taps_of_the_drafts_are_layers_before_the_last():
    """A tap behind the last layer, which llama.cpp cannot read."""
    for shape in (shapes.DFLASH, shapes.DFLASH2):
        assert len(shape.taps) == 5 and sorted(set(shape.taps)) == list(shape.taps)
        assert shape.taps[-1] < shapes.TARGET.n_layers - 1


def test_interleaved_rows_rotate_as_the_split_halves_did():
    """Rows in the wrong order: the file's rotation would mix other pairs than were trained."""
    heads, dim = 3, 8
    rng = np.random.default_rng(0)
    x, angle = rng.standard_normal((heads, dim)), rng.standard_normal(dim // 2)
    low, high = x[:, : dim // 2], x[:, dim // 2 :]
    split = np.concatenate([low * np.cos(angle) - high * np.sin(angle),
                            low * np.sin(angle) + high * np.cos(angle)], 1)  # fmt: skip
    y = export.interleave(x.reshape(-1, 1), heads, dim).reshape(heads, dim // 2, 2)
    even, odd = y[..., 0], y[..., 1]
    turned = np.stack([even * np.cos(angle) - odd * np.sin(angle),
                       even * np.sin(angle) + odd * np.cos(angle)], -1)  # fmt: skip
    expected = export.interleave(split.reshape(-1, 1), heads, dim).reshape(turned.shape)
    np.testing.assert_array_equal(turned, expected)


def test_first_rule_that_matches_gives_the_type():
    """A rule for all names that hides a more particular one."""
    mix = (("attn_v", "Q6_K"), ("", "Q4_K"))
    assert export.matrix_type("blk.0.attn_v.weight", mix) == "Q6_K"
    assert export.matrix_type("blk.0.attn_q.weight", mix) == "Q4_K"
    head = (("output.weight", "Q6_K"), ("", "Q4_K"))  # not the attention's
    assert export.matrix_type("output.weight", head) == "Q6_K"
    assert export.matrix_type("blk.3.attn_output.weight", head) == "Q4_K"
    for mixes in export.MIXES.values():
        for rules in mixes.values():
            assert [mark for mark, _ in rules].index("") == len(rules) - 1


def test_weights_that_drafts_are_trained_on_are_those_of_the_file(tmp_path, monkeypatch):
    """Rows of another target than the one that is shipped: a matrix that stays as it was trained, or
    takes another type than in the file."""
    import gguf

    def quantise(values, kind):
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])

    rules = (("output.weight", "Q8_0"), ("ffn_", "Q4_0"), ("", "Q5_0"))
    monkeypatch.setattr(export, "quantise", quantise)
    monkeypatch.setitem(export.MIXES, "shipped", {"target": rules})
    shape = shapes.TargetShape(n_layers=2, hidden_dim=64, head_dim=32, ffn_dim=96, vocab_size=40)
    c, rng = shape.hidden_dim, np.random.default_rng(8)
    sizes = {"embedding": (40, c), "head": (40, c), "output_norm": (c,)}
    for layer in range(2):
        sizes |= {f"layers.{layer}.{name}": size for name, size in {
            "attn_q": (shape.q_dim, c), "attn_k": (shape.kv_dim, c), "attn_v": (shape.kv_dim, c),
            "attn_gate": (shape.q_dim, c), "attn_output": (c, shape.q_dim),
            "ffn_gate": (96, c), "ffn_up": (96, c), "ffn_down": (c, 96), "attn_norm": (c,),
            "ffn_norm": (c,), "post_attention_norm": (c,), "post_ffw_norm": (c,),
            "attn_q_norm": (32,), "attn_k_norm": (32,)}.items()}  # fmt: skip
    weights = {k: rng.normal(0, 0.1, v).astype(np.float32) for k, v in sizes.items()}
    export.write_target(tmp_path / "t.gguf", weights, shape, [f"t{i}" for i in range(40)], ["t 1"])
    found = export.target_tensors(export.packed(weights, shape), shape)
    tensors = gguf.GGUFReader(tmp_path / "t.gguf").tensors
    assert {t.name for t in tensors} == set(found)
    for tensor in tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(found[tensor.name].shape)
        np.testing.assert_array_equal(found[tensor.name], expected, err_msg=tensor.name)
    assert len({t.tensor_type for t in tensors}) == 4


@pytest.mark.parametrize("types", hybrid_export.MIXES)
def test_the_hybrid_has_a_mix_for_its_draft_too(types, tmp_path, monkeypatch):
    """A mix that was renamed for the embedded pair alone: the hybrid's export ends half done."""
    written = []
    monkeypatch.setattr(hybrid_export, "write_target", lambda path, *rest: path.touch())
    monkeypatch.setattr(export, "load_weights", lambda path: {})
    monkeypatch.setattr(export, "write_draft", lambda path, *rest: written.append((path, rest)))
    for name in ("target", "mtp", "dflash2"):
        (tmp_path / f"{name}.pt").touch()
    (tmp_path / "vocab.json").write_text('{"tokens": [], "merges": []}')
    (tmp_path / "dflash2-hybrid-tiny-f32.gguf").touch()
    (tmp_path / "dflash2-hybrid-tiny-q4_k_m.gguf").touch()
    command = ["", "--work", str(tmp_path), "--out", str(tmp_path), "--types", types]
    monkeypatch.setattr("sys.argv", command)
    hybrid_export.main()
    ((path, (*_, rules, name)),) = written
    assert types in path.name and rules[-1][0] == "" and name == hybrid_export.NAME


def test_files_that_the_trainings_name_are_there():
    """A renamed file of the pair: the hybrid's training, which takes its vocabulary, would end at
    its second phase."""
    from cudflash.demo import demo_files
    from scripts.train_pair import hybrid

    assert hybrid.LIKE.is_file() and str(hybrid.LIKE) == demo_files()[0]
    names = {export.TARGET_FILE, *export.DRAFT_FILES.values()}
    assert names == {p.name for p in hybrid.LIKE.parent.glob("*.gguf")}
    assert export.file_name(export.TARGET_FILE, "q6_k") == "glimmer-tiny-q6_k.gguf"
    assert export.file_name(export.TARGET_FILE, "shipped") == export.TARGET_FILE


def test_tap_numbers_in_the_file_count_layer_inputs():
    """Taps off by one layer: the drafts read the layer before the one they were trained on."""
    assert max(shapes.DFLASH.taps) + 1 < shapes.TARGET.n_layers  # a fault by one exists
    assert shapes.DFLASH.taps == shapes.DFLASH2.taps


def test_loop_share_counts_what_a_period_already_implies():
    """A loop counted as natural text, or natural text as a loop."""
    rng = random.Random(1)
    text = [rng.randrange(500) for _ in range(200)]
    assert measure.loop_share(text) == 0.0
    # the period must be seen once whole and eight more tokens before anything counts
    looped = text[:50] + [7, 8, 9] * 30
    assert measure.loop_share(looped) == pytest.approx((90 - 3 - 8) / 140)
    assert measure.loop_share([]) == 0.0


def test_pooled_acceptance_weighs_by_rounds():
    """A mean of means: a prompt that ends early would weigh as much as a long one."""
    found = [("docs", {"rounds": 10, "emitted": 30, "accepted_at": [8], "proposed_at": [10]}),
             ("code", {"rounds": 30, "emitted": 30, "accepted_at": [0, 0],
                       "proposed_at": [30, 30]})]  # fmt: skip
    pooled = measure.pooled(found, ("docs", "code"))
    assert pooled["acceptance_length"] == 1.5 and pooled["accepted_at"] == [0.2, 0.0]
    assert measure.pooled(found, ("records",))["acceptance_length"] is None


def test_prompts_are_whole_lines_of_the_wanted_length():
    """A prompt cut inside a word: its first token is one that the text never has."""
    text = "".join(f"line {i} of a text\n" for i in range(400))
    part = prompts.cut(random.Random(0), text, str.split, (100, 200))
    assert part in text and part.startswith("line") and part.endswith("text\n")
    assert 100 <= len(part.split()) <= 200
    assert prompts.cut(random.Random(0), "short\n", str.split, (100, 200)) is None


def test_single_words_are_whole_lower_case_words_after_a_blank():
    """A word of two tokens in the records: the line gets longer."""
    words = ["the", "The", "x", "self", "__", "\u00e9a"]
    tokens = ["a", "ing", *("\u0120" + word for word in words)]
    assert tokenizer.single_words(tokens) == ["the", "self"]


def hybrid_weights(shape):
    """Random weights by the trainer's names, and those of the MTP block."""
    rng, c, e, q = np.random.default_rng(3), shape.hidden_dim, shape.delta_dim, shape.q_dim
    both = {"attn_norm": (c,), "post_attention_norm": (c,), "ffn_gate": (shape.ffn_dim, c),
            "ffn_up": (shape.ffn_dim, c), "ffn_down": (c, shape.ffn_dim)}  # fmt: skip
    attention = both | {
        "attn_q": (2 * q, c), "attn_k": (shape.kv_dim, c), "attn_v": (shape.kv_dim, c),
        "attn_output": (c, q), "attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,),
    }  # fmt: skip
    heads = shape.n_delta_v_heads
    delta = both | {
        "attn_qkv": (shape.conv_width, c), "attn_gate": (heads * e, c), "ssm_out": (c, heads * e),
        "ssm_alpha": (heads, c), "ssm_beta": (heads, c), "ssm_norm": (e,), "ssm_dt": (heads,),
        "ssm_conv": (shape.conv_width, shape.conv_taps), "log_a": (heads,),
    }  # fmt: skip
    mtp = attention | {"eh_proj": (c, 2 * c), "enorm": (c,), "hnorm": (c,), "shared_head_norm": (c,)}
    sizes = {"embedding": (shape.vocab_size, c), "head": (shape.vocab_size, c), "output_norm": (c,)}
    for layer in range(shape.n_layers):
        kinds = attention if shape.is_full(layer) else delta
        sizes |= {f"layers.{layer}.{name}": size for name, size in kinds.items()}
    return tuple(
        {k: rng.normal(0, 0.1, v).astype(np.float32) for k, v in some.items()}
        for some in (sizes, mtp)
    )


@pytest.mark.parametrize("with_mtp", [False, True])
def test_exported_hybrid_is_what_the_independent_forward_expects(tmp_path, with_mtp):
    """Names, shapes, or a block count that a reader refuses; a decay with the wrong sign."""
    from tests.reference.hybrid import HybridReference

    shape = shapes.HybridShape(n_layers=2, interval=2, ffn_dim=64, vocab_size=300)
    weights, mtp = hybrid_weights(shape)
    path = tmp_path / "hybrid.gguf"
    tokens = [f"t{i}" for i in range(shape.vocab_size)]
    hybrid_export.write_target(
        path, weights, shape, tokens, ["t 1"], "f32", mtp if with_mtp else None
    )
    ids = [5, 7, 250, 7, 9, 11]
    with cudflash.load(path, device="cpu", threads=1, n_ctx=64) as engine:
        expected = HybridReference(path).forward(ids).logits
        np.testing.assert_allclose(engine.logits(ids), expected, atol=2e-3 * expected.std())
    if with_mtp:
        with cudflash.load(path, drafter="mtp", device="cpu", threads=1, n_ctx=64) as engine:
            assert engine.mtp_k == 3


def test_taps_of_the_hybrid_are_of_both_kinds_of_layer():
    """A draft that reads recurrent layers only, or no one."""
    kinds = {shapes.HYBRID.is_full(tap) for tap in shapes.HYBRID_DFLASH2.taps}
    assert kinds == {False, True} and max(shapes.HYBRID_DFLASH2.taps) < shapes.HYBRID.n_layers
