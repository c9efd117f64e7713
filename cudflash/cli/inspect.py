"""``cudflash inspect``: what a file holds, and whether two belong together.

Reads headers only, no weights, no Numba.
"""

import math
import os

import click

from cudflash.cli.common import (
    Command,
    json_option,
    model_option,
    one_model,
    output_of,
    output_options,
)
from cudflash.cli.facts import directory_facts, draft_facts, file_facts
from cudflash.cli.draft_options import check_pair, conditioning_options, identity_option
from cudflash.cli.output import human_bytes
from cudflash.errors import PairingError, UnsupportedError, UsageError


@click.command("inspect", cls=Command)
@click.argument("words", nargs=-1, metavar="FILE [DRAFT]")
@model_option
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--metadata", is_flag=True, help="List every metadata key; long values are cut.")
@click.option("--digest", is_flag=True, help="Read the files whole for their SHA-256.")
@identity_option
@conditioning_options
@json_option
@output_options
@click.pass_context
def command(ctx, words, model, tensors, metadata, digest, identity, as_json, **settings):
    """Show what a model or a draft holds and whether this version can run it.

    FILE (also given with --model) is a GGUF file, or the directory of a draft. Only headers are
    read. A file that is sound but cannot be run is shown with the reason; the exit code is then
    still 0. A damaged file is an error (exit code 3). With a DRAFT, show whether the two belong
    together and why; the exit code is 4 if they do not.
    """
    from cudflash.demo import resolve_draft

    file, rest = one_model(model, words)
    if len(rest) > 1:
        raise UsageError(f"the argument {rest[1]!r} was not expected; inspect takes two files")
    draft = resolve_draft(rest[0]) if rest else None
    settings = {name: value for name, value in settings.items() if value is not None}
    if identity is not None:
        check_pair(identity, file, draft=draft, **settings)
    elif settings:
        option = "--" + next(iter(settings)).replace("_", "-")
        raise UsageError(f"{option} matters with --identity alone; pass that, or omit {option}")
    output = output_of(ctx)
    wanted = {"tensors": tensors, "metadata": metadata, "digest": digest}
    if os.path.isdir(file):
        if draft is not None:
            raise UsageError(
                f"{file}: a directory, expected the GGUF file of a target model; give the target "
                "first and its draft second"
            )
        found = describe_directory(file, **wanted)
    else:
        found = describe_file(output, file, draft, **wanted)
    output.clear_progress()
    if as_json:
        output.json(found)
    else:
        show(output, found)
    if draft is not None and not found["pairing"]["compatible"]:
        ctx.exit(PairingError.exit_code)


def describe_file(output, file, draft, tensors, metadata, digest):
    """What is known of a GGUF file, and of the pair if a draft is given: plain values."""
    from cudflash.loader.gguf import open_gguf
    from cudflash.loader.summary import file_digest, summarize

    gguf = open_gguf(file)
    found = summarize(gguf)
    if digest:
        found["sha256"] = file_digest(
            file, lambda n: output.progress(f"reading {human_bytes(n)} of {gguf.size_bytes}")
        )
    if tensors:
        found["tensors"] = [_tensor(info) for info in gguf.tensors.values()]
    if metadata:
        found["metadata"] = {key: _shown(value) for key, value in gguf.metadata.items()}
    if found["draft"] is not None and found["draft"]["problem"] is None:
        found["draft"] |= _about(_open(file))
    if draft is not None:
        found["pairing"] = _pairing(gguf, draft, digest)
    elif found["model"]:
        found["draft_beside"] = _beside(file, gguf)
    return found


def describe_directory(path, tensors, metadata, digest):
    """What is known of a draft in a directory: plain values, names as in ``describe_file``."""
    from cudflash.loader.draft_config import describe_draft_config
    from cudflash.loader.pairing import draft_digest
    from cudflash.loader.safetensors_dir import open_safetensors_dir, read_json

    draft = _open(path)
    stored = open_safetensors_dir(path).tensors.values()
    found = {
        "path": path,
        "file_bytes": sum(os.path.getsize(name) for name in draft.files),
        "role": "draft",
        "name": draft.config.name,
        "n_tensors": len(stored),
        "tensor_types": _types(stored),
        "draft": {
            "problem": None,
            "config": describe_draft_config(draft.config),
            "warnings": list(draft.warnings),
            **_about(draft),
        },
    }
    if digest:
        found["sha256"] = draft_digest(draft)
    if tensors:
        found["tensors"] = [_tensor(info) for info in stored]
    if metadata:
        found["metadata"] = read_json(os.path.join(path, "config.json"))
    return found


def _open(draft):
    from cudflash.loader.draft_bind import open_draft

    return open_draft(draft)


def _about(draft):
    """What a draft's configuration does not tell."""
    from cudflash.loader.pairing import lane_sentence

    return {"path": draft.path, "files": list(draft.files), "lane": lane_sentence(draft.config)}


