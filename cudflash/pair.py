"""A target and its draft as files: opened, bound, compared, before any device work.

Owns what both files say of the pair. Must not load weights. Invariant: a ``Pair`` with a draft is
one that fits; whatever does not is refused with a sentence that names the file.
"""

import os
from dataclasses import dataclass, field

from cudflash import defaults
from cudflash.checks import file_path, one_of
from cudflash.demo import SINK, is_demo_draft, resolve_draft, resolve_model
from cudflash.digest import LoadedFiles
from cudflash.errors import UsageError


@dataclass(frozen=True)
class Pair:
    """An opened target, and a draft that fits it or None."""

    gguf: object  # GGUFFile of the target
    target: object  # loader.bind.Target
    draft: object = None  # loader.draft_bind.Draft, bound to the target
    stated: dict = field(default_factory=dict)  # what the draft's file says: window, windows per layer
    files: object = None  # LoadedFiles of the target
    draft_files: object = None  # LoadedFiles of the draft, None without
    draft_activations: str | None = None  # precision of the draft's products, None without


def open_pair(
    target, draft=None, *, draft_window=None, draft_sink=None, draft_activations=None
):
    """Open and bind a target and, if given, its draft.

    Parameters
    ----------
    target : str or path-like
        GGUF file, or "demo" (see ``cudflash.demo``).
    draft : str or path-like, optional
        GGUF file, or a directory with config.json and safetensors, or "demo".
    draft_window, draft_sink : int, optional
        Overrides of the draft's window (0 for none) and of its pinned rows.
    draft_activations : {"int8", "int8x2"}, optional
        Precision of the draft's products; ``cudflash.defaults.DRAFT_ACTIVATIONS`` if absent.

    Returns
    -------
    Pair

    Raises
    ------
    FormatError, UnsupportedError
        For a damaged or unsupported file.
    UsageError
        For a draft where a target is expected or the reverse, or overrides without a draft.
    PairingError
        For a draft of another model.
    """
    from cudflash.loader.bind import bind_target
    from cudflash.loader.gguf import open_gguf

    target = file_path("the model", resolve_model(target))
    if draft is not None:
        draft = file_path("the draft", resolve_draft(draft))
        if draft_sink is None and is_demo_draft(draft):
            draft_sink = SINK
    if os.path.isdir(target):
        from cudflash.loader.draft_bind import is_draft_directory

        what = "a directory, expected the GGUF file of a target model; pass that file"
        if is_draft_directory(target):
            what = (
                "this is a draft (a directory with a DFlash config.json), expected a target model; "
                "pass it with --draft and give the target with --model"
            )
        raise UsageError(f"{target}: {what}")
    files = LoadedFiles([target])  # before it is mapped: what is written from here on is noticed
    gguf = open_gguf(target)
    bound = bind_target(gguf)
    if draft is None:
        for name, value in (
            ("draft_window", draft_window), ("draft_sink", draft_sink),
            ("draft_activations", draft_activations),
        ):  # fmt: skip
            if value is not None:
                raise UsageError(f"{name} is {value!r}, but no draft is loaded; omit it")
        return Pair(gguf, bound, files=files)
    from cudflash.loader.draft_bind import bind_draft, open_draft

    if draft_activations is None:
        draft_activations = defaults.DRAFT_ACTIVATIONS
    one_of("draft_activations", draft_activations, defaults.ACTIVATION_TYPES)
    opened = open_draft(draft, window=draft_window, sink=draft_sink)
    stated = opened.config
    if draft_window is not None:
        stated = open_draft(draft).config
    fitting = bind_draft(opened, bound.config)
    said = {"window": stated.window, "windows": tuple(la.window for la in stated.layers)}
    return Pair(
        gguf, bound, fitting, said, files, LoadedFiles(opened.files), draft_activations
    )  # fmt: skip


def describe_draft(pair, digest, full_block):
    """Return what a receipt says about a draft: everything in effect, with its source.

    Parameters
    ----------
    pair : Pair
        With a draft.
    digest : str
        SHA-256 of the draft.
    full_block : bool
    """
    config = pair.draft.config
    taps = list(config.taps)
    yarn = config.rope.yarn
    return {
        "path": str(pair.draft.path),
        "sha256": digest,
        "arch": config.dialect,
        "name": config.name,
        "kind": config.kind,
        "n_layers": config.n_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "taps": {"value": taps, "source": "file", "file_value": taps},
        "window": {
            "value": config.window,
            "source": _source(config.window_source),
            "file_value": pair.stated["window"],
        },
        "sink": {"value": config.sink, "source": _source(config.sink_source), "file_value": None},
        "layer_windows": [layer.window for layer in config.layers],
        "layer_causal": [layer.causal for layer in config.layers],
        "rope": {
            **{name: v for name, v in vars(config.rope).items() if name != "sections"},  # none has
            "yarn": None if yarn is None else dict(vars(yarn)),
        },
        "full_block": full_block,
        "activations": pair.draft_activations,
    }


def draft_settings(pair):
    """Settings of the draft that its file should state, as ``spec.diagnosis.diagnose`` takes them."""
    config = pair.draft.config
    return (("window", config.window, _source(config.window_source), pair.stated["window"]),)


def _source(source):
    """The source of a setting in the words of a receipt: no file states a sink."""
    return source if source in ("file", "override") else "absent"
