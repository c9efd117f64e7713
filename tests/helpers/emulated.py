"""Engines on the emulated CUDA device and on the CPU, from the same files."""

from dataclasses import dataclass
from unittest import mock

import cudflash
from cudflash import defaults
from cudflash.device import Device
from cudflash.engine import Engine
from cudflash.pair import open_pair
from tests.emulation.cuda import emulated_ops


@dataclass
class Both:
    """The same model on both backends."""

    cuda: Engine
    cpu: Engine
    device: object  # EmulatedCuda


def emulated_engine(target, draft=None, *, rows=defaults.PREFILL_ROWS, n_ctx=256, kv_type="f16",
                    activations="int8x2", drafter=None, draft_sink=None, draft_activations=None,
                    full_block=True, **how):
    """(engine on an emulated card, stand-in); ``how`` goes to ``emulated_ops``."""
    ops, device = emulated_ops(**how)
    pair = open_pair(target, draft, draft_window=None, draft_sink=draft_sink,
                     draft_activations=draft_activations)
    chosen = Device("cuda", "emulated device", "a test")
    with mock.patch.object(defaults, "PREFILL_ROWS", rows):
        engine = Engine(ops, pair, chosen, n_ctx, kv_type, activations, drafter=drafter,
                        full_block=full_block)
    return engine, device


def both(target, draft=None, *, rows=defaults.PREFILL_ROWS, full_block=True, how=None, **settings):
    """:class:`Both` of a target, and of a draft if given."""
    settings = {"n_ctx": 256, "kv_type": "f16", "activations": "int8x2", **settings}
    on_card, device = emulated_engine(target, draft, rows=rows, full_block=full_block,
                                      **settings, **(how or {}))
    with mock.patch.object(defaults, "PREFILL_ROWS", rows):
        on_cpu = cudflash.load(target, draft, device="cpu", threads=1,
                               draft_full_block=full_block, **settings)
    return Both(on_card, on_cpu, device)
