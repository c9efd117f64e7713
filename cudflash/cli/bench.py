"""``cudflash bench``: plain and drafted decoding in turns, with a record of how it was measured."""

import os
from pathlib import Path

import click

from cudflash.cli.common import (
    Command,
    check_text,
    file_text,
    json_option,
    options,
    output_of,
    output_options,
)
from cudflash.cli.draft_options import DRAFT_SETTINGS, find_draft
from cudflash.cli.interrupts import raise_kept
from cudflash.cli.running import engine_options, open_engine, take_engine
from cudflash.errors import CudflashError, UsageError

DIFFERENT, INTERRUPTED = 1, 130
FEWEST_TOKENS = 2  # the first comes from the prompt's pass: with one there is nothing to time
PICTURES = (".svg", ".png")
WORDS = "cudflash.words"  # key of the raw arguments in click's context


class BenchCommand(Command):
    """Keeps the words of the command line, for the record."""

    def parse_args(self, ctx, args):
        ctx.meta[WORDS] = [os.path.basename(a) if os.sep in a else a for a in map(str, args)]
        return super().parse_args(ctx, args)


def _listed(ctx, param, value):
    """``a,b`` and repeated options alike, as a list of words."""
    return [word for text in value for word in text.split(",") if word]


def _numbers(ctx, param, value):
    words = _listed(ctx, param, value)
    for word in words:
        if not word.isdecimal():
            raise click.BadParameter(f"{word!r} is no whole number of at least 0; give 512,2048")
    return [int(word) for word in dict.fromkeys(words)]


def _many(*names, callback=_listed, metavar="LIST", **settings):
    return click.option(*names, multiple=True, callback=callback, metavar=metavar, **settings)


prompt_options = options(
    _many("--sets", help="Prompt sets, with commas: code, maths, prose, chat, list, languages, "
          "recall, copy; all (these); synthetic (periodic, counting), labelled so. Default: all."),
    click.option("--prompts", "n_prompts", type=click.IntRange(1), metavar="N",
                 help="The first N prompts of each set only."),
    click.option("-f", "--file", "prompt_file", type=click.Path(), metavar="FILE",
                 help="Your own prompts, one per line, as one more set; alone without --sets."),
    click.option("--chat", is_flag=True, help="Send every prompt through the chat template."),
    _many("-d", "--depths", "--n-depth", "depths", callback=_numbers,
          help="Tokens of other text before each prompt, with commas. Default: 0."),
)  # fmt: skip

lane_options = options(
    _many("--drafters", help="Drafters, with commas: kinds of the drafts given (dflash, dflash2), "
          "mtp of the model's own file, or scripted ones: oracle, wrong, keep-K, random. Default: the "
          "drafts given."),
    _many("--k", "--verify-length", "--verify-lengths", "--draft-max", "lengths",
          callback=_numbers, help="Tokens drafted per round at most, with commas. Default: 7, mtp: 3."),
    _many("--accept", "rules", help="Acceptance rules, with commas: match, ratio. Default: match."),
    _many("--speculative", "modes", help="on: always draft; auto: while it pays, up to the verify "
          "length. Default: on."),
)  # fmt: skip

run_options = options(
    click.option("-n", "--max-tokens", "--n-gen", "n_tokens", type=int, default=128, metavar="N",
                 show_default=True, help="Tokens of an answer at most."),
    click.option("-r", "--repetitions", type=click.IntRange(1), default=2, show_default=True,
                 help="Answers per prompt and lane; two make A B B A."),
    click.option("--stop", "stops", type=click.Choice(["natural", "forced", "both"]),
                 default="natural", show_default=True,
                 help="Whether answers end at the model's end token."),
    click.option("--temp", "temperature", type=float, default=0.0, show_default=True),
    click.option("-s", "--seed", type=int, help="Of sampled answers."),
    click.option("--verify-trials", type=click.IntRange(0), default=7, show_default=True,
                 metavar="N", help="Turns of the verify-cost curve; 0 leaves it out."),
)  # fmt: skip

