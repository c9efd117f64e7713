"""``cudflash verify``: plain answers against drafted ones, token by token."""

import click

from cudflash.cli.common import (
    Command,
    DraftPath,
    ModelPath,
    check_text,
    file_text,
    json_option,
    output_of,
    output_options,
)
from cudflash.cli.draft_options import drafter_option, with_depth
from cudflash.cli.interrupts import raise_kept
from cudflash.cli.running import engine_options, open_engine, take_engine
from cudflash.errors import UsageError

DIFFERENT = 1
MTP_K = 15  # a drafter of fewer tokens would leave the longest blocks unfilled
FEWEST_TOKENS = 3  # the prompt's row gives one, a round its own: with fewer nothing is drafted
# natural text of several kinds: synthetic prompts flatter a draft
PROMPTS = (
    "def median(values):\n    \"\"\"Return the median of a list of numbers.\"\"\"\n",
    "The old lighthouse keeper closed the door behind him and looked out at the sea, where",
    "Question: A train travels 240 km in 3 hours and then 90 km in 1.5 hours. What is its average "
    "speed?\nAnswer:",
)


@click.command("verify", cls=Command)
@click.argument("target", type=ModelPath(), metavar="TARGET")
@click.argument("beside", type=DraftPath(), metavar="[DRAFT]", required=False)
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt.")
@click.option(
    "-f",
    "--file",
    "files",
    type=click.Path(),
    multiple=True,
    metavar="FILE",
    help="Prompts, one per line that is not empty. Default: three built-in texts.",
)
@click.option(
    "-n", "--max-tokens", "n_tokens", type=int, default=64, show_default=True, metavar="N",
    help="Tokens per answer.",
)  # fmt: skip
@click.option("--temp", "temperature", type=float, default=0.8, show_default=True,
              help="Temperature of the sampled checks.")  # fmt: skip
@click.option("-s", "--seed", type=int, default=20250813, show_default=True, help="Their seed.")
@click.option("--no-scripted", is_flag=True, help="Leave out the scripted drafters.")
@click.option(
    "--qualify",
    is_flag=True,
    help="The strict form: 256 greedy tokens, every row of logits, trace and counts.",
)
@click.option(
    "--floor", type=float, default=0.0, show_default=True, metavar="SHARE",
    help="With --qualify: least share of accepted proposals.",
)  # fmt: skip
@drafter_option
@engine_options
@json_option
@output_options
@click.pass_context
def command(ctx, target, beside, prompts, files, n_tokens, temperature, seed, no_scripted, qualify,
            floor, as_json, **params):  # fmt: skip
    """Prove on this machine that drafting changes no token of an answer.

    Compares plain decoding with drafted decoding for every verify length, at temperature 0 and at
    a seeded temperature; the ratio rule by replay and by the distribution of its tokens; the
    scripted drafters; and sessions that have answered before against fresh ones. Without a draft
    only the last two are compared; --drafter mtp takes the model's own MTP block for one. The exit
    code is 0 if everything is equal, 1 otherwise.
    """
    output = output_of(ctx)
    if beside is not None:
        if params["draft"] is not None:
            raise UsageError("the draft was given twice; pass it as DRAFT or with --draft")
        params["draft"] = beside
    if n_tokens < FEWEST_TOKENS:
        raise UsageError(
            f"--max-tokens is {n_tokens}, expected at least {FEWEST_TOKENS}: shorter answers have "
            "no round that drafts, so they would prove nothing"
        )
    prompts = [check_text("--prompt", prompt) for prompt in prompts]
    texts = [*prompts, *(line for path in files for line in _lines(path))]
    if files and not texts:
        raise UsageError(f"{files[0]}: there is no prompt in it, expected one per line")
    engine = open_engine(output, target, with_depth(take_engine(params), MTP_K))
    report = _run(
        output, engine, texts or list(PROMPTS), qualify, floor, not no_scripted,
        {"max_tokens": n_tokens, "temperature": temperature, "seed": seed},
    )  # fmt: skip
    output.clear_progress()
    if as_json:
        output.json(report.to_dict())
    else:
        show(output, report)
    ctx.exit(0 if report.passed else DIFFERENT)


def _run(output, engine, prompts, qualify, floor, scripted, settings):
    from cudflash.verify import Verifier

    done = []

    def tell(check):
        raise_kept()
        done.append(check)
        output.progress(f"{len(done)} checks, {sum(not c.passed for c in done)} failed: {check.name}")

    verifier = Verifier(engine, progress=tell, **settings)
    if not qualify:
        return verifier.run(prompts, scripted)
    return verifier.qualify(prompts[0], floor)


def _lines(path):
    text = file_text(path).replace("\r\n", "\n").replace("\r", "\n")
    return [line for line in text.split("\n") if line.strip()]


def show(output, report):
    """Write a report for people: one line per kind of check, then what failed."""
    groups = {}
    for check in report.checks:
        groups.setdefault((check.name, check.drafter), []).append(check)
    rows = []
    for (name, drafter), checks in groups.items():
        failed = sum(not check.passed for check in checks)
        drafted = sum(check.drafted for check in checks)
        rate = f"{sum(c.accepted for c in checks) / drafted:.1%}" if drafted else ""
        rows.append((name, drafter, len(checks), rate, f"{failed} failed" if failed else "equal"))
    output.table(rows, header=("check", "drafter", "answers", "accepted", "result"), right=(2, 3))
    output.line()
    for check in report.checks:
        if not check.passed:
            output.line(_failure(check))
    for finding in report.findings:
        output.line(f"note: {finding['sentence']}")
    if report.seed_echo is not None:
        output.line(f"seed echo: row 0 of the block gave the anchor in {report.seed_echo:.0%}")
    failed = {check.name for check in report.checks if not check.passed}
    verdict = "NOT equal; please report this"
    if not failed - {"qualify-floor"}:
        verdict = "equal, but acceptance is below the floor" if failed else "everything is equal"
    output.line(f"{len(report.checks)} checks: {verdict}")


def _failure(check):
    where = f"{check.name}, prompt {check.prompt}, drafter {check.drafter}"
    where += f", verify length {check.verify_length}, temperature {check.temperature}"
    if check.first_difference is None:
        return f"{where}: {check.note or 'not equal'}"
    return (
        f"{where}: token {check.first_difference} is {check.drafted_id}, plain decoding has "
        f"{check.plain_id} (top-2 margin {check.margin}); lists {check.plain_sha256[:16]} and "
        f"{check.drafted_sha256[:16]}"
    )
