"""What the commands share: lazy groups, near-miss messages, options with llama.cpp's names.

Owns how arguments are spelled. Must not import a model, Numba, Rich or Jinja: ``--help`` is quick.
Invariant: every complaint about an argument is one sentence, and the program then exits with 2.
"""

import difflib
import importlib
import os
import sys

import click

from cudflash.cli.output import Output, is_terminal, visible
from cudflash.errors import UsageError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

# Options that people know from llama.cpp and that have no counterpart, with what to do instead.
_FOREIGN_OPTIONS = {
    ("-ngl", "--gpu-layers", "--n-gpu-layers", "-sm", "--split-mode", "-mg", "--main-gpu"): (
        "a model runs on one device as a whole; choose it with --device"
    ),
    ("-b", "--batch-size", "-ub", "--ubatch-size", "-fa", "--flash-attn", "-nkvo"): (
        "results never depend on it, so there is nothing to choose; leave it out"
    ),
    ("--mlock", "--no-mmap", "--mmap", "--numa", "--no-warmup", "--warmup"): (
        "files are always memory-mapped; leave it out"
    ),
    ("-ctv", "--cache-type-v"): "keys and values have one type; choose it with --kv-type",
    ("-cnv", "--conversation", "-i", "--interactive", "-if"): (
        "use 'cudflash chat', or --chat for one question"
    ),
    ("-no-cnv", "--no-conversation"): "generate continues the text as it is; leave it out",
    ("-hf", "-hfr", "--hf-repo", "-mu", "--model-url"): (
        "this version downloads no models; give a file with --model"
    ),
    ("--draft-min", "--draft-p-min", "--spec-type", "-cd", "--ctx-size-draft", "-ngld"): (
        "the draft's kind and context come from its file; leave it out"
    ),
    ("--grammar", "--grammar-file", "--json-schema", "-j"): "there is no constrained output",
    ("--samplers", "--sampling-seq"): "the order of the samplers is fixed to llama.cpp's default",
    ("--lora", "--control-vector", "--mmproj"): "only plain text models are supported",
    ("-co", "--color"): "colour is used on terminals by itself; --no-color switches it off",
    ("--log-disable",): "use -q for silence",
}
_FOREIGN_COMMANDS = {
    "run": "use 'cudflash generate' for one answer or 'cudflash chat' for a conversation",
    "complete": "use 'cudflash generate'",
    "show": "use 'cudflash inspect'",
    "serve": "this version has no server; use 'cudflash generate' or 'cudflash chat'",
    "pull": "this version downloads no models; give commands a file",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they run: ``table`` is name -> (module, help)."""

    def __init__(self, *args, table, **kwargs):
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, ctx):
        return list(self._table)

    def get_command(self, ctx, name):
        if name not in self._table:
            return None
        return importlib.import_module(self._table[name][0]).command

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])

    def shell_complete(self, ctx, incomplete):
        from click.shell_completion import CompletionItem

        items = [
            CompletionItem(name, help=text)
            for name, (_, text) in self._table.items()
            if name.startswith(incomplete)
        ]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(self, ctx, args):
        name = args[0]
        if name in self._table or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, list(self._table), n=1, cutoff=0.6)
        if name in _FOREIGN_COMMANDS:
            hint = _FOREIGN_COMMANDS[name]
        elif near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"expected one of {', '.join(self._table)}"
        raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)

    def parse_args(self, ctx, args):
        return _parse(self, super().parse_args, ctx, args)


class Command(click.Command):
    """A command whose complaints name the nearest option."""

    def parse_args(self, ctx, args):
        return _parse(self, super().parse_args, ctx, args)


def _parse(command, parse, ctx, args):
    _refuse_glued(command, ctx, args)
    try:
        return parse(ctx, args)
    except click.NoSuchOption as err:
        raise click.UsageError(_no_such_option(command, ctx, err.option_name), ctx) from None


def _refuse_glued(command, ctx, args):
    """Refuse ``-ngl 99``: click would read it as ``-n gl``, which no user of llama.cpp means.

    A value glued to its option must not begin with a letter (``-n5`` is fine); several flags may
    share a dash.
    """
    takes_value = {}
    for param in command.get_params(ctx):
        if isinstance(param, click.Option):
            for name in [*param.opts, *param.secondary_opts]:
                takes_value[name] = not param.is_flag
    rest = iter(args)
    for arg in rest:
        if arg == "--" or (isinstance(command, click.Group) and arg[:1] != "-"):
            return  # what follows a command's name is the command's
        if arg in takes_value:
            if takes_value[arg]:
                next(rest, None)
            continue
        if arg[:1] != "-" or arg[1:2] == "-" or not arg[2:3].isalpha():
            continue
        if not all(takes_value.get("-" + letter) is False for letter in arg[1:]):
            raise click.UsageError(_no_such_option(command, ctx, arg), ctx)


def _no_such_option(command, ctx, name):
    name = name.split("=", 1)[0]
    for names, hint in _FOREIGN_OPTIONS.items():
        if name in names:
            return f"there is no option {name}: {hint}"
    known = [o for param in command.get_params(ctx) for o in [*param.opts, *param.secondary_opts]]
    near = difflib.get_close_matches(name, [o for o in known if o.startswith("-")], 1, 0.6)
    if near:
        return f"there is no option {name}; did you mean {near[0]}?"
    return f"there is no option {name}; see '{ctx.command_path} --help'"


# -- options ---------------------------------------------------------------------------------------


def output_of(ctx):
    """The run's ``Output``; made by ``main``, or here when a command is called by itself."""
    return ctx.ensure_object(Output)


def _set_output(attribute):
    def callback(ctx, param, value):
        if value:
            setattr(output_of(ctx), attribute, True)

    return callback


def output_options(function):
    """Add ``-q``, ``-v`` and ``--no-color``."""
    for names, attribute, text in (
        (("--no-color",), "no_color", "No colour, also on a terminal (as with NO_COLOR set)."),
        (("-v", "--verbose"), "verbose", "Details on stderr, and the traceback of an error."),
        (("-q", "--quiet"), "quiet", "Nothing but errors on stderr."),
    ):
        function = click.option(
            *names, is_flag=True, expose_value=False, callback=_set_output(attribute), help=text
        )(function)
    return function


def json_option(function):
    """Add ``--json``."""
    return json_flag("One JSON object, on the last line of stdout; an error is one, too.")(function)


def json_flag(text):
    """``--json`` with a help text of its own."""

    def callback(ctx, param, value):
        output_of(ctx).as_json = output_of(ctx).as_json or value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=callback, help=text
    )


