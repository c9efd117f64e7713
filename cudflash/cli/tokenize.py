"""``cudflash tokenize``: text to ids and back, by the vocabulary of a GGUF file."""

import re

import click

from cudflash.cli.common import (
    Command,
    json_option,
    model_option,
    one_model,
    output_of,
    output_options,
    prompt_options,
    read_prompt,
)
from cudflash.errors import UsageError


@click.command("tokenize", cls=Command)
@click.argument("words", nargs=-1, metavar="[FILE] [-]")
@model_option
@prompt_options
@click.option("--ids", "ids_only", is_flag=True, help="Only the ids, as one list.")
@click.option("--no-special", "--no-bos", is_flag=True, help="Add no BOS and no EOS.")
@click.option(
    "--parse-special", is_flag=True, help="Read the text of control tokens as these tokens."
)
@click.option("--chat", is_flag=True, help="Put the text into the chat template as one question.")
@click.option("--decode", is_flag=True, help="The input is ids; write the bytes they stand for.")
@json_option
@output_options
@click.pass_context
def command(ctx, words, model, prompt, prompt_file, escape, **flags):
    """Turn text into token ids, or ids back into text (--decode).

    FILE is the GGUF file (or give it with --model). The text comes from --prompt, --file or
    standard input; one newline at the end of a file or of standard input is dropped.
    """
    model, words = one_model(model, words)
    text = read_prompt(prompt, prompt_file, words, escape)
    check_flags(flags)
    from cudflash.loader.gguf import open_gguf
    from cudflash.loader.tokenizer import Tokenizer

    gguf = open_gguf(model)
    tokenizer = Tokenizer.from_gguf(gguf)
    output = output_of(ctx)
    if flags["decode"]:
        decode(output, tokenizer, parse_ids(text), flags["as_json"])
        return
    ids = encode(tokenizer, gguf, text, flags)
    if flags["as_json"]:
        tokens = [_token(tokenizer, ident) for ident in ids]
        output.json({"n_tokens": len(ids), "ids": ids, "tokens": tokens})
    elif flags["ids_only"]:
        output.line("[" + ", ".join(map(str, ids)) + "]")
    else:
        output.table([(ident, _visible(tokenizer, ident)) for ident in ids], right=(0,))


def check_flags(flags):
    """Raise UsageError for flags that contradict each other."""
    encoding = [n for n in ("ids_only", "no_special", "parse_special", "chat") if flags[n]]
    if flags["decode"] and encoding:
        name = "ids" if encoding[0] == "ids_only" else encoding[0].replace("_", "-")
        raise UsageError(f"--decode and --{name} do not go together; pass one of them")
    if flags["chat"] and (flags["no_special"] or flags["parse_special"]):
        raise UsageError(
            "--chat writes special tokens as the template says; omit --no-special and "
            "--parse-special"
        )


def encode(tokenizer, gguf, text, flags):
    """Ids of a text as the flags say."""
    if flags["chat"]:
        from cudflash.loader.chat_template import ChatTemplate, encode_chat

        template = ChatTemplate.from_gguf(gguf, tokenizer)
        return encode_chat(tokenizer, template, [{"role": "user", "content": text}])
    return tokenizer.encode(
        text, add_special=not flags["no_special"], parse_special=flags["parse_special"]
    )


def decode(output, tokenizer, ids, as_json):
    """Write the bytes of ids, control tokens spelled out."""
    data = tokenizer.decode(ids, special=True)
    if as_json:
        output.json({"n_tokens": len(ids), "ids": ids, "text": data.decode("utf-8", "replace")})
    else:
        output.raw(data)
        output.end_line()


def parse_ids(text):
    """Ids written as ``1 2 3``, ``1,2,3`` or ``[1, 2, 3]``.

    Raises
    ------
    UsageError
        For anything else.
    """
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    ids = []
    for word in filter(None, words):
        if not re.fullmatch(r"[0-9]{1,10}", word):
            raise UsageError(f"{word!r} is no token id, expected whole numbers such as '1 2 3'")
        ids.append(int(word))
    return ids


def _token(tokenizer, ident):
    piece = tokenizer.decode_piece(ident, special=True)
    return {"id": ident, "text": piece.decode("utf-8", "replace"), "bytes": list(piece)}


def _visible(tokenizer, ident):
    """The bytes of a token as a quoted text; what is no character is shown as ``\\xNN``."""
    piece = tokenizer.decode_piece(ident, special=True)
    text = piece.decode("utf-8", "backslashreplace")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"'{shown}'"
