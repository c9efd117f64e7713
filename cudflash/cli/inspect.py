"""``cudflash inspect``: what a GGUF file holds. Reads the header only, no weights, no Numba."""

import click

from cudflash.cli.common import Command, json_option, output_of, output_options
from cudflash.cli.output import human_bytes
from cudflash.errors import PairingError, UnsupportedError


@click.command("inspect", cls=Command)
@click.argument("file", type=click.Path(), metavar="FILE")
@click.argument("draft", type=click.Path(), metavar="[DRAFT]", required=False)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--metadata", is_flag=True, help="List every metadata key; long values are cut.")
@click.option("--digest", is_flag=True, help="Read the whole file for its SHA-256.")
@json_option
@output_options
@click.pass_context
def command(ctx, file, draft, tensors, metadata, digest, as_json):
    """Show what a GGUF file holds and whether this version can run it.

    Reads only the file's header. A file that is sound but cannot be run is shown with the reason;
    the exit code is then still 0. A damaged file is an error (exit code 3). With a DRAFT, show
    whether the two belong together and why; the exit code is 4 if they do not.
    """
    from cudflash.loader.gguf import open_gguf
    from cudflash.loader.summary import file_digest, summarize

    output = output_of(ctx)
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
    if draft is not None:
        found["pairing"] = _pairing(gguf, draft)
    if as_json:
        output.json(found)
    else:
        show(output, found)
    if draft is not None and not found["pairing"]["compatible"]:
        ctx.exit(PairingError.exit_code)


def _pairing(gguf, draft):
    from cudflash.loader.bind import bind_target
    from cudflash.loader.draft_bind import open_draft
    from cudflash.loader.pairing import pairing_verdict

    return pairing_verdict(bind_target(gguf).config, open_draft(draft))


def show_pairing(output, pairing):
    """Write a verdict with its reasons for people."""
    draft = pairing["draft"]
    output.line()
    output.table(
        [
            (check["what"], str(check["draft"]), str(check["target"]), "yes" if check["fits"] else "NO")
            for check in pairing["checks"]
        ],
        header=("", "draft", "target", "fits"),
    )
    output.line()
    window = "none" if draft["window"] is None else f"{draft['window']} on {draft['window_pattern']}"
    output.line(
        f"{draft['kind']} draft: {pairing['lane']}; taps {draft['taps']} (0-based, "
        f"{draft['taps_source']}), window {window} ({draft['window_source']}), mask token "
        f"{draft['mask_token_id']}"
    )
    for warning in pairing["warnings"]:
        output.line(f"note: {warning}")
    verdict = "compatible: yes" if pairing["compatible"] else "compatible: no"
    output.line(verdict + "".join(f"; {reason}" for reason in pairing["reasons"]))


def show(output, found):
    """Write a summary for people."""
    output.table(_facts(found))
    output.line()
    output.table(
        [
            (row["type"], row["tensors"], row["values"], _size(row["bytes"]))
            for row in found["tensor_types"]
        ],
        header=("type", "tensors", "values", "size"),
        right=(1, 2, 3),
    )
    for name, header in (("tensors", ("name", "type", "shape", "size")), ("metadata", None)):
        if name in found:
            output.line()
            output.table(_rows_of(name, found[name]), header=header, right=(3,) if header else ())
    if "pairing" in found:
        show_pairing(output, found["pairing"])


def _rows_of(name, value):
    if name == "metadata":
        return list(value.items())
    shapes = (" x ".join(map(str, tensor["shape"])) for tensor in value)
    return [(t["name"], t["type"], shape, _size(t["bytes"])) for t, shape in zip(value, shapes)]


def _facts(found):
    rows = [
        ("file", found["path"]),
        ("name", found["name"]),
        ("architecture", found["architecture"]),
        ("role", found["role"]),
        ("size", f"{human_bytes(found['file_bytes'])} ({found['file_bytes']} bytes)"),
        ("GGUF version", found["gguf_version"]),
        ("tensors", found["n_tensors"]),
        ("sha256", found.get("sha256")),
    ]
    model = found["model"]
    rows += _model_facts(model) if model else sorted(found["hyperparameters"].items())
    token = found["tokenizer"]
    ids = ", ".join(f"{name} {ident}" for name, ident in token["special_ids"].items())
    rows += [
        ("tokenizer", " / ".join(str(token[k]) for k in ("model", "pre") if token[k])),
        ("vocabulary", token["vocab_size"]),
        ("special ids", ids),
        ("chat template", "yes" if token["chat_template"] else "no"),
        ("can be run", "yes" if found["problem"] is None else f"no: {found['problem']}"),
    ]
    return [(name, str(value)) for name, value in rows if value is not None and value != ""]


def _model_facts(model):
    heads = f"{model['n_heads']} (key/value {model['n_kv_heads']}, {model['head_dim']} wide)"
    sliding = model["window"] is not None
    return [
        ("layers", model["n_layers"]),
        ("hidden width", model["hidden_dim"]),
        ("heads", heads),
        ("feed-forward width", model["ffn_dim"]),
        ("trained context", model["context_length"]),
        ("window", f"{model['window']} on S of {model['window_pattern']}" if sliding else None),
        ("RoPE", _rope_fact(model["rope"])),
        ("RoPE, sliding", _rope_fact(model["rope_sliding"]) if sliding else None),
        ("RMS epsilon", f"{model['rms_eps']:.6g}"),
        ("output head", "shared with the embedding" if model["tied_output"] else "own tensor"),
        ("defaults taken", "; ".join(model["defaults_taken"])),
        ("tensors not used", ", ".join(model["extra_tensors"])),
    ]


def _rope_fact(rope):
    if rope is None:
        return "none"
    text = f"{rope['style']}, {rope['n_dims']} dimensions, base {rope['freq_base']:g}"
    if rope["freq_scale"] != 1:
        text += f", scale {rope['freq_scale']:g}"
    return text + (f", YaRN factor {rope['yarn']['factor']:g}" if rope["yarn"] else "")


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
