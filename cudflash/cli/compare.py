"""``cudflash compare``: two records of ``bench``, prompt by prompt."""

import click

from cudflash.cli.common import Command, json_option, output_of, output_options


@click.command("compare", cls=Command)
@click.argument("a", type=click.Path(), metavar="A")
@click.argument("b", type=click.Path(), metavar="B")
@click.option("--lane", metavar="NAME", help="Lane of A (and of B); 'plain', 'dflash2 k7', ...")
@click.option("--lane-b", metavar="NAME", help="Lane of B, where it is another one.")
@click.option(
    "--allow-confounded", is_flag=True,
    help="Show ratios, labelled so, where more than one variable differs.",
)  # fmt: skip
@json_option
@output_options
@click.pass_context
def command(ctx, a, b, lane, lane_b, allow_confounded, as_json):
    """Tell what one change did, from two records of 'cudflash bench --record'.

    Ratios are B over A, prompt by prompt, with bootstrap intervals. A comparison in which more than
    one declared variable differs is refused, because any of them may be the cause; so are records
    of different prompts, and a single prompt. A and B may be the same file with two lanes.
    """
    from cudflash.bench.record import read_record, reporting_on
    from cudflash.compare import choose_sides, compare

    output = output_of(ctx)
    one = read_record(a)
    other = one if a == b else read_record(b)
    with reporting_on(a, b):
        pairs = choose_sides(one, other, a, b, lane, lane_b)
        found = [compare(*pair, allow_confounded=allow_confounded) for pair in pairs]
        if as_json:
            output.json({"comparisons": found})
            return
        for comparison in found:
            show(output, comparison)


def show(output, comparison):
    """Write one comparison for people."""
    output.line(f"A: {comparison['a']}")
    output.line(f"B: {comparison['b']}")
    for name, (ours, theirs) in comparison["differs"].items():
        output.line(f"differs: {name}: {ours} -> {theirs}")
    if not comparison["differs"]:
        output.line("differs: nothing that was declared; what is left is noise")
    output.line()
    rows = [
        (
            cell["set"], cell["depth"], cell["stop"], cell["prompts"],
            _ratio(cell["speed"], cell["speed_interval"]),
            _ratio(cell["speedup"], cell["speedup_interval"]),
            _ratio(cell["length"], cell["length_interval"]),
            f"differ in {cell['outputs_differ']}" if cell["outputs_differ"] else "equal",
            cell["label"],
        )
        for cell in comparison["cells"]
    ]  # fmt: skip
    header = ("set", "depth", "stop", "prompts", "speed B/A", "speed-up B/A", "accept. length B/A",
              "outputs", "label")  # fmt: skip
    output.table(rows, header=header, right=(1, 3, 4, 5, 6))
    output.line()
    for note in comparison["notes"]:
        output.line(f"note: {note}")
    output.line(_VERDICTS[comparison["label"]])


def _ratio(value, bounds):
    if value is None:
        return "-"
    if bounds is None:
        return f"{value:.3f} (?)"
    return f"{value:.3f} ({bounds[0]:.3f}-{bounds[1]:.3f})"


_VERDICTS = {
    "measured": "measured: one thing differed; sets labelled so have an interval beside 1",
    "confounded": "CONFOUNDED: more than one thing differed, so none of them is shown to be a cause",
    "insufficient": "insufficient: every interval includes 1, or there are too few prompts",
}
