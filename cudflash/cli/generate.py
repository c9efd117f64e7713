"""``cudflash generate``: one answer to stdout."""

import click
import numpy  # noqa: F401  (first: from deeper inside other imports it takes a fifth longer)

from cudflash.cli.common import (
    Command,
    check_text,
    check_writable,
    json_option,
    model_option,
    one_model,
    options,
    output_of,
    output_options,
    prompt_options,
    read_prompt,
    unwritable,
)
from cudflash.cli.draft_options import (
    check_required,
    require_option,
    settle_speculation,
    speculation_options,
    take_speculation,
    with_depth,
)
from cudflash.cli.running import (
    chat_prompt,
    engine_options,
    length_option,
    max_tokens,
    open_engine,
    stats_line,
    stream_answer,
    take_engine,
    take_template,
    template_options,
)
from cudflash.cli.sampling_options import (
    ban_ends,
    sampling_options,
    stop_options,
    take_sampling,
    take_seed,
    take_stops,
)
from cudflash.cli.watching import FAILED, take_watch, watch_options
from cudflash.errors import UsageError

INTERRUPTED = 130

answer_options = options(
    length_option,
    click.option(
        "--chat/--raw",
        default=None,
        help="Ask through the model's chat template, or continue the text as it is (default).",
    ),
    click.option("--system", metavar="TEXT", help="System prompt; implies --chat."),
    template_options,
    stop_options,
)

result_options = options(
    click.option(
        "--logprobs",
        type=int,
        default=0,
        metavar="N",
        help="With --json: log-probability of each token and of the N likeliest ones.",
    ),
    require_option,
    click.option(
        "--receipt",
        "receipt_file",
        type=click.Path(),
        metavar="FILE",
        help="Write how the answer was made, as JSON.",
    ),
    click.option("--no-stream", is_flag=True, help="Write the answer when it is complete."),
    json_option,
)


@click.command("generate", cls=Command)
@click.argument("words", nargs=-1, metavar="[FILE] [-]")
@model_option
@prompt_options
@answer_options
@engine_options
@speculation_options
@sampling_options
@watch_options
@result_options
@output_options
@click.pass_context
def command(ctx, words, model, prompt, prompt_file, escape, **params):
    """Continue a text, or answer one question (--chat).

    FILE is the GGUF file (or give it with --model). The prompt comes from --prompt, --file or
    standard input; special tokens written in it count as such, except with --chat. Stdout gets
    the answer and nothing else.

    Ctrl-C ends the answer: what was produced so far is complete, the finish reason is "cancelled"
    and the exit code is 130.
    """
    output = output_of(ctx)
    model, words = one_model(model, words)
    text = read_prompt(prompt, prompt_file, words, escape)
    receipt_file = take_receipt(params)
    speculation, required = take_speculation(params), params.pop("require_draft")
    watch = take_watch(output, params)
    result, interrupted = _generate(output, model, text, escape, speculation, params, watch)
    if params["as_json"]:
        output.progress("reading the model file for the receipt's digest")
        output.json(result.to_dict())
    elif params["no_stream"] and not (watch and watch.on_stdout):
        output.answer(result.text)
    if watch is not None:
        watch.close()
    output.note(stats_line(result))
    saved = save_receipt(output, receipt_file, result)
    if required:
        check_required(result)
    if interrupted:
        ctx.exit(INTERRUPTED)
    if not saved or (watch is not None and watch.failed):
        ctx.exit(FAILED)


def take_receipt(params):
    """Take ``--receipt`` out of a command's parameters; None without.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    path = params.pop("receipt_file")
    if path is not None:
        check_writable(path, "the receipt")
    return path


def save_receipt(output, path, result):
    """Write ``--receipt``; the model is read for its digest.

    Returns
    -------
    bool
        False if it could not be written, which is told.
    """
    if path is None:
        return True
    from cudflash.receipt import write_receipt

    output.progress("reading the model file for the receipt's digest")
    try:
        write_receipt(path, result.receipt)
    except OSError as err:
        output.error(unwritable(path, "the receipt", err))
        return False
    output.clear_progress()
    return True


def _generate(output, model, text, escape, speculation, params, watch):
    """Check all arguments, load, run."""
    from cudflash.cli.kernels import CompileNotice

    sampling, arguments = take_sampling(params), take_engine(params)
    arguments = with_depth(arguments, speculation["verify_length"])
    request = {
        "max_tokens": max_tokens(params.pop("n_tokens")),
        "seed": take_seed(params),
        "stop": take_stops(params, escape),
        "logprobs": params.pop("logprobs"),
    }
    if request["logprobs"] and not params["as_json"]:
        raise UsageError("--logprobs gives numbers in the JSON object only; add --json")
    messages, extra = take_messages(params, text)
    if messages is None and not text:
        check_empty(model)
    with CompileNotice(output):
        engine = open_engine(output, model, arguments)
        request |= settle_speculation(output, engine, speculation)
        if params.pop("ignore_eos"):
            sampling = ban_ends(sampling, engine.tokenizer)
        if messages is None:
            _hint_chat(output, engine, params["chat"])
        content = text if messages is None else chat_prompt(engine, messages, extra)
        generation = engine.session().generate(content, sampling=sampling, **request)
        stream = not (params["as_json"] or params["no_stream"] or (watch and watch.on_stdout))
        return stream_answer(output, generation, stream, watch)


def take_messages(params, text):
    """Chat messages of the question, None for a raw prompt; and the template's variables.

    Raises
    ------
    UsageError
        For chat options with ``--raw``.
    """
    system, extra = check_text("--system", params.pop("system")), take_template(params)
    chat = params["chat"] or (params["chat"] is None and system is not None)
    if not chat:
        if system is not None:
            raise UsageError("--system needs the chat template, but --raw was given; omit one")
        if extra:
            raise UsageError("--think and --chat-template-kwargs need --chat; add it or omit them")
        return None, {}
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}], extra


def check_empty(model):
    """Refuse an empty prompt before weights are read, if the model adds no token of its own.

    Raises
    ------
    UsageError
    """
    from cudflash.loader.gguf import open_gguf
    from cudflash.loader.tokenizer import Tokenizer
    from cudflash.prompts import prompt_ids

    tokenizer = Tokenizer.from_gguf(open_gguf(model))
    prompt_ids("", tokenizer, None, tokenizer.vocab_size)


def _hint_chat(output, engine, chosen):
    """Instruction-tuned models disappoint when a question is merely continued: say so once."""
    if chosen is None and engine.gguf.metadata.get("tokenizer.chat_template"):
        output.note("the prompt is continued as it is (--raw); --chat asks it as a question")