result_options = options(
    click.option("--record", type=click.Path(), metavar="FILE",
                 help="Write everything that was measured, as JSON."),
    click.option("--force", is_flag=True, help="Replace a record that is there."),
    click.option("--csv", "csv_file", type=click.Path(), metavar="FILE", help="Write the rows."),
    click.option("--plot", type=click.Path(), metavar="FILE",
                 help="Draw them: .svg or .png (needs the extra 'plot')."),
    click.option("-o", "--output", "form", type=click.Choice(["md", "csv"]), default="md",
                 show_default=True, help="What goes to stdout."),
    click.option("--from", "source", type=click.Path(), metavar="RECORD",
                 help="Show a record again; nothing is measured."),
)  # fmt: skip


@click.command("bench", cls=BenchCommand)
@click.argument("files", type=click.Path(), nargs=-1, metavar="TARGET [DRAFT]...")
@prompt_options
@lane_options
@run_options
@result_options
@engine_options
@json_option
@output_options
@click.pass_context
def command(ctx, files, source, record, force, csv_file, plot, form, as_json, **params):
    """Measure plain against drafted decoding on this machine, and check that they agree.

    Every prompt is answered by every lane, in turns (A B B A); nothing of the warm-up counts. Each
    pair of answers is compared: a difference ends with exit code 1. Natural text and synthetic
    text are kept apart, and there is no single number over all texts. docs/MEASURING.md says what
    each figure may be used for.
    """
    output = output_of(ctx)
    outputs = {"csv": csv_file, "plot": plot}
    _check_outputs(outputs)
    if source is not None:
        if files or record:
            raise UsageError("--from shows a record again; pass no model and no --record with it")
        _refuse_others(ctx, params)
        from cudflash.bench.record import read_record, reporting_on

        made = read_record(source)
        with reporting_on(source):
            _show(output, made, form, as_json, outputs)
        ctx.exit(DIFFERENT if made["differences"] else 0)
    from cudflash.bench.record import RecordFile

    work = _prepare(output, files, params)
    place = None if record is None else RecordFile(record, force)
    made, interrupted = _measure(output, ctx, work, place)
    output.clear_progress()
    _show(output, made, form, as_json, outputs)
    if interrupted:
        output.error(f"interrupted after {len(made['runs'])} runs; what was measured is shown"
                     + (f" and kept in {record}" if place and made["runs"] else ""))  # fmt: skip
        ctx.exit(INTERRUPTED)
    if made["differences"]:
        output.error(f"{len(made['differences'])} answers differ from what they must equal; see "
                     "the notes, and report it")  # fmt: skip
        ctx.exit(DIFFERENT)


def _refuse_others(ctx, params):
    """Raise UsageError for an option about measuring, where nothing is measured."""
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name)
        if option.name in params and source is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(
                f"--from shows a record again, and {option.opts[0]} is about measuring; omit it"
            )


def _check_outputs(outputs):
    """Refuse what could not be written after the work."""
    for path in filter(None, outputs.values()):
        folder = Path(path).resolve().parent
        if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError(f"{path}: cannot be written; choose another place")
    if outputs["plot"] is not None:
        from cudflash.bench.plot import require_matplotlib

        if Path(outputs["plot"]).suffix.lower() not in PICTURES:
            raise UsageError(f"{outputs['plot']}: expected a name that ends in .svg or .png")
        require_matplotlib()


class _Work:
    """What is to be measured, settled before anything is loaded."""

    def __init__(self, model, arguments, drafts, groups, sets, items, settings, trials):
        self.model, self.arguments, self.drafts, self.groups = model, arguments, drafts, groups
        self.sets, self.items, self.settings, self.trials = sets, items, settings, trials

    @property
    def n_runs(self):
        """Answers in all, the plain ones included."""
        lanes = sum(1 + len(lanes) for lanes in self.groups.values())
        settings = self.settings
        return lanes * len(self.items) * settings.repetitions * len(settings.stops)


