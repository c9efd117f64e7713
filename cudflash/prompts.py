"""Prompts in the three forms users have them: text, token ids, chat messages."""

from collections.abc import Iterable, Mapping

from cudflash.checks import index_of, shown
from cudflash.errors import ContextLengthError, UsageError


def prompt_ids(prompt, tokenizer, template, vocab_size, n_ctx=None):
    """Turn a prompt into token ids.

    Text gets the special tokens the file asks for, and control tokens spelled out in it are parsed
    (raw prompts contain hand-written templates). Chat messages go through the file's template;
    control tokens spelled in their contents stay text. Ids are taken as they are.

    Parameters
    ----------
    prompt : str, iterable of int, or list of {role, content}
    tokenizer : Tokenizer
    template : callable returning ChatTemplate
        Called only for chat messages.
    vocab_size : int
    n_ctx : int, optional
        Refuse a text that certainly has more tokens than this before it is tokenised.

    Returns
    -------
    list of int
        At least one.

    Raises
    ------
    UsageError
        For an empty prompt, an id outside the vocabulary, or another type.
    ContextLengthError
        For a text that is longer than ``n_ctx`` tokens can be.
    """

    def check_text(text):
        if n_ctx is not None:
            check_text_length(text, tokenizer, n_ctx)

    if isinstance(prompt, str):
        check_text(prompt)
        ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        # one BOS, also when the text spells it
        if tokenizer.add_bos and ids[:2] == [tokenizer.bos_id] * 2:
            del ids[0]
    elif isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise UsageError(
            f"the prompt is a {type(prompt).__name__}, expected text, token ids or chat messages"
        )
    else:
        items = prompt if getattr(prompt, "ndim", None) is not None else list(prompt)
        if isinstance(items, list) and items and isinstance(items[0], Mapping):
            from cudflash.loader.chat_template import encode_chat

            ids = encode_chat(tokenizer, template(), items, check_text=check_text)
        else:
            ids = check_ids(items, vocab_size)
    if not ids:
        raise UsageError(
            "the prompt has no tokens and the model adds none (no BOS), expected at least one; "
            "give some text"
        )
    return ids


def check_text_length(text, tokenizer, n_ctx):
    """Raise ContextLengthError for a text that cannot fit, whatever its tokens are."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest > n_ctx:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters, which are at least {fewest} tokens, the "
            f"context holds {n_ctx}; shorten the prompt or load the model with a larger n_ctx"
        )


def check_ids(tokens, vocab_size):
    """Return token ids as a list of int.

    Raises
    ------
    UsageError
        For anything that is not an id of the vocabulary.
    """
    ids = []
    if isinstance(tokens, (str, bytes, Mapping)) or not isinstance(tokens, Iterable):
        raise UsageError(f"the tokens are {shown(tokens)}, expected a sequence of token ids")
    if getattr(tokens, "ndim", 1) != 1:
        raise UsageError(f"the tokens have shape {tokens.shape}, expected one row of token ids")
    for index, token in enumerate(tokens):
        number = index_of(token)
        if number is None:
            raise UsageError(f"prompt token {index} is {shown(token)}, expected a token id")
        if not 0 <= number < vocab_size:
            raise UsageError(
                f"prompt token {index} is {number}, expected an id below the vocabulary size "
                f"{vocab_size}"
            )
        ids.append(number)
    return ids
