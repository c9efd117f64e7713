"""Options about drafts: which one, how it is conditioned, how an answer uses it.

Owns their spellings and what the user is told about the choice. Must not import a model.
"""

from pathlib import Path

import click

from cudflash import defaults
from cudflash.cli.common import DraftPath, file_name, options
from cudflash.errors import UsageError

DRAFT_SETTINGS = ("draft_window", "draft_sink", "draft_activations")  # of a draft's file

identity_option = click.option(
    "--identity",
    type=click.Path(),
    metavar="FILE",
    help="Refuse a pair that is not the one of FILE (see 'cudflash identity').",
)

# What memory and identity depend on beside the files, for commands that load nothing.
conditioning_options = options(
    *(click.option(name, type=int, metavar="N", help="As for generate.")
      for name in ("--draft-window", "--draft-sink")),
    *(click.option(name, metavar="TYPE", help="As for generate.")
      for name in ("--draft-activations", "--activations")),
)  # fmt: skip

draft_options = options(
    click.option(
        "-md",
        "--draft",
        "--model-draft",
        "draft",
        type=DraftPath(),
        metavar="FILE",
        help="Draft: a GGUF file or a directory with safetensors; 'none' for none; demo:dflash or "
        "demo:dflash2 with the model 'demo'. Default: the dflash-*.gguf beside the model that fits "
        "it.",
    ),
    click.option("--no-draft", is_flag=True, help="Run without a draft."),
    click.option(
        "--draft-window",
        type=int,
        metavar="N",
        help="Window of the draft's sliding layers instead of its file's; 0: none.",
    ),
    click.option(
        "--draft-sink",
        type=int,
        metavar="N",
        help="First rows that stay in a sliding draft's context. Default: 64.",
    ),
    click.option(
        "--draft-activations",
        metavar="TYPE",
        help="Precision of the draft's products: int8, or int8x2 (finer). "
        f"Default: {defaults.DRAFT_ACTIVATIONS}.",
    ),
    click.option(
        "--draft-short-block",
        is_flag=True,
        help="Run the draft with shorter blocks than it was trained with, as short as verified.",
    ),
    identity_option,
)

drafter_option = click.option(
    "--drafter",
    type=click.Choice(["mtp"]),
    help="mtp: draft with the MTP (NextN) block of the model's own file, without a draft.",
)

speculation_options = options(
    drafter_option,
    click.option(
        "--speculative",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Draft while it pays, always, or never. The answer is the same.",
    ),
    click.option(
        "--verify-length",
        "--draft-max",
        "--draft-n",
        "--spec-draft-n-max",
        "verify_length",
        type=int,
        metavar="N",
        help="Tokens drafted per round: 3, 7 or 15; others are rounded down. Default: 7. With "
        "--drafter mtp any from 1 to 15, default 3.",
    ),
    click.option(
        "--accept",
        type=click.Choice(["match", "ratio"]),
        default="match",
        show_default=True,
        help="match: the tokens of plain decoding with the same seed; ratio: their distribution.",
    ),
)

require_option = click.option(
    "--require-draft", is_flag=True, help="Fail (exit code 2) if nothing was drafted."
)


def take_draft(params):
    """Take the draft options out of a command's parameters: arguments of ``load``.

    ``"draft"`` is missing where the user said nothing about it: then one is looked for.

    Raises
    ------
    UsageError
        For options that contradict each other.
    """
    draft, no_draft = params.pop("draft"), params.pop("no_draft")
    if draft is not None and draft != "none" and no_draft:
        raise UsageError("--draft and --no-draft contradict each other; pass one of them")
    wanted = {
        "draft_window": params.pop("draft_window"),
        "draft_sink": params.pop("draft_sink"),
        "draft_activations": params.pop("draft_activations"),
        "identity": params.pop("identity"),
    }
    found = {name: value for name, value in wanted.items() if value is not None}
    if params.pop("draft_short_block"):
        found["draft_full_block"] = False
    if no_draft or draft is not None:
        found["draft"] = None if no_draft or draft == "none" else draft
    drafter = params.pop("drafter", None)  # only commands that answer have it
    return found if drafter is None else take_drafter(drafter, found)


def take_drafter(drafter, found):
    """Add a drafter that needs no file to what was found; refuse what is about files."""
    if "draft" in found:
        given = "--no-draft" if found["draft"] is None else f"the draft {found['draft']}"
        raise UsageError(
            f"--drafter {drafter} and {given} were both given; pass one of them: {drafter} drafts "
            "with a block of the model's own file"
        )
    for name, option in (
        ("draft_window", "--draft-window"), ("draft_sink", "--draft-sink"),
        ("draft_activations", "--draft-activations"), ("draft_full_block", "--draft-short-block"),
    ):  # fmt: skip
        if name in found:
            raise UsageError(
                f"{option} is about a draft file, and --drafter {drafter} has none; omit it"
            )
    if "identity" in found:
        raise UsageError(
            f"--identity {found['identity']} is that of a model and its draft file, and --drafter "
            f"{drafter} has no such file; omit one of them"
        )
    return {**found, "draft": None, "drafter": drafter}


def with_depth(arguments, length):
    """Add the verify length to the arguments of ``load`` where the drafter needs to know it.

    Raises
    ------
    UsageError
        For a length that the MTP block cannot draft.
    """
    if arguments.get("drafter") is None or length is None:
        return arguments
    from cudflash.spec.mtp import MAX_K

    if not 1 <= length <= MAX_K:
        raise UsageError(
            f"--verify-length is {length}, expected 1 to {MAX_K} with --drafter mtp: so many passes "
            "of the block are made per round"
        )
    return {**arguments, "mtp_k": length}


