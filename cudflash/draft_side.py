"""The loaded draft of an engine: weights and scratch shared by its sessions, one drafter for each.

Owns the draft's device memory. Must not know how an answer proceeds.
"""

from cudflash.model.buffers import Allocator
from cudflash.model.draft_buffers import DraftWorkspace
from cudflash.model.draft_runner import DraftRunner, draft_block
from cudflash.model.draft_weights import load_draft
from cudflash.pair import describe_draft, draft_settings
from cudflash.spec.dflash import DFlashDrafter
from cudflash.spec.guard import GuardedDrafter


class DraftSide:
    """A draft on the device of its target.

    Parameters
    ----------
    ops : module
    pair : Pair
        With a draft.
    target : TargetModel
        Its embedding and head are shared.
    n_ctx : int
    full_block : bool
    progress : callable, optional

    Attributes
    ----------
    config : DraftConfig
    path : str
    settings : tuple
        For the diagnosis of an answer.
    allocator : Allocator
    """

    def __init__(self, ops, pair, target, n_ctx, full_block, progress=None):
        self._ops, self._pair = ops, pair
        self.config, self.path = pair.draft.config, pair.draft.path
        self.settings = draft_settings(pair)
        self.full_block = full_block
        self.allocator = Allocator(ops)
        self.model = load_draft(ops, pair.draft, target, n_ctx, self.allocator, progress)
        self.work = DraftWorkspace(self.allocator, ops, self.model, pair.draft_activations)

    def drafter(self, vocab_size, runner=None):
        """Return a drafter for one conversation, on a new runner or one that another has left."""
        if runner is None:
            runner = DraftRunner(self._ops, self.model, self.work)
        else:
            runner.rewind(0)
        return GuardedDrafter(DFlashDrafter(runner, self.full_block), vocab_size)

    def block(self, tap_rows, anchor):
        """Run one draft pass on a context of its own: see ``Engine.draft_block``."""
        return draft_block(self._ops, self.model, self.work, tap_rows, anchor)

    def file_windows(self):
        """The window of each layer as the file states it, None for a layer that sees everything."""
        return self._pair.stated["windows"]

    def file_weights(self):
        """The weights as the file has them, on its memory map."""
        return self._pair.draft.weights

    @property
    def files(self):
        """What the draft was loaded from."""
        return self._pair.draft_files

    def digest(self):
        """SHA-256 of the draft; read once, on first use."""
        return self.files.sha256()

    def describe(self, digest=None):
        """What a receipt says about the draft."""
        return describe_draft(self._pair, digest, self.full_block)