def _pairing(gguf, draft, digest):
    """The verdict about a pair, with what is known of the draft."""
    from cudflash.loader.bind import bind_target
    from cudflash.loader.gguf import open_gguf
    from cudflash.loader.pairing import draft_digest, pairing_verdict
    from cudflash.loader.safetensors_dir import open_safetensors_dir

    target = bind_target(gguf)  # first: its complaint is the better one when both are swapped
    draft = _open(draft)
    verdict = pairing_verdict(target.config, draft)
    opened = open_safetensors_dir if os.path.isdir(draft.path) else open_gguf
    types = _types(opened(draft.path).tensors.values())
    found = {**verdict, **_about(draft), "tensor_types": types}
    return {**found, "sha256": draft_digest(draft)} if digest else found


def _beside(file, gguf):
    """The draft that ``generate`` would use, and why."""
    from cudflash.demo import default_draft
    from cudflash.loader.bind import bind_target
    from cudflash.loader.pairing import find_draft_beside

    own = default_draft(file)
    if own is not None:
        return {"path": own[0], "explanation": own[1], "candidates": True}
    try:
        found = find_draft_beside(file, bind_target(gguf).config)
    except UsageError as err:  # several fit: worth telling, no reason to fail
        return {"path": None, "explanation": str(err), "candidates": True}
    return {
        "path": found.path,
        "explanation": found.explanation,
        "candidates": found.path is not None or bool(found.rejected),
    }


def _types(tensors):
    """Tensors, values and bytes per type, largest first."""
    table = {}
    for info in tensors:
        row = table.setdefault(
            info.type_name, {"type": info.type_name, "tensors": 0, "values": 0, "bytes": 0}
        )
        row["tensors"] += 1
        row["values"] += math.prod(info.shape)
        row["bytes"] += info.n_bytes
    return sorted(table.values(), key=lambda row: -row["bytes"])


def show(output, found):
    """Write a summary for people."""
    output.table(directory_facts(found) if "model" not in found else file_facts(found))
    draft = found["draft"]
    if draft is not None and draft["config"] is not None:
        output.line()
        output.table(draft_facts(draft["config"], draft["lane"]))
    output.line()
    _show_types(output, found["tensor_types"])
    for name, header in (("tensors", ("name", "type", "shape", "size")), ("metadata", None)):
        if name in found:
            output.line()
            output.table(_rows_of(name, found[name]), header=header, right=(3,) if header else ())
    for warning in draft["warnings"] if draft is not None else ():
        output.line(f"note: {warning}")
    if "pairing" in found:
        show_pairing(output, found["pairing"])
    elif found.get("draft_beside", {}).get("candidates"):
        output.line()
        output.line(f"note: {found['draft_beside']['explanation']}")


def _show_types(output, types):
    output.table(
        [(row["type"], row["tensors"], row["values"], _size(row["bytes"])) for row in types],
        header=("type", "tensors", "values", "size"),
        right=(1, 2, 3),
    )


def show_pairing(output, pairing):
    """Write what is known of a draft, and the verdict with its reasons, for people."""
    output.line()
    facts = [("draft", pairing["path"]), ("sha256", pairing.get("sha256"))]
    facts = [row for row in facts if row[1] is not None]
    output.table([*facts, *draft_facts(pairing["draft"], pairing["lane"])])
    output.line()
    _show_types(output, pairing["tensor_types"])
    output.line()
    output.table(
        [
            (
                check["what"],
                "not stated" if check["draft"] is None else str(check["draft"]),
                str(check["target"]),
                "yes" if check["fits"] else "NO",
            )
            for check in pairing["checks"]
        ],
        header=("", "draft", "target", "fits"),
    )
    output.line()
    for warning in pairing["warnings"]:
        output.line(f"note: {warning}")
    verdict = "compatible: yes" if pairing["compatible"] else "compatible: no"
    output.line(verdict + "".join(f"; {reason}" for reason in pairing["reasons"]))


def _rows_of(name, value):
    if name == "metadata":
        return [(key, str(item)) for key, item in value.items()]
    shapes = (" x ".join(map(str, tensor["shape"])) for tensor in value)
    return [(t["name"], t["type"], shape, _size(t["bytes"])) for t, shape in zip(value, shapes)]


def _tensor(info):
    return {
        "name": info.name,
        "type": info.type_name,
        "shape": list(info.shape),
        "offset": info.offset,
        "bytes": info.n_bytes,
    }


def _size(n_bytes):
    return "unknown" if n_bytes is None else human_bytes(n_bytes)


def _shown(value, limit=200):
    """A metadata value as JSON has it; arrays by their first elements, long text cut."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= limit else value[:limit] + f"... ({len(value)} characters)"
    try:
        n, head = len(value), [_shown(_item(value[i]), 40) for i in range(min(8, len(value)))]
    except TypeError:
        raise UnsupportedError(f"a metadata value of type {type(value).__name__}") from None
    return head if n <= 8 else [*head, f"... ({n} values)"]


def _item(value):
    return value.item() if hasattr(value, "item") else value