def _prepare(output, files, params):
    from cudflash.bench.lanes import choose_lanes
    from cudflash.bench.prompts import check_context, choose_sets, needed_context, own_set

    n_tokens = params["n_tokens"]
    if n_tokens < FEWEST_TOKENS:
        raise UsageError(
            f"--max-tokens is {n_tokens}, expected at least {FEWEST_TOKENS}: the first token comes "
            "from the prompt's pass, so a shorter answer has nothing to time"
        )
    settings = _settings(params)
    arguments = take_engine(params)
    model, paths, arguments = _files(files, arguments)
    drafts, pair = _open_drafts(model, paths, arguments)
    blocks = {kind: config.block_size for kind, (_, config) in drafts.items()}
    groups = choose_lanes(
        params["drafters"], list(drafts), params["lengths"], params["rules"] or ["match"], blocks,
        params["modes"] or ["on"], getattr(pair.target.weights, "mtp", None) is not None,
    )  # fmt: skip
    sets = []
    if params["prompt_file"] is None or params["sets"]:
        sets += choose_sets(params["sets"])
    if params["prompt_file"] is not None:
        sets.append(own_set(_lines(params["prompt_file"]), os.path.basename(params["prompt_file"])))
    prompts = _prompts(pair, params["chat"])
    items = [
        item
        for depth in params["depths"] or [0]
        for prompt_set in sets
        for item in prompts.items(prompt_set, depth, params["n_prompts"])
    ]
    n_ctx = arguments.get("n_ctx")
    if n_ctx is None:
        arguments["n_ctx"] = needed_context(items, n_tokens)
    else:
        check_context(items, n_tokens, n_ctx or pair.target.config.context_length)
    return _Work(model, arguments, drafts, groups, sets, items, settings, params["verify_trials"])


def _settings(params):
    from cudflash.bench.runner import DEFAULT_SEED, STOPS, Settings
    from cudflash.sampling import SamplingConfig

    stops, seed = params["stops"], params["seed"]
    return Settings(
        n_tokens=params["n_tokens"], repetitions=params["repetitions"],
        stops=STOPS if stops == "both" else (stops,),
        sampling=SamplingConfig(temperature=params["temperature"]),
        seed=DEFAULT_SEED if seed is None else seed,
    )  # fmt: skip


def _files(files, arguments):
    """The model and its drafts: given, those of ``demo``, or the one beside the model."""
    if not files:
        raise UsageError("no model was given; pass a GGUF file, or 'demo' for the embedded pair")
    model, drafts = files[0], list(files[1:])
    given = arguments.pop("draft", ...)
    if given is None:  # --no-draft
        if drafts:
            raise UsageError("a draft and --no-draft contradict each other; pass one of them")
        return _resolved(model)[0], [], arguments
    if given is not ...:
        drafts.append(given)
    model, own = _resolved(model)
    if not drafts and own:
        drafts = list(own.values())
    if not drafts:
        found, _ = find_draft(model, dict(arguments))
        drafts = [found["draft"]] if found["draft"] else []
    return model, drafts, arguments


def _resolved(model):
    """The path of a model, and its drafts by kind where it is the embedded pair."""
    if model != "demo":
        return model, {}
    from cudflash.demo import demo_files

    target, drafts = demo_files()
    return str(target), drafts


def _open_drafts(model, paths, arguments):
    """Open every draft with the target; returns kind -> (path, config), and the last pair."""
    from cudflash.pair import open_pair

    drafts, pair = {}, None
    about = {name: arguments.get(name) for name in DRAFT_SETTINGS}
    for path in paths:
        pair = open_pair(model, path, **about)
        config = pair.draft.config
        if config.kind in drafts:
            raise UsageError(
                f"two drafts of kind {config.kind} were given ({drafts[config.kind][0]} and {path}); "
                "measure them in two runs and use 'cudflash compare'"
            )
        drafts[config.kind] = (path, config)
    return drafts, pair or open_pair(model, **about)


