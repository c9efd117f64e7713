"""Recorded drafts on the CPU op set: bound, loaded and run without a target's forward pass."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
from cudflash.loader.draft_bind import bind_draft, open_draft
from cudflash.loader.ggml_types import GGMLType

from cudflash.model.buffers import Allocator
from cudflash.model.draft_buffers import DraftWorkspace
from cudflash.model.draft_runner import DraftRunner
from cudflash.model.draft_weights import load_draft
from cudflash.ops import cpu as ops
from tests.helpers.draft_vectors import draft_case, quantised_draft, target_tables

N_CTX = 300


@cache
def shared_tables(target):
    """Embedding and head of a tiny target as a draft borrows them, float32."""
    raw = [np.ascontiguousarray(table).view(np.uint8) for table in target_tables(target)]
    width = raw[0].shape[1] // 4
    return SimpleNamespace(
        embedding=ops.embedding_table(raw[0], GGMLType.F32, width),
        output=ops.pack(raw[1], GGMLType.F32, width),
    )


@cache
def bound_draft(name, variant="f32", sink=0, window=None):
    """Open a recorded draft (``variant`` "f32" or "kq") and bind it to its target's numbers."""
    case = draft_case(name)
    path = quantised_draft(name) if variant == "kq" else case.directory
    draft = open_draft(path, sink=sink, window=window)
    embedding, _ = target_tables(case.target)
    numbers = SimpleNamespace(
        arch=case.target, name="", hidden_dim=embedding.shape[1], vocab_size=len(embedding),
        n_layers=draft.config.n_target_layers or 1 + max(draft.config.taps),
    )  # fmt: skip
    return bind_draft(draft, numbers)


def with_causal(draft, causal):
    """The same draft, every layer causal or none, or (None) where it slides."""
    layers = tuple(
        replace(la, causal=la.window is not None if causal is None else causal)
        for la in draft.config.layers
    )
    return replace(draft, config=replace(draft.config, layers=layers))


def load_model(draft, target, activations="int8", n_ctx=N_CTX):
    """Draft model, its workspace and their allocator."""
    allocator = Allocator(ops)
    model = load_draft(ops, draft, shared_tables(target), n_ctx, allocator)
    return model, DraftWorkspace(allocator, ops, model, activations), allocator


@cache
def loaded(name, variant="f32", activations="int8", sink=0, window=None):
    """Model and workspace of a recorded draft; scratch is shared, so one pass at a time."""
    draft = bound_draft(name, variant, sink, window)
    return load_model(draft, draft_case(name).target, activations)[:2]


def make_runner(name, *args, n_ctx=None, **settings):
    """A fresh conversation of ``loaded`` draft."""
    return DraftRunner(ops, *loaded(name, *args, **settings), n_ctx=n_ctx)


def tap_rows(name):
    """All recorded target rows of a draft, float32 (N, n_taps, C)."""
    return draft_case(name).data["hidden"].astype(np.float32)
