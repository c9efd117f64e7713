"""The command line: ``cudflash COMMAND``, a thin layer over the Python API.

Owns the exit code and how an error is shown. Commands live one per file and are imported when they
run.
"""

import os
import sys

import click

from cudflash.cli import process
from cudflash.cli.common import CONTEXT, LazyGroup, output_options
from cudflash.cli.interrupts import safe_interrupts
from cudflash.cli.output import Output, StreamClosed, silence
from cudflash.errors import CudflashError, OutOfMemoryError, UsageError

INTERRUPTED = 130  # 128 + SIGINT, as shells count
PIPE_CLOSED = 141  # 128 + SIGPIPE
COMPLETE = "_CUDFLASH_COMPLETE"  # how click asks for completions

COMMANDS = {
    "demo": ("cudflash.cli.demo", "Show drafting and its proof on the small embedded pair."),
    "generate": ("cudflash.cli.generate", "Continue a text, or answer one question (--chat)."),
    "chat": ("cudflash.cli.chat", "Talk with a model, line by line."),
    "verify": ("cudflash.cli.verify", "Prove that drafting changes no token of an answer."),
    "bench": ("cudflash.cli.bench", "Measure drafted against plain decoding, in turns."),
    "compare": ("cudflash.cli.compare", "Compare two records of 'bench', prompt by prompt."),
    "monitor": ("cudflash.cli.monitor", "Watch an answer that another process makes or made."),
    "identity": ("cudflash.cli.identity", "Stamp a model and its draft into a file."),
    "inspect": ("cudflash.cli.inspect", "Show what a GGUF file holds and whether it can be run."),
    "plan": ("cudflash.cli.plan", "Show how much memory a model takes, before loading it."),
    "tokenize": ("cudflash.cli.tokenize", "Turn text into token ids, or ids back into text."),
    "doctor": ("cudflash.cli.doctor", "Show which device would run a model, and what is wrong."),
}

EXIT_CODES = """\b
Exit codes:
  0    done
  1    an error while running; 'verify' or 'bench' found a difference
  2    wrong arguments
  3    a file that is damaged or not supported
  4    a draft that does not belong to the model
  5    not enough memory
  6    no usable device
  7    the context is too short
  8    non-finite numbers
  130  interrupted by Ctrl-C; what was produced so far has been written
  141  the reader of the output went away"""


def _version(ctx, param, value):
    if value and not ctx.resilient_parsing:
        from cudflash.cli.versions import version_line

        click.echo(version_line())
        ctx.exit()


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings=CONTEXT,
    no_args_is_help=False,
    epilog=EXIT_CODES,
)
@output_options
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the versions of cudflash and of what it runs on.",
)
def cli():
    """Run GGUF models. Only the answer goes to stdout; notes and errors go to stderr."""


def script(args=None):
    """:func:`main` as a process of its own: nothing but the exit comes after it."""
    process.begin()
    return process.end(main(args, last=True))


def main(args=None, *, last=False):
    """Run the command line.

    Parameters
    ----------
    args : list of str, optional
        ``sys.argv[1:]`` if absent.
    last : bool
        Whether the process ends afterwards (:func:`safe_interrupts`).

    Returns
    -------
    int
        The exit code.
    """
    output = Output()
    try:
        try:
            with safe_interrupts(last):
                return _run(args, output)
        except (StreamClosed, BrokenPipeError):
            silence(sys.stdout)
            silence(sys.stderr)
            return PIPE_CLOSED
    except KeyboardInterrupt:  # while an error was being shown
        return INTERRUPTED


def _run(args, output):
    args = sys.argv[1:] if args is None else list(args)
    if not args and COMPLETE not in os.environ:
        with click.Context(cli, info_name="cudflash", **CONTEXT) as ctx:
            click.echo(cli.get_help(ctx), err=True)
        return UsageError.exit_code
    try:
        code = cli.main(args, prog_name="cudflash", standalone_mode=False, obj=output)
        return code if isinstance(code, int) else 0
    except CudflashError as err:
        return _fail(output, type(err).__name__, str(err), err.exit_code)
    except click.ClickException as err:
        output.as_json = output.as_json or "--json" in args  # refused before it was understood
        return _fail(output, UsageError.__name__, _click_sentence(err), err.exit_code)
    except (click.Abort, KeyboardInterrupt):
        output.clear_progress()
        output.end_line()
        output.error("interrupted")
        output.json_failure("Interrupted", "interrupted", INTERRUPTED)
        return INTERRUPTED
    except MemoryError:
        sentence = "not enough memory; 'cudflash plan' shows what a model and a context take"
        return _fail(output, OutOfMemoryError.__name__, sentence, OutOfMemoryError.exit_code)
    except OSError as err:
        if isinstance(err, BrokenPipeError):
            raise
        return _fail_system(output, err)
    except SystemExit as err:
        return err.code if isinstance(err.code, int) else 1
    except StreamClosed:
        raise
    except Exception as err:  # noqa: BLE001  (ours, whatever it is; -v tells where)
        sentence = f"{type(err).__name__}: {' '.join(str(err).split())}"
        sentence = f"internal error, {sentence}; repeat with -v and report it"
        return _fail(output, "InternalError", sentence, 1)


def _fail(output, kind, sentence, code):
    if output.verbose:
        import traceback

        output.note(traceback.format_exc().rstrip())
    output.error(sentence)
    output.json_failure(kind, sentence, code)
    return code


def _fail_system(output, err):
    where = f"{err.filename}: " if err.filename else ""
    try:
        return _fail(output, "OSError", f"{where}{err.strerror or err}", 1)
    except OSError:  # it is stdout that cannot be written
        return 1
    finally:
        silence(sys.stdout)  # a full disk would be reported again at exit


def _click_sentence(err):
    sentence = err.format_message().rstrip()
    param = getattr(err, "param", None)
    if isinstance(param, click.Option) and not isinstance(err, click.MissingParameter):
        name = next((o for o in param.opts if o.startswith("--")), param.opts[0])
        sentence = f"{name}: {err.message}"
    if isinstance(err, click.UsageError) and err.ctx is not None and "--help" not in sentence:
        sentence = sentence.rstrip(".") + f" (see '{err.ctx.command_path} --help')"
    return " ".join(sentence.split())