def options(*decorators):
    """Join option decorators into one; they appear in the order given."""

    def apply(function):
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


class ModelPath(click.Path):
    """Path of a target; ``demo`` is that of the embedded one."""

    def convert(self, value, param, ctx):
        from cudflash.demo import resolve_model

        return resolve_model(super().convert(value, param, ctx))


class DraftPath(click.Path):
    """Path of a draft; ``demo``, ``demo:dflash`` and ``demo:dflash2`` are the embedded ones."""

    def convert(self, value, param, ctx):
        from cudflash.demo import resolve_draft

        return resolve_draft(super().convert(value, param, ctx))


model_option = click.option(
    "-m", "--model", type=ModelPath(), metavar="FILE",
    help="GGUF file of the model; 'demo' is the small one that is part of cudflash.",
)  # fmt: skip

device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda|cuda:N",
    help="Device; cuda fails where there is none, auto says what it chose and why.",
)

device_options = options(
    device_option,
    click.option(
        "-t", "--threads", type=int, help="CPU threads; default and -1: the physical cores."
    ),
    click.option(
        "--no-graph",
        is_flag=True,
        help="On a GPU, start every kernel by itself instead of replaying graphs; same bits.",
    ),
)

cache_options = options(
    click.option(
        "-c",
        "--ctx-size",
        "--n-ctx",
        "n_ctx",
        type=int,
        metavar="N",
        help="Context in tokens, prompt and answer together; 0: the model's own. Default: 4096, or "
        "the model's own if that is shorter.",
    ),
    click.option(
        "-ctk",
        "--kv-type",
        "--cache-type-k",
        "kv_type",
        metavar="TYPE",
        help="Type of keys and values in the cache. Default: f16.",
    ),
)

prompt_options = options(
    click.option("-p", "--prompt", metavar="TEXT", help="The prompt."),
    click.option(
        "-f",
        "--file",
        "prompt_file",
        type=click.Path(),
        metavar="FILE",
        help="Read the prompt from a file, '-' for standard input; one last newline is dropped.",
    ),
    click.option(
        "-e", "--escape", is_flag=True, help=r"Read \n, \t, \\ and \" in the prompt as escapes."
    ),
)