def _prompts(pair, all_chat):
    from cudflash.bench.prompts import Prompts
    from cudflash.loader.chat_template import ChatTemplate
    from cudflash.loader.tokenizer import Tokenizer
    from cudflash.prompts import prompt_ids

    tokenizer = Tokenizer.from_gguf(pair.gguf)
    vocab = pair.target.config.vocab_size

    def encode(prompt):
        return prompt_ids(
            prompt, tokenizer, lambda: ChatTemplate.from_gguf(pair.gguf, tokenizer), vocab
        )

    has_template = pair.gguf.metadata.get("tokenizer.chat_template") is not None
    return Prompts(encode, tokenizer, has_template, all_chat)


def _lines(path):
    return [check_text("--file", line) for line in file_text(path).splitlines() if line.strip()]


def _measure(output, ctx, work, place):
    """Run everything; returns the record and whether Ctrl-C has ended it."""
    from cudflash.bench.machine import ForeignLoad
    from cudflash.bench.record import COMPLETE, FAILED, INTERRUPTED, new_record
    from cudflash.bench.runner import Bench

    words = " ".join(["cudflash bench", *ctx.meta.get(WORDS, ())])
    made = new_record(words, work.settings, work.items, work.sets)

    def tell(text):
        raise_kept()
        output.progress(f"bench, {len(made['runs'])} of {work.n_runs} runs; {text}")

    save = (lambda: None) if place is None else (lambda: place.save(made))
    bench = Bench(work.settings, work.items, tell=tell, save=save)
    made["runs"], made["differences"] = bench.runs, bench.differences
    others = ForeignLoad(os.getpid())
    try:
        with others:
            for kind, lanes in work.groups.items():
                _measure_group(output, work, bench, made, kind, lanes, tell)
        made["status"] = COMPLETE
    except KeyboardInterrupt:
        made["status"] = INTERRUPTED
    except (CudflashError, MemoryError, OSError):
        made["status"] = FAILED
        _keep(place, made, others)
        raise
    _keep(place, made, others)
    return made, made["status"] == INTERRUPTED


def _measure_group(output, work, bench, made, kind, lanes, tell):
    from cudflash.bench.runner import Group, measure_verify_cost

    draft = None if kind is None else work.drafts[kind][0]
    arguments = dict(work.arguments)
    if draft is None:
        for name in DRAFT_SETTINGS:
            arguments.pop(name, None)
    engine = open_engine(output, work.model, {**arguments, "draft": draft})
    group = Group(engine, kind or "none", lanes)
    tell("digests of the files")
    made["groups"].append(group.to_dict())
    bench.run(group)
    if work.trials and len(made["groups"]) == 1:  # the target is the same in all groups
        for depth in dict.fromkeys(item.depth for item in work.items):
            made["verify_cost"] += [
                {"group": group.name, **cost}
                for cost in measure_verify_cost(engine, depth, trials=work.trials, tell=tell)
            ]
    engine.close()


def _keep(place, made, others):
    made["others_share"] = others.share
    if place is None:
        return
    if made["runs"]:
        place.finish(made)
    else:
        place.drop()


def _show(output, made, form, as_json, outputs):
    from cudflash.bench.report import to_csv, to_markdown

    if outputs["csv"] is not None:
        Path(outputs["csv"]).write_text(to_csv(made), encoding="utf-8")
    if outputs["plot"] is not None and made["runs"]:
        from cudflash.bench.plot import plot

        plot(made, outputs["plot"])
    if as_json:
        from cudflash.bench.statistics import cells

        output.json({**made, "cells": cells(made["runs"])})
    elif form == "csv":
        output.answer(to_csv(made))
    else:
        output.answer(to_markdown(made))
