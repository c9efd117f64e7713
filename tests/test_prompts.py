"""Prompts as text, ids and chat messages."""

import numpy as np
import pytest
from cudflash.loader.chat_template import ChatTemplate

from cudflash.errors import ContextLengthError, UsageError
from cudflash.prompts import prompt_ids
from tests.helpers.engines import engine

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


class BosTokenizer:
    """Adds BOS (id 1); the text "<s>" spells it; other characters are their code points."""

    add_bos, bos_id, eog_ids = True, 1, frozenset()

    def encode(self, text, *, add_special=True, parse_special=False):
        assert parse_special, "raw prompts contain hand-written templates"
        ids = [1] if add_special else []
        if text.startswith("<s>"):
            ids, text = ids + [1], text[3:]
        return ids + [ord(c) for c in text]


def no_template():
    raise AssertionError("only chat messages need the template")


def test_text_gets_one_bos_even_when_it_spells_it():
    """Catches a doubled BOS, which changes every answer."""
    assert prompt_ids("ab", BosTokenizer(), no_template, 200) == [1, 97, 98]
    assert prompt_ids("<s>ab", BosTokenizer(), no_template, 200) == [1, 97, 98]
    assert prompt_ids("", BosTokenizer(), no_template, 200) == [1]


def test_ids_are_taken_as_they_are():
    """Catches BOS added to ids, and NumPy integers refused."""
    tokenizer = BosTokenizer()
    assert prompt_ids(np.array([5, 6]), tokenizer, no_template, 200) == [5, 6]
    assert prompt_ids(range(3), tokenizer, no_template, 200) == [0, 1, 2]
    assert all(type(i) is int for i in prompt_ids(np.arange(3), tokenizer, no_template, 200))


def test_messages_go_through_the_template():
    """Catches chat messages read as ids, or rendered without the template."""
    tokenizer = engine("llama").tokenizer
    template = ChatTemplate(TEMPLATE, "x.gguf")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = prompt_ids(messages, tokenizer, lambda: template, 10**6)
    plain = tokenizer.encode("[user]a[assistant]b", add_special=tokenizer.add_bos)
    assert found == plain


def test_absurdly_long_prompts_are_refused_before_they_are_tokenised(monkeypatch):
    """Catches minutes of tokenising a text that cannot fit, and one that fits being refused."""
    tokenizer = engine("llama").tokenizer
    longest = max(4, max(len(token) for token in tokenizer.vocabulary.tokens))
    assert tokenizer.fewest_tokens("a" * longest) == 1
    assert tokenizer.fewest_tokens("a" * (longest + 1)) == 2
    for text in ("hello world, hello", "\n" * 40, "é🙂" * 9, "<s>" * 5):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, parse_special=True))
    monkeypatch.setattr(tokenizer, "partition", None)  # any attempt to tokenise fails
    template = ChatTemplate(TEMPLATE, "x.gguf")
    text = "a" * (50 * longest + 1)
    for prompt in (text, [{"role": "user", "content": text}]):
        with pytest.raises(ContextLengthError, match="at least 5[1-9] tokens.*holds 50"):
            prompt_ids(prompt, tokenizer, lambda: template, 10**6, n_ctx=50)


def test_empty_prompt_without_bos_is_refused():
    """Catches a pass over no rows."""
    tokenizer = BosTokenizer()
    tokenizer.encode = lambda text, **_: []
    with pytest.raises(UsageError, match="no BOS"):
        prompt_ids("", tokenizer, no_template, 200)
