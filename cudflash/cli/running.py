"""Load an engine and run answers for ``generate`` and ``chat``.

Owns what the user is told on the way and how Ctrl-C ends an answer. Must not know which command
runs. Invariant: an answer's text reaches stdout token by token, and a Ctrl-C loses none of it.
"""

import signal
import threading
from contextlib import contextmanager, nullcontext

import click

from cudflash import defaults
from cudflash.cli import process
from cudflash.cli.common import (
    cache_options,
    check_text,
    device_options,
    file_name,
    options,
    thread_count,
)
from cudflash.cli.draft_options import (
    draft_line,
    draft_options,
    draft_phrase,
    find_draft,
    take_draft,
)
from cudflash.cli.interrupts import KeptInterrupt, forget_kept, keep, listen, raise_kept
from cudflash.cli.output import visible
from cudflash.errors import UsageError

engine_options = options(
    device_options,
    cache_options,
    click.option(
        "--activations",
        metavar="TYPE",
        help=f"Precision of activations: int8, or int8x2 (finer). Default: {defaults.ACTIVATIONS}.",
    ),
    draft_options,
)

length_option = click.option(
    "-n",
    "--max-tokens",
    "--n-predict",
    "--predict",
    "--max-new-tokens",
    "n_tokens",
    type=int,
    metavar="N",
    help="Tokens of an answer at most. Default and -1: as many as the context holds.",
)

template_options = options(
    click.option(
        "--think/--no-think",
        default=None,
        help="Set the template's enable_thinking; models without that switch ignore it.",
    ),
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Further variables of the chat template, as one JSON object.",
    ),
)

_TEMPLATE_OWN = ("messages", "check_text", "add_generation_prompt", "bos_token", "eos_token")


def take_engine(params):
    """Take the engine options out of a command's parameters: the arguments of ``load``.

    Raises
    ------
    UsageError
        For options that contradict each other.
    """
    draft = take_draft(params)
    wanted = {
        "device": params.pop("device"),
        "threads": thread_count(params.pop("threads")),
        "n_ctx": params.pop("n_ctx"),
        "kv_type": params.pop("kv_type"),
        "activations": params.pop("activations"),
        "graphs": not params.pop("no_graph"),
    }
    return {**draft, **{name: value for name, value in wanted.items() if value is not None}}


def take_template(params):
    """Variables for the chat template from ``--think`` and ``--chat-template-kwargs``."""
    think = params.pop("think")
    text = check_text("--chat-template-kwargs", params.pop("chat_template_kwargs"))
    extra = {} if think is None else {"enable_thinking": think}
    if text is None:
        return extra
    import json

    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise UsageError(f"--chat-template-kwargs is not JSON ({err})") from None
    if not isinstance(given, dict):
        raise UsageError('--chat-template-kwargs is no JSON object, expected {"name": value, ...}')
    for name in _TEMPLATE_OWN:
        if name in given:
            raise UsageError(f"--chat-template-kwargs sets {name!r}, which is set by the program")
    return {**extra, **given}


def max_tokens(n):
    """``-n``: None for no limit, which llama.cpp spells -1 or -2.

    Raises
    ------
    UsageError
        For any other negative number.
    """
    if n is None or n in (-1, -2):
        return None
    if n < 0:
        raise UsageError(f"--max-tokens is {n}, expected 0 or more, or -1 for no limit")
    return n


def open_engine(output, model, arguments):
    """Load a model and tell on stderr what runs where.

    Parameters
    ----------
    output : Output
    model : str
    arguments : dict
        From ``take_engine``.

    Returns
    -------
    Engine
    """
    import cudflash

    listen()
    if arguments.get("n_ctx") == 0:
        arguments = {**arguments, "n_ctx": _own_context(model)}
    arguments, explanation = find_draft(model, arguments)
    name = file_name(model)
    output.progress(f"loading {name}")

    def tell(done, total):
        raise_kept()
        output.progress(f"loading {name} {100 * done // total} %")

    engine = cudflash.load(model, progress=tell, **arguments)
    process.loaded()
    raise_kept()
    output.clear_progress()
    output.note(engine_line(engine, model, explanation))
    for note in engine.notes:
        # what a file leaves out is shown by inspect; here it would hide what differs per run
        own = "sink overridden" in note and "draft_sink" not in arguments  # the embedded pair's
        tell = output.detail if own or note.startswith("default taken for") else output.note
        tell("note: " + visible(note))
    return engine


