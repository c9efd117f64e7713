"""``cudflash chat``: a conversation, line by line."""

import click
import numpy  # noqa: F401  (first: from deeper inside other imports it takes a fifth longer)

from cudflash.cli.common import (
    Command,
    check_text,
    json_flag,
    model_option,
    one_model,
    output_of,
    output_options,
)
from cudflash.cli.conversation import Conversation
from cudflash.cli.draft_options import (
    settle_speculation,
    speculation_options,
    take_speculation,
    with_depth,
)
from cudflash.cli.running import (
    engine_options,
    length_option,
    max_tokens,
    open_engine,
    take_engine,
    take_template,
    template_options,
)
from cudflash.cli.sampling_options import (
    sampling_options,
    stop_options,
    take_sampling,
    take_seed,
    take_stops,
)
from cudflash.cli.terminal import LineReader
from cudflash.cli.watching import FAILED, take_watch, watch_options
from cudflash.errors import UsageError


@click.command("chat", cls=Command)
@click.argument("words", nargs=-1, metavar="[FILE]")
@model_option
@click.option("--system", metavar="TEXT", help="System prompt.")
@length_option
@template_options
@stop_options
@engine_options
@speculation_options
@sampling_options
@watch_options
@json_flag("Each answer as one JSON object; an error is one, too.")
@output_options
@click.pass_context
def command(ctx, words, model, system, **params):
    """Talk with a model, line by line; /help lists the commands.

    FILE is the GGUF file (or give it with --model); it needs a chat template. Ctrl-C stops the
    answer, twice at the prompt it leaves, as the end of the input and /exit do. Lines can be
    piped in. Stdout gets the answers and nothing else.
    """
    from cudflash.cli.kernels import CompileNotice

    output = output_of(ctx)
    model, stray = one_model(model, words)
    if stray:
        raise UsageError(f"the argument {stray[0]!r} was not expected; chat takes one file")
    system = check_text("--system", system)
    sampling, arguments = take_sampling(params), take_engine(params)
    request = {
        "max_tokens": max_tokens(params.pop("n_tokens")),
        "stop": take_stops(params),
    }
    speculation = take_speculation(params)
    arguments = with_depth(arguments, speculation["verify_length"])
    seed, extra = take_seed(params), take_template(params)
    watch = take_watch(output, params)
    with CompileNotice(output):
        engine = open_engine(output, model, arguments)
        request |= settle_speculation(output, engine, speculation)
        _need_template(engine, model)
        if params["ignore_eos"]:
            raise UsageError("--ignore-eos would make an answer endless; it is for generate")
        conversation = Conversation(
            output, engine,
            system=system, sampling=sampling, seed=seed, request=request, template=extra,
            as_json=params["as_json"], watch=watch,
        )  # fmt: skip
        code = talk(output, conversation, LineReader(output))
    if watch is not None:
        watch.close()
        code = code or (FAILED if watch.failed else 0)
    ctx.exit(code)


def _need_template(engine, model):
    if not engine.gguf.metadata.get("tokenizer.chat_template"):
        raise UsageError(
            f"{model}: the file has no chat template, expected one for chat; use an "
            "instruction-tuned model, or 'cudflash generate'"
        )


def talk(output, conversation, reader):
    """Read lines until the end; returns the exit code.

    0, unless the input was no terminal and something failed: then the last error's code.
    """
    failed = 0
    output.note("/help lists the commands; /exit leaves")
    while True:
        try:
            line = reader.read()
        except KeyboardInterrupt:
            if reader.interrupted():
                return failed
            continue
        except UsageError as err:  # a line that is no text; the next one may be
            output.error(str(err))
            output.json_error(type(err).__name__, str(err), err.exit_code)
            failed = failed if reader.interactive else err.exit_code
            continue
        if line is None:
            return failed
        code = conversation.take(line)
        if code is None:
            return failed
        failed = failed if reader.interactive else code or failed