def find_draft(model, arguments):
    """Settle the draft of a model.

    Returns
    -------
    (arguments, explanation)
        Arguments with a ``"draft"``, and a sentence about its choice.
    """
    if "draft" in arguments:
        return arguments, "given" if arguments["draft"] else "switched off"
    from cudflash.demo import default_draft
    from cudflash.loader.draft_names import BESIDE

    own = default_draft(model)
    if own is not None:
        return {**arguments, "draft": own[0]}, own[1]
    # most models lie alone: that is seen without opening the file a second time
    if not any(Path(model).parent.glob(BESIDE)):
        return {**arguments, "draft": None}, f"no {BESIDE} beside {model}, so no draft is used"
    from cudflash.loader.pairing import find_draft_beside
    from cudflash.pair import open_pair

    found = find_draft_beside(model, open_pair(model).target.config)
    return {**arguments, "draft": found.path}, found.explanation


def draft_phrase(engine, explanation):
    """What the first line after loading says about the draft."""
    if engine.mtp_k is not None:
        plural = "" if engine.mtp_k == 1 else "s"
        return f"drafts with its own MTP block, {engine.mtp_k} token{plural} a round"
    config = engine.draft_config
    if config is None:
        return f"no draft: {explanation}"
    window = "no window" if config.window is None else f"window {config.window}"
    sink = f", sink {config.sink}" if config.sink else ""
    return (
        f"draft {file_name(engine.draft.path)} ({config.kind}, sha256 {engine.draft.digest()[:12]}, "
        f"{window} ({config.window_source}){sink}, taps {list(config.taps)}, block "
        f"{config.block_size}, activations {engine.draft.work.activations}): {explanation}"
    )


def take_speculation(params):
    """Take the per-answer options out of a command's parameters.

    Raises
    ------
    UsageError
        If a draft is required and switched off.
    """
    if params.get("require_draft") and params["speculative"] == "off":
        raise UsageError(
            "--require-draft was given, but drafting was switched off with --speculative off; omit "
            "one of them"
        )
    return {name: params.pop(name) for name in ("speculative", "verify_length", "accept")}


def settle_speculation(output, engine, wanted):
    """Round the verify length down to a legal one, and say so.

    Returns
    -------
    dict
        Arguments of ``Session.generate``.
    """
    from cudflash.spec.verify_length import covering, round_down

    if engine.mtp_k is not None:
        return {**wanted, "verify_length": covering(engine.mtp_k)}
    length = wanted["verify_length"]
    if length is None or engine.draft_config is None:
        return wanted
    taken, sentence = round_down(length, engine.draft_config.block_size)
    if sentence:
        output.note("note: " + sentence)
    return {**wanted, "verify_length": taken}


def check_required(result):
    """Raise unless the answer had proposals: ``--require-draft``.

    Raises
    ------
    UsageError
    """
    stats = result.stats["speculative"]
    if stats is not None and stats["used"]:
        return
    reason = "no drafter was in use" if stats is None else stats["reason"]
    raise UsageError(f"a draft was required, but no proposal was made in this answer: {reason}")


def draft_line(stats):
    """Counts of speculation for stderr; why there are none, where times have decided so.

    Parameters
    ----------
    stats : dict or None
        ``Result.stats["speculative"]``.
    """
    if stats is None:
        return ""
    if not stats["drafted"]:
        return _undrafted_phrase(stats["economy"])
    text = (
        f"; draft: {stats['accepted']} of {stats['drafted']} accepted, "
        f"{stats['tokens_per_pass']:.2f} tokens per pass"
    )
    if stats["estimated_speedup"] is not None:
        text += f", about {stats['estimated_speedup']:.2f} times plain decoding"
    return text + _economy_phrase(stats)


def _undrafted_phrase(economy):
    events = () if economy is None else economy["events"]
    paused = [event["reason"] for event in events if event["kind"] == "paused"]
    return f"; nothing drafted: {paused[-1].split(';')[0]}" if paused else ""


def _economy_phrase(stats):
    """What measured times have decided: how many rounds drafted, and why drafting is paused."""
    economy = stats["economy"]
    if economy is None or not economy["pauses"]:
        return ""
    last = [event for event in economy["events"] if event["kind"] == "paused"][-1]
    text = f"; drafted in {stats['draft_rounds']} of {stats['rounds']} rounds"
    if economy["state"] == "paused":
        text += f", then paused ({last['reason'].split(';')[0]})"
    return text


def check_pair(identity, model, *, draft=None, n_ctx=None, activations=None, draft_window=None,
               draft_sink=None, draft_activations=None):  # fmt: skip
    """Refuse a pair that is not the one of an identity file, for commands that load nothing."""
    from cudflash.identity import require_identity
    from cudflash.pair import open_pair
    from cudflash.plan import choose_context

    pair = open_pair(
        model, draft, draft_window=draft_window, draft_sink=draft_sink,
        draft_activations=draft_activations,
    )  # fmt: skip
    longest = pair.target.config.context_length
    n_ctx = longest if n_ctx == 0 else choose_context(n_ctx, longest)
    require_identity(identity, pair, n_ctx, activations or defaults.ACTIVATIONS)
