"""``cudflash plan``: bytes a model will take, per context length, before anything is loaded."""

import re

import click

from cudflash.cli.common import (
    Command,
    DraftPath,
    cache_options,
    device_option,
    json_option,
    model_option,
    one_model,
    output_of,
    output_options,
)
from cudflash.cli.draft_options import (
    DRAFT_SETTINGS,
    check_pair,
    conditioning_options,
    drafter_option,
    find_draft,
    identity_option,
    take_drafter,
)
from cudflash.cli.output import human_bytes
from cudflash.errors import OutOfMemoryError, UsageError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_KINDS = (
    ("weights", "weights"),
    ("embedding", "embedding"),
    ("norms", "norms and biases"),
    ("rope", "RoPE tables"),
    ("kv", "KV cache"),
    ("state", "recurrent state"),
    ("scratch", "scratch"),
    ("workspace", "scratch of a GPU's ops"),
    ("logits", "logits"),
    ("io", "ids and positions"),
    ("taps", "captured layers"),
)


@click.command("plan", cls=Command)
@click.argument("words", nargs=-1, metavar="FILE")
@model_option
@cache_options
@device_option
@click.option(
    "-md", "--draft", "--model-draft", "draft", type=DraftPath(), metavar="FILE",
    help="Count this draft, too; 'none' for none. Default: the one that generate would use.",
)  # fmt: skip
@click.option("--no-draft", is_flag=True, help="Count no draft.")
@drafter_option
@conditioning_options
@identity_option
@click.option(
    "--memory",
    metavar="SIZE",
    help="Find the largest context that fits: 24G, 8GiB, 500M or bytes (1024-based).",
)
@json_option
@output_options
@click.pass_context
def command(ctx, words, model, n_ctx, memory, as_json, draft, no_draft, drafter, identity,
            **settings):  # fmt: skip
    """Show how much memory a model takes, before loading it.

    Counts what loading and one conversation allocate, those of the draft included. With --memory,
    the exit code is 5 if the context asked for with --ctx-size (or, without it, any context at all)
    does not fit.
    """
    model, stray = one_model(model, words)
    if stray:
        raise UsageError(f"the argument {stray[0]!r} was not expected; plan takes one file")
    budget = None if memory is None else parse_size(memory)
    given = {name: value for name, value in settings.items() if value is not None}
    given |= _draft(draft, no_draft)
    if drafter is not None:
        given = take_drafter(drafter, given if identity is None else {**given, "identity": identity})
    given, explanation = find_draft(model, given)
    if drafter is not None:
        explanation = "drafts with its own MTP block"
    if identity is not None:
        names = ("draft", *DRAFT_SETTINGS, "activations")
        check_pair(identity, model, n_ctx=n_ctx,
                   **{name: given[name] for name in names if name in given})  # fmt: skip
    planner = Planner(model, given)
    plan = planner.plan(planner.context_length if n_ctx == 0 else n_ctx)
    found = {"path": model, "context_length": planner.context_length, **plan.to_dict()}
    found["draft_path"], found["draft_choice"] = given["draft"], explanation
    if budget is not None:
        found["memory"] = budget
        found["largest_n_ctx"] = planner.largest(budget)
    output = output_of(ctx)
    if as_json:
        output.json(found)
    else:
        show(output, found)
    if budget is not None:
        check_fit(found, n_ctx)


def _draft(draft, no_draft):
    """Argument of ``load``; missing where the user said nothing, so that one is looked for."""
    if no_draft and draft not in (None, "none"):
        raise UsageError("--draft and --no-draft contradict each other; pass one of them")
    if no_draft or draft == "none":
        return {"draft": None}
    return {} if draft is None else {"draft": draft}


class Planner:
    """Plans of one file for different contexts."""

    def __init__(self, path, settings):
        from cudflash.loader.bind import bind_target
        from cudflash.loader.gguf import open_gguf

        self._path, self._settings = path, settings
        self.context_length = bind_target(open_gguf(path)).config.context_length

    def plan(self, n_ctx):
        """Plan for a context; None for the default one."""
        from cudflash.plan import plan

        return plan(self._path, n_ctx=n_ctx, **self._settings)

    def largest(self, budget):
        """Largest context up to the model's own whose plan fits, 0 if none does.

        The total grows with the context, so halving finds it.
        """
        if self.plan(self.context_length).total <= budget:
            return self.context_length
        fits, too_large = 0, self.context_length
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.plan(middle).total <= budget:
                fits = middle
            else:
                too_large = middle
        return fits


def parse_size(text):
    """Bytes of ``24G``, ``8GiB``, ``500MB`` or ``123``; units are powers of 1024.

    Raises
    ------
    UsageError
        For anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = match and int(float(match[1]) * _UNITS[match[2].upper()])
    if not size:
        raise UsageError(f"--memory is {text!r}, expected a size such as 24G, 500M or bytes")
    return size


def check_fit(found, n_ctx):
    """Raise OutOfMemoryError if what was asked for exceeds ``--memory``."""
    budget, largest = found["memory"], found["largest_n_ctx"]
    if largest == 0:
        raise OutOfMemoryError(
            f"{found['path']}: no context fits into {human_bytes(budget)}, weights and scratch "
            f"alone take {human_bytes(found['total'] - found['kv'])}; use a smaller file"
        )
    if n_ctx is not None and found["total"] > budget:
        raise OutOfMemoryError(
            f"{found['path']}: a context of {found['n_ctx']} takes {human_bytes(found['total'])}, "
            f"expected at most {human_bytes(budget)}; the largest that fits is {largest}"
        )


def show(output, found):
    """Write a plan for people."""
    rows = [(name, human_bytes(found[kind])) for kind, name in _KINDS]
    names = dict(_KINDS, kv="context rows")
    rows += [(f"draft: {names[kind]}", human_bytes(n)) for kind, n in found["draft"].items() if n]
    title = f"context {found['n_ctx']}, KV {found['kv_type']}, activations {found['activations']}"
    rows.append(("total", human_bytes(found["total"])))
    output.line(title)
    if found["draft_path"] is not None:
        output.line(f"draft {found['draft_path']}: {found['draft_choice']}")
    output.table(rows, right=(1,))
    if found["mapped"]:
        output.line(f"and {human_bytes(found['mapped'])} of the embedding, read from the file")
    output.line()
    sizes = [(human_bytes(r["kv_bytes"]), human_bytes(r["total_bytes"])) for r in found["contexts"]]
    table = [(row["n_ctx"], *size, _fit(found, row)) for row, size in zip(found["contexts"], sizes)]
    header = ("context", "KV cache", "total", "fits" if "memory" in found else "")
    output.table(table, header=header, right=(0, 1, 2))
    if "memory" in found:
        output.line()
        output.line(f"largest context in {human_bytes(found['memory'])}: {found['largest_n_ctx']}")


def _fit(found, row):
    if "memory" not in found:
        return "this plan" if row["n_ctx"] == found["n_ctx"] else ""
    return "yes" if row["total_bytes"] <= found["memory"] else "no"
