"""``cudflash identity``: what makes a pair, in one file that ``--identity`` checks against."""

import click

from cudflash.cli.common import (
    Command,
    DraftPath,
    ModelPath,
    cache_options,
    file_name,
    json_option,
    output_of,
)
from cudflash.cli.common import output_options as output_flags
from cudflash.cli.draft_options import conditioning_options, find_draft
from cudflash.errors import UsageError


@click.command("identity", cls=Command)
@click.argument("target", type=ModelPath(), metavar="TARGET")
@click.argument("draft", type=DraftPath(), metavar="[DRAFT]", required=False)
@click.option(
    "-o", "--out", "out", type=click.Path(), metavar="FILE", help="Write it to FILE as JSON."
)
@conditioning_options
@cache_options
@json_option
@output_flags
@click.pass_context
def command(ctx, target, draft, out, draft_window, draft_sink, draft_activations, activations,
            n_ctx, kv_type, as_json):  # fmt: skip
    """Stamp a model and its draft: digests, taps, block, context geometry, numerics.

    With --identity FILE, generate, chat, verify, plan and inspect refuse any other pair. Both files
    are read whole. Without DRAFT the one beside the model is taken.
    """
    from cudflash import defaults
    from cudflash.identity import pair_identity, write_identity
    from cudflash.pair import open_pair
    from cudflash.plan import choose_context

    output = output_of(ctx)
    if out is None and not as_json:
        raise UsageError("nothing to do with the identity; pass -o FILE or --json")
    arguments, explanation = find_draft(target, {} if draft is None else {"draft": draft})
    if arguments["draft"] is None:
        raise UsageError(f"{target}: an identity needs a draft; {explanation}")
    pair = open_pair(
        target, arguments["draft"], draft_window=draft_window, draft_sink=draft_sink,
        draft_activations=draft_activations,
    )  # fmt: skip
    n_ctx = choose_context(n_ctx or None, pair.target.config.context_length)
    activations = defaults.ACTIVATIONS if activations is None else activations
    identity = pair_identity(
        pair, n_ctx, activations, progress=lambda name: output.progress(f"reading {file_name(name)}")
    )
    output.clear_progress()
    if out is not None:
        write_identity(out, identity)
        output.note(f"identity of {file_name(target)} and {file_name(arguments['draft'])}: {out}")
    if as_json:
        output.json(identity)