def _own_context(model):
    from cudflash.loader.bind import bind_target
    from cudflash.loader.gguf import open_gguf

    return bind_target(open_gguf(model)).config.context_length


def engine_line(engine, model, explanation):
    """The first line after loading: what runs, where and why, and with which settings."""
    device = engine.device
    threads = engine.ops.threads()
    with_threads = f", {threads} thread{'' if threads == 1 else 's'}" if threads else ""
    return visible(
        f"{file_name(model)} ({engine.config.arch}) on {device.kind}: {device.name}"
        f"{with_threads} ({device.reason}); "
        f"{draft_phrase(engine, explanation)}; context {engine.n_ctx}; KV {engine.kv_type}; "
        f"activations {engine.activations}"
    )


def chat_prompt(engine, messages, extra):
    """Chat messages as ``Session.generate`` takes them; ids where the template gets variables."""
    if not extra:
        return messages
    from cudflash.loader.chat_template import encode_chat
    from cudflash.prompts import check_text_length

    return encode_chat(
        engine.tokenizer, engine.chat_template(), messages,
        check_text=lambda text: check_text_length(text, engine.tokenizer, engine.n_ctx), **extra,
    )  # fmt: skip


@contextmanager
def interrupt_cancels(generation):
    """Within the block the first Ctrl-C cancels the answer cleanly; the second raises.

    Yields a list that is no longer empty after a Ctrl-C.
    """
    pressed = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # signals belong to the main thread
        return

    def handler(signum, frame):
        if pressed and not keep(frame):
            raise KeyboardInterrupt
        if not pressed:
            pressed.append(True)
            generation.cancel()
            keep()  # kernels that the answer would still need are not waited for

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
        forget_kept()


def stream_answer(output, generation, stream=True, watch=None):
    """Run an answer to its end, its text going to stdout as it comes.

    Parameters
    ----------
    output : Output
    generation : Generation
    stream : bool
        False to leave the text to the caller.
    watch : Watch, optional
        Who else sees the events.

    Returns
    -------
    (Result, bool)
        The bool tells whether Ctrl-C was pressed.
    """
    from cudflash.events import Finished, TokenEvent

    written = 0
    pressed = ()
    screen = nullcontext() if watch is None else watch.answer()
    try:
        with generation, interrupt_cancels(generation) as pressed, screen:
            for event in generation:
                if isinstance(event, TokenEvent | Finished):
                    if stream:
                        output.answer(event.text)
                        written += len(event.text)
                elif watch is None or not watch.tells:
                    _tell(output, event)
                if watch is not None:
                    watch.see(event)
    except KeptInterrupt:  # before a kernel: what came so far is complete, its end held back
        if stream:
            output.answer(generation.result().text[written:])
    output.clear_progress()
    return generation.result(), bool(pressed)


def _tell(output, event):
    """Say on stderr what happened beside the text."""
    from cudflash.events import (
        Diagnosed,
        DrafterFailed,
        EconomyChanged,
        GateChanged,
        PrefixReused,
        PromptProgress,
    )

    if isinstance(event, PromptProgress):
        if event.done < event.total:
            output.progress(f"prompt {event.done} of {event.total} tokens")
    elif isinstance(event, PrefixReused):
        output.detail(
            f"{event.cached_tokens} of {event.prompt_tokens} prompt tokens reused: {event.reason}"
        )
    elif isinstance(event, GateChanged | EconomyChanged):
        output.detail(f"draft: {event.event.reason}")
    elif isinstance(event, DrafterFailed):
        output.note(f"note: {event.fault.reason}; the answer goes on without it")
    elif isinstance(event, Diagnosed):
        output.note(f"note: {event.finding.sentence}")


def stats_line(result):
    """Counts and rates of an answer, for stderr."""
    stats, usage = result.stats, result.usage
    text = f"{usage.completion_tokens} tokens"
    if stats["decode_tps"]:
        text += f", {stats['decode_tps']:.1f} tokens/s"
    text += f"; prompt {usage.prompt_tokens} tokens"
    if usage.cached_tokens:
        text += f" ({usage.cached_tokens} reused)"
    if stats["prompt_tps"]:
        text += f", {stats['prompt_tps']:.1f} tokens/s"
    text += draft_line(stats["speculative"])
    by = f" at {result.stopped_by!r}" if result.stopped_by is not None else ""
    return f"{text}; ended by {result.finish_reason}{by}"