def one_model(option, words):
    """The model file, given by ``-m`` or as the first free argument.

    Returns
    -------
    (path, rest of the words)
    """
    words = list(words)
    if option is None and words and words[0] != "-":
        from cudflash.demo import resolve_model

        option = resolve_model(words.pop(0))
    if option is None:
        raise UsageError("no model was given; pass a GGUF file with --model, or 'demo'")
    return option, words


def read_prompt(prompt, prompt_file, words, escape=False):
    """The prompt's text from ``-p``, ``-f FILE``, ``-`` or a pipe.

    Raises
    ------
    UsageError
        For none, more than one, an unreadable file, or bytes that are not UTF-8.
    """
    stray = [word for word in words if word != "-"]
    if stray:
        raise UsageError(f"the argument {stray[0]!r} was not expected; give a prompt with --prompt")
    sources = [prompt is not None, prompt_file is not None, bool(words)]
    if sum(sources) > 1:
        raise UsageError("the prompt was given twice; pass one of --prompt, --file and '-'")
    if prompt is None:
        prompt = file_text(prompt_file) if prompt_file not in (None, "-") else _stdin_text(sources)
    prompt = check_text("--prompt", prompt)
    return unescape(prompt) if escape else prompt


def check_text(option, text):
    """Return the text of an option; None stays.

    Raises
    ------
    UsageError
        If its bytes were not UTF-8.
    """
    try:
        (text or "").encode()
    except UnicodeEncodeError as err:
        raise UsageError(
            f"{option}: character {err.start} is not UTF-8, expected UTF-8 text; check the "
            "encoding of the terminal"
        ) from None
    return text


def unescape(text):
    r"""Replace ``\n``, ``\t``, ``\r``, ``\0``, ``\\`` and quotes; other backslashes stay."""
    meaning = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}
    out, rest = [], iter(text)
    for char in rest:
        if char == "\\":
            following = next(rest, "")
            out.append(meaning.get(following, "\\" + following))
        else:
            out.append(char)
    return "".join(out)


def _stdin_text(sources):
    if sys.stdin is None or (not any(sources) and is_terminal(sys.stdin)):
        raise UsageError("no prompt was given; pass --prompt TEXT, --file FILE, or text on stdin")
    return _decode(sys.stdin.buffer.read(), "standard input")


def file_text(path):
    """Text of a file, without one last newline.

    Raises
    ------
    UsageError
        If it cannot be read, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            return _decode(file.read(), path)
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or err
        raise UsageError(f"{path}: cannot be read ({reason}); check the path") from None


def _decode(data, where):
    try:
        text = data.decode()
    except UnicodeDecodeError as err:
        raise UsageError(
            f"{where}: byte {err.start} is not UTF-8, expected UTF-8 text; convert it first"
        ) from None
    return text.removesuffix("\n")


def thread_count(threads):
    """``-t``: None for the default, which -1 asks for too.

    Raises
    ------
    UsageError
        For anything below 1 but -1.
    """
    if threads is None or threads == -1:
        return None
    if threads < 1:
        raise UsageError(f"--threads is {threads}, expected at least 1, or -1 for the default")
    return threads


def check_writable(path, what):
    """Refuse a file that could not be written after the work; what it holds stays.

    Parameters
    ----------
    path : str or path-like
    what : str
        What it is for, such as "the receipt".

    Raises
    ------
    UsageError
    """
    real = os.path.realpath(path)
    new = not os.path.exists(real)
    if new or os.path.isfile(real) or os.path.isdir(real):
        try:  # permissions alone would not tell: nothing can be made in /proc, even by root
            with open(real, "ab"):
                pass
            if new:
                os.unlink(real)
        except (OSError, ValueError) as err:
            raise UsageError(unwritable(path, what, err)) from None
    elif not os.access(real, os.W_OK):  # a pipe or a device: its reader would see it opened
        raise UsageError(f"{path}: {what} cannot be written (no permission); choose another path")


def unwritable(path, what, err):
    """The sentence about a file that cannot be written."""
    reason = getattr(err, "strerror", None) or err
    return f"{path}: {what} cannot be written ({reason}); choose another path"


def file_name(path):
    """Last part of a path, for lines that people read."""
    return visible(os.path.basename(os.fspath(path)))
