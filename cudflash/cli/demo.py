"""``cudflash demo``: the embedded pair continues a text, plain and drafted, and proves it the same."""

from contextlib import nullcontext
from statistics import median

import click

from cudflash.cli.common import Command, check_text, json_option, options, output_of, output_options
from cudflash.cli.draft_options import settle_speculation
from cudflash.cli.generate import INTERRUPTED, save_receipt, take_receipt
from cudflash.cli.output import visible
from cudflash.cli.running import engine_options, open_engine, stream_answer, take_engine
from cudflash.cli.watching import FAILED, snapshot_options, take_watch
from cudflash.errors import UsageError

DIFFERENT = 1
FEWEST_TOKENS = 3  # with fewer nothing is drafted
TOKENS = 200
VERIFY_LENGTH = 3  # the quickest one for this pair on a CPU, see docs/SPEED.md
REPEATS = 3  # timed pairs of answers, after the one that is shown

demo_options = options(
    click.option("-p", "--prompt", metavar="TEXT", help="Another text to continue."),
    click.option(
        "-n", "--max-tokens", "--n-predict", "n_tokens", type=int, default=TOKENS,
        show_default=True, metavar="N", help="Tokens of each answer.",
    ),
    click.option(
        "--verify-length", "--draft-max", "verify_length", type=int, default=VERIFY_LENGTH,
        show_default=True, metavar="N",
        help="Tokens drafted per round: 3, 7 or 15; others are rounded down.",
    ),
    click.option(
        "--temp", "--temperature", "temperature", type=float, default=0.0, show_default=True,
        help="Temperature; the seed is fixed.",
    ),
    click.option(
        "--repeats", type=int, default=REPEATS, show_default=True, metavar="N",
        help="Answers of each kind that are timed, in turns.",
    ),
    click.option(
        "--receipt", "receipt_file", type=click.Path(), metavar="FILE",
        help="Write how the answer was made, as JSON.",
    ),
    click.option(
        "--monitor/--no-monitor", default=None,
        help="Watch the answer being made on a screen of its own. Default: where stdout and stderr "
        "are a terminal.",
    ),
    click.option(
        "--events", "events_file", type=click.Path(), metavar="FILE",
        help="Record what happens, for 'cudflash monitor'.",
    ),
    snapshot_options,
)  # fmt: skip


@click.command("demo", cls=Command)
@demo_options
@engine_options
@json_option
@output_options
@click.pass_context
def command(ctx, prompt, n_tokens, verify_length, temperature, repeats, as_json, **params):
    """Show drafting, and the proof that it changes nothing, on a small model that comes with cudflash.

    The model continues a text that it was not trained on, once with its draft and once without, and
    the tokens are compared. Stdout gets the answer, stderr what was accepted, how fast both were on
    this machine, and the proof. The exit code is 1 if any token differs.
    """
    output = output_of(ctx)
    if n_tokens < FEWEST_TOKENS:
        raise UsageError(f"--max-tokens is {n_tokens}, expected at least {FEWEST_TOKENS}")
    if repeats < 1:
        raise UsageError(f"--repeats is {repeats}, expected at least 1")
    receipt_file = take_receipt(params)
    if params["monitor"] is None:
        params["monitor"] = not as_json and _may_monitor(output)
    watch = take_watch(output, params)
    shown = _Demo(output, n_tokens, temperature, verify_length)
    shown.open(take_engine(params), check_text("--prompt", prompt))
    result, interrupted = shown.show(watch, stream=not as_json)
    if watch is not None:
        watch.close()
    if interrupted:
        output.note("interrupted: nothing was compared")
        if as_json:
            output.json({"proof": None, "answer": result.to_dict()})
        ctx.exit(INTERRUPTED)
    found = shown.compare(result, repeats)
    if found is None:
        output.note("interrupted: not everything was compared")
        ctx.exit(INTERRUPTED)
    if as_json:
        output.json(found)
    shown.tell(result, found)
    saved = save_receipt(output, receipt_file, result)
    if found["proof"]["differ"]:
        ctx.exit(DIFFERENT)
    if not saved or (watch is not None and watch.failed):
        ctx.exit(FAILED)


def _may_monitor(output):
    import sys

    from cudflash.cli.output import is_terminal

    return is_terminal(sys.stdout) and output.rewrites and not output.quiet


class _Unwatched:
    """In place of a watch: what the shown answer has told is not told again."""

    tells = True

    def answer(self):
        return nullcontext()

    def see(self, event):
        pass


