"""Prompt sets: what is shipped, what is synthetic, how a context is filled."""

import pytest

from cudflash.bench.prompts import (
    DEPTH_MARK,
    NATURAL_SETS,
    SETS,
    SYNTHETIC_SETS,
    Filler,
    Prompts,
    check_context,
    choose_sets,
    load_set,
    loops,
    needed_context,
    own_set,
    parse_set,
    period,
    prompts_digest,
)
from cudflash.errors import ContextLengthError, FormatError, UsageError


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text, add_special=True):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids)


def encode(prompt):
    if isinstance(prompt, list):
        return list(f"<user>{prompt[0]['content']}</user>".encode())
    return list(prompt.encode())


@pytest.fixture
def prompts():
    return Prompts(encode, Bytes(), has_template=True)


def test_every_kind_that_users_asked_for_is_there():
    """A bench of English maths only (users.md A37 to A39)."""
    assert set(NATURAL_SETS) == {
        "code", "maths", "prose", "chat", "list", "languages", "recall", "copy",
    }  # fmt: skip
    for name in SETS:
        found = load_set(name)
        assert len(found.texts) >= 8 and len(set(found.texts)) == len(found.texts)
        assert found.source and found.what
        assert (found.kind == "synthetic") == (name in SYNTHETIC_SETS)
    assert sum(not text.isascii() for text in load_set("languages").texts) >= 6
    assert all(DEPTH_MARK in text for text in load_set("recall").texts)


def test_natural_sets_are_not_periodic(prompts):
    """A shipped text that a draft can continue without looking at the context."""
    for prompt_set in choose_sets(["all"]):
        for item in prompts.items(prompt_set, 0):
            assert item.kind == "natural", (item.set, item.index)
    shown = [prompts.items(load_set("periodic"), 0)[i].ids for i in range(8)]
    assert all(period(ids) for ids in shown)


def test_choice_of_sets():
    """A headline into which synthetic sets have slipped by default."""
    assert [s.name for s in choose_sets(())] == list(NATURAL_SETS)
    assert [s.name for s in choose_sets(["synthetic", "code"])] == [*SYNTHETIC_SETS, "code"]
    assert [s.name for s in choose_sets(["code", "all"])] == ["code", *NATURAL_SETS[1:]]
    with pytest.raises(UsageError, match="no prompt set 'poems', expected one of code"):
        choose_sets(["poems"])


@pytest.mark.parametrize(
    "text", ["what: x\n===\na\n", "kind: odd\nsource: x\nwhat: y\n===\na\n",
             "kind: natural\nsource: x\nwhat: y\n===\n\n===\nb\n", "kind: natural\nsource: x\nwhat: y"],
)  # fmt: skip
def test_damaged_set_is_refused(text):
    """A set without a source, or with an empty prompt, that would be measured all the same."""
    with pytest.raises(FormatError, match="prompt set odd"):
        parse_set("odd", text)


def test_periodic_text_of_a_user_is_labelled(prompts):
    """One repeated sentence in a user's file, reported as natural text."""
    mine = own_set(["Once upon a time there was a miller", "la la la la la la la la la"], "mine.txt")
    one, two = prompts.items(mine, 0)
    assert (one.set, one.kind) == ("own", "natural")
    assert (two.set, two.kind) == ("own (synthetic)", "synthetic") and "periodic, 3" in two.note
    with pytest.raises(UsageError, match="no prompt"):
        own_set([], "mine.txt")


def test_depth_is_filled_before_the_prompt_and_inside_recall(prompts):
    """A context filled behind the fact that is asked for, or not at all."""
    (code, *_), (recall, *_) = (prompts.items(load_set(n), 300) for n in ("code", "recall"))
    text = bytes(code.ids).decode()
    assert text.endswith(load_set("code").texts[0])
    assert len(code.ids) == 300 + 2 + len(load_set("code").texts[0])
    words = bytes(recall.ids).decode()
    assert words.startswith("Note for later: the key") and words.rstrip().endswith("under the")
    assert 300 <= len(recall.ids) - (len(load_set("recall").texts[0]) - len(DEPTH_MARK)) <= 302
    shallow = prompts.items(load_set("recall"), 0)[0]
    assert DEPTH_MARK.encode() not in bytes(shallow.ids)


def test_filler_that_repeats_makes_a_prompt_synthetic(prompts):
    """A depth beyond the shipped text, filled with copies of it and called natural."""
    filler = Filler(Bytes(), "natural words.")
    assert filler.text(7) == "natural" and filler.text(20) == "natural words.natura"
    assert Filler(Bytes()).n_tokens > 150_000  # bytes; about 40,000 tokens of a real vocabulary
    prompts._filler = filler
    item = prompts.items(load_set("prose"), 20)[0]
    assert item.kind == "synthetic" and "repeats itself" in item.note
    assert prompts.items(load_set("prose"), 14)[0].kind == "natural"


def test_chat_uses_the_template_where_there_is_one(prompts):
    """Chat prompts as bare text for a model that was trained with a template."""
    assert bytes(prompts.items(load_set("chat"), 0)[0].ids).startswith(b"<user>")
    assert not bytes(prompts.items(load_set("code"), 0)[0].ids).startswith(b"<user>")
    without = Prompts(encode, Bytes(), has_template=False)
    assert not bytes(without.items(load_set("chat"), 0)[0].ids).startswith(b"<user>")
    every = Prompts(encode, Bytes(), has_template=True, all_chat=True)
    assert bytes(every.items(load_set("code"), 0)[0].ids).startswith(b"<user>")
    with pytest.raises(UsageError, match="--chat needs a chat template"):
        Prompts(encode, Bytes(), has_template=False, all_chat=True)


def test_prompt_longer_than_the_context(prompts):
    """An error after an hour, at the longest prompt."""
    items = prompts.items(load_set("code"), 0)
    longest = max(items, key=lambda item: len(item.ids))
    with pytest.raises(ContextLengthError) as err:
        check_context(items, 32, 100)
    words = f"prompt {longest.index} of the set 'code' at depth 0 needs {len(longest.ids)} + 32"
    assert words in str(err.value) and "holds 100" in str(err.value)
    check_context(items, 32, len(longest.ids) + 32)
    n_ctx = needed_context(items, 32)
    assert len(longest.ids) + 32 <= n_ctx < len(longest.ids) + 32 + 64


def test_digest_is_that_of_the_prompts(prompts):
    """Two records that look alike and were measured on different texts."""
    items = prompts.items(load_set("code"), 0)
    assert prompts_digest(items) == prompts_digest(prompts.items(load_set("code"), 0))
    others = (items[:-1], items[::-1], prompts.items(load_set("code"), 8))
    assert all(prompts_digest(items) != prompts_digest(other) for other in others)


@pytest.mark.parametrize(
    "ids, expected",
    [([1, 2, 3] * 9, 3), ([7] * 20, 1), (list(range(40)), None), ([1, 2] * 3, None),
     ([1, 2, 3] * 9 + [9], 3)],
)  # fmt: skip
def test_period(ids, expected):
    """A loop that one odd token hides; a short text that is judged at all."""
    assert period(ids) == expected


def test_loop_is_looked_for_at_the_end():
    """An answer that has ended in a loop, judged by its varied beginning; or the reverse."""
    assert loops([*range(200), *[1, 2, 3] * 16])
    assert not loops([*[1, 2, 3] * 50, *range(48)]) and not loops([])
