"""What a watcher of an answer must know before the first token: the facts of ``Started``.

Owns their names; recordings hold them as they are. Must not read files: a digest belongs to the
receipt. Plain values only, so that they can be written as JSON. A key is there even where its value
is None.
"""

import os

from cudflash.spec.gate import constants


def answer_facts(engine, prompt_tokens, max_tokens):
    """Return what runs, without a drafter.

    Parameters
    ----------
    engine : Engine
    prompt_tokens, max_tokens : int

    Returns
    -------
    dict
        ``drafter`` is None; ``reason`` is to say why.
    """
    import cudflash

    config = engine.config
    return {
        "version": cudflash.__version__,
        "target": {
            "file": os.path.basename(os.fspath(engine.gguf.path)),
            "arch": config.arch,
            "name": config.name,
            "n_layers": config.n_layers,
        },
        "device": {"kind": engine.device.kind, "name": engine.device.name},
        "threads": engine.ops.threads(),
        "n_ctx": engine.n_ctx,
        "kv_type": engine.kv_type,
        "activations": engine.activations,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "plain_step_ms": engine.plain_step.ms,  # as lately measured; None before the first
        "drafter": None,
        "reason": "",
    }


def drafter_facts(guard, draft, options, rule, engine):
    """Return what is under "drafter".

    Parameters
    ----------
    guard : GuardedDrafter
    draft : DraftSide or None
        None for a drafter that is no loaded draft.
    options : SpecOptions
    rule : {"match", "ratio"}
        In effect.
    engine : Engine

    Returns
    -------
    dict
    """
    return {
        "kind": guard.name,
        "mode": options.mode,
        "verify_length": options.limits.verify_length,
        "accept": options.accept,
        "rule": rule,
        "block_size": guard.block_size,
        "taps": list(guard.taps),
        "gate": constants(),
        "file": None if draft is None else os.path.basename(os.fspath(draft.path)),
        "geometry": None if draft is None else _geometry(draft.config, engine.n_ctx),
    }


def _geometry(config, n_ctx):
    """How much of the past the draft may attend to, and where that number comes from."""
    from cudflash.model.draft_context import DraftContextGeometry

    geometry = DraftContextGeometry.of(config, n_ctx)
    return {
        "layers": geometry.layers,
        "full_layers": geometry.full_layers,
        "sink": geometry.sink if geometry.window is not None else 0,
        "sink_source": config.sink_source,
        "window": geometry.window,
        "window_source": config.window_source,
        "row_limit": geometry.row_limit,
        "byte_limit": geometry.byte_limit,
    }