class _Demo:
    """One run of the command."""

    def __init__(self, output, n_tokens, temperature, verify_length):
        from cudflash.sampling import SamplingConfig

        self._output, self._n_tokens, self._length = output, n_tokens, verify_length
        self._request = {
            "max_tokens": n_tokens, "ignore_eos": True, "seed": 1,
            "sampling": SamplingConfig(temperature=temperature),
        }  # fmt: skip

    def open(self, arguments, prompt):
        """Load the pair."""
        from cudflash.cli.kernels import CompileNotice
        from cudflash.demo import demo_files, demo_prompt

        if arguments.get("draft", "") is None:
            raise UsageError("a demo of drafting needs its draft; leave --no-draft out")
        self._prompt = demo_prompt() if prompt is None else prompt
        with CompileNotice(self._output):
            self._engine = open_engine(self._output, demo_files()[0], arguments)
        wanted = {"speculative": "on", "verify_length": self._length}
        self._drafted = settle_speculation(self._output, self._engine, wanted)

    def _answer(self, options, stream=False, watch=None):
        session = self._engine.session()
        try:
            generation = session.generate(self._prompt, **self._request, **options)
            return stream_answer(self._output, generation, stream, watch)
        finally:
            session.close()  # the next one finds its passes recorded

    def show(self, watch, stream):
        """The drafted answer, as it comes; (Result, whether Ctrl-C was pressed)."""
        from cudflash.cli.kernels import CompileNotice

        with CompileNotice(self._output):
            return self._answer(self._drafted, stream, watch)

    def compare(self, shown, repeats):
        """Answer again in turns, plain and drafted; None after a Ctrl-C.

        The answer that was shown, and the first plain one, are compared and not timed: kernels may
        have been compiled in them.
        """
        off = {"speculative": "off"}
        plain, interrupted = self._answer(off, watch=_Unwatched())
        if interrupted:
            return None
        answers, times = [shown], {"plain": [], "drafted": []}
        for repeat in range(repeats):
            turns = [("plain", off), ("drafted", self._drafted)]
            for kind, how in turns if repeat % 2 else turns[::-1]:
                self._output.progress(f"answer {repeat + 1} of {repeats}, {kind}")
                result, interrupted = self._answer(how, watch=_Unwatched())
                if interrupted:
                    return None
                answers.append(result)
                times[kind].append(result.stats["decode_tps"])
        self._output.clear_progress()
        return {
            "proof": _proof(plain, answers), "speed": _speed(times), "prompt": self._prompt,
            "answer": shown.to_dict(),
        }  # fmt: skip

    def tell(self, result, found):
        """What was accepted, the receipt, both speeds, the proof."""
        note, stats = self._output.note, result.stats["speculative"]
        note(
            f"draft: {stats['accepted']} of {stats['drafted']} proposals accepted in "
            f"{stats['draft_rounds']} rounds; {stats['tokens_per_pass']:.2f} tokens per target pass "
            f"(verify length {stats['verify_length']})"
        )
        note(visible("receipt: " + _receipt_phrase(result.receipt)))
        note(_speed_phrase(found["speed"]))
        proof = found["proof"]
        equal = not proof["differ"]
        text = (
            f"drafted output {'equals' if equal else 'DIFFERS FROM'} plain output: "
            f"{proof['tokens']} tokens, {proof['differ']} differ"
        )
        if equal:
            note(text)
        else:
            self._output.error(text + "; please report this")


def _proof(plain, answers):
    """Count the tokens at which any answer differs from the plain one."""
    differ = 0
    for answer in answers:
        pairs = zip(plain.tokens, answer.tokens)
        differ += sum(a != b for a, b in pairs) + abs(len(plain.tokens) - len(answer.tokens))
    return {"tokens": len(plain.tokens), "answers": len(answers), "differ": differ}


def _speed(times):
    found = {f"{kind}_tps": [t for t in of if t] for kind, of in times.items()}
    medians = {kind: median(of) if of else None for kind, of in found.items()}
    both = all(medians.values())
    ratio = medians["drafted_tps"] / medians["plain_tps"] if both else None
    return {**found, "median": medians, "ratio": ratio}


def _speed_phrase(speed):
    if speed["ratio"] is None:
        return "speed: too few tokens to time"
    plain, drafted = (speed["median"][f"{kind}_tps"] for kind in ("plain", "drafted"))
    text = (
        f"speed, median of {len(speed['plain_tps'])} in turns: {drafted:.0f} tokens/s drafted, "
        f"{plain:.0f} plain, {speed['ratio']:.2f} times"
    )
    if speed["ratio"] < 1:
        text += (
            "; on this machine drafting for so small a model does not pay, and --speculative auto, "
            "the default of generate, finds that out by timing it and decodes plainly"
        )
    return text


def _receipt_phrase(receipt):
    draft = receipt["draft"]
    return (
        f"target {receipt['target']['sha256'][:12]}, draft {draft['sha256'][:12]} ({draft['kind']}), "
        f"taps {draft['taps']['value']}, window {draft['window']['value']}, sink "
        f"{draft['sink']['value']}, {receipt['device']['kind']}, activations "
        f"{receipt['activations']}, seed {receipt['seed']}, "
        f"{len(receipt['speculative']['trace'])} rounds traced"
    )
