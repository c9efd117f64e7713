"""Load a model and use it: ``load`` and ``Engine``, the public face of the package.

Owns the loaded weights, the scratch memory and the lock that keeps passes apart. Must not know how
an answer proceeds. Invariant: scratch is used by one pass at a time; everything that lasts longer
belongs to a session.
"""

import threading
import weakref
from contextlib import closing
from functools import cached_property, partial

import numpy as np

from cudflash import defaults
from cudflash.backend import backend_of, planner
from cudflash.checks import one_of, whole
from cudflash.device import choose_device, load_ops, physical_cores
from cudflash.digest import ReceiptMaker
from cudflash.engine_checks import MTP, check_mtp_k, check_taps, load_notes
from cudflash.errors import ContextLengthError, UnsupportedError, UsageError
from cudflash.model.buffers import Allocator, Workspace
from cudflash.model.cache import check_kv_type
from cudflash.model.runner import ALL, NONE, Runner
from cudflash.model.weights import load_target
from cudflash.pair import open_pair
from cudflash.parking import Parking
from cudflash.plan import choose_context, plan_pair
from cudflash.prompts import check_ids
from cudflash.result import RECEIPT_SCHEMA
from cudflash.rounds import StepMeter
from cudflash.session import Session
from cudflash.spec.verify_length import default_verify_length


def load(
    target,
    draft=None,
    *,
    device="auto",
    n_ctx=None,
    kv_type=defaults.KV_TYPE,
    draft_sink=None,
    draft_window=None,
    draft_activations=None,
    drafter=None,
    mtp_k=None,
    activations=None,
    threads=None,
    progress=None,
    draft_full_block=True,
    identity=None,
    graphs=True,
):
    """Load a target model and, if given, its draft.

    Parameters
    ----------
    target : str or path-like
        GGUF file.
    draft : str or path-like, optional
        DFlash or DFlash2 draft: a GGUF file, or a directory with config.json and safetensors.
    device : {"auto", "cpu", "cuda", "cuda:N"}
        "auto" takes a usable GPU, else the CPU; ``Engine.device.reason`` tells why.
    n_ctx : int, optional
        Tokens of prompt and answer together; the model's own context length, at most 4096, if
        absent. More than the model was trained for is allowed and noted in ``Engine.notes``.
    kv_type : {"f16", "f32"}
        Type of cached keys and values.
    draft_sink : int, optional
        Rows pinned at the start of a windowed draft's context; ``loader.draft_config.DEFAULT_SINK``
        if absent.
    draft_window : int, optional
        Override of the draft's window, 0 for none. Needs a draft, as ``draft_sink`` does.
    drafter : "mtp", Drafter, or callable that returns one, optional
        Instead of a draft file: "mtp" drafts with the MTP block of the model's own file; a
        callable (a class, say) is asked once per session, an instance is shared by all sessions
        and can serve only one answer at a time.
    mtp_k : int, optional
        Tokens that the MTP block drafts per round, 1 to 15; 3 if absent. Needs ``drafter="mtp"``.
    activations, draft_activations : {"int8", "int8x2"}, optional
        Precision of activations in packed products of the target and of the draft;
        ``cudflash.defaults`` has those that are taken if absent.
    threads : int, optional
        CPU threads; the usable physical cores if absent. Results do not depend on it.
    progress : callable, optional
        Called with (bytes read, bytes in all) while weights are packed, the draft's after the
        target's.
    draft_full_block : bool
        Run the draft with the block it was trained with whatever the verify length. False runs
        shorter blocks, which is cheaper and proposes other tokens.
    identity : str or path-like, optional
        File from ``cudflash identity``: a pair that differs in any field is refused.
    graphs : bool
        On a GPU, replay passes as CUDA graphs; False starts every kernel by itself, for debugging.
        It never changes a bit, and the CPU has no part in it.

    Returns
    -------
    Engine

    Raises
    ------
    FormatError, UnsupportedError
        For a damaged or unsupported file.
    DeviceError
        If the device asked for cannot be used.
    PairingError
        If the draft does not belong to the target, or the pair is not that of ``identity``.
    UsageError
        For arguments that cannot be honoured.
    OutOfMemoryError
        If plan and context need more memory than is available; nothing is allocated then.
    """
    if draft is not None and drafter is not None:
        raise UsageError("draft and drafter were both given; pass one of them")
    mtp_k = check_mtp_k(drafter, mtp_k)
    if drafter is not None and drafter != MTP and not callable(drafter):
        from cudflash.spec.drafters import check_drafter

        check_drafter(drafter)
    activations = defaults.ACTIVATIONS if activations is None else activations
    one_of("activations", activations, defaults.ACTIVATION_TYPES)
    threads = physical_cores() if threads is None else whole("threads", threads, 1)
    check_kv_type(kv_type)
    chosen = choose_device(device)
    about = {"draft_window": draft_window, "draft_sink": draft_sink}
    pair = open_pair(target, draft, **about, draft_activations=draft_activations)
    n_ctx = choose_context(n_ctx, pair.target.config.context_length)
    if drafter == MTP:
        from cudflash.mtp_side import require_mtp

        require_mtp(pair.target, pair.gguf.path)
    if pair.draft is not None:
        default_verify_length(pair.draft.config.block_size)  # refuses a block too short to verify
    if identity is not None:
        from cudflash.identity import require_identity

        require_identity(identity, pair, n_ctx, activations)
    ops = load_ops(chosen, graphs)
    ops.set_threads(threads)
    return Engine(
        ops, pair, chosen, n_ctx, kv_type, activations, progress,
        drafter=drafter, full_block=draft_full_block, mtp_k=mtp_k,
    )  # fmt: skip


class Engine:
    """A loaded model; made by ``load``.

    Attributes
    ----------
    config : TargetConfig
    draft_config : DraftConfig or None
        None when no draft is loaded.
    device : Device
        ``kind``, ``name``, ``reason``.
    plan : Plan
        What load and one session allocate.
    tokenizer : Tokenizer
    n_ctx : int
        Tokens of prompt and answer together.
    kv_type, activations : str
    mtp_k : int or None
        Tokens that the loaded MTP block drafts per round; None without ``drafter="mtp"``.
    notes : tuple of str
        Sentences a user should see once: defaults taken, limits exceeded.
    """

    def __init__(
        self, ops, pair, device, n_ctx, kv_type, activations, progress=None, *,
        drafter=None, full_block=True, mtp_k=None,
    ):  # fmt: skip
        target = pair.target
        self.ops, self.gguf, self.device = ops, pair.gguf, device
        self._name = pair.gguf.path
        self.files = pair.files
        self.config = target.config
        self.draft_config = None if pair.draft is None else pair.draft.config
        self.n_ctx, self.kv_type, self.activations = n_ctx, kv_type, activations
        self.backend = backend_of(device, ops)
        self.plan = plan_pair(
            planner(device.kind), pair, n_ctx=n_ctx, kv_type=kv_type, activations=activations,
            max_rows=defaults.PREFILL_ROWS, logit_rows=defaults.LOGIT_ROWS, mtp=drafter == MTP,
        )  # fmt: skip
        self.backend.check_memory(self.plan.total)
        self.draft = None
        try:
            self._load(pair, full_block, progress)
        except BaseException:  # also an interrupt: what is on its way to a device is given back
            self.backend.release()
            raise
        self._target, self._mtp = target, None
        self.drafter = partial(self.mtp_drafter, mtp_k) if drafter == MTP else drafter
        self.mtp_k = mtp_k
        self.closed = False
        self._pass_owner = None  # Generation whose pass holds the lock
        self._sessions = weakref.WeakSet()
        self.plain_step = StepMeter()  # what speculation is compared with
        # held for a pass and for reading what it left in scratch; reentrant, because an interrupt
        # may leave it held by the thread that will ask for it again
        self.lock = threading.RLock()
        self.parking = Parking(self.lock)
        if drafter == MTP:
            self._load_mtp()
        self.notes = load_notes(pair, n_ctx)
        self._tokenizer = None
        self._template = None

    @cached_property
    def round_costs(self):
        """Costs of rounds, by which "auto" decides; None leaves it to the gate."""
        from cudflash.spec.costs import RoundCosts

        return RoundCosts()

    @property
    def tokenizer(self):
        """Tokenizer of the model, built on first use."""
        self.check_open()
        if self._tokenizer is None:
            from cudflash.loader.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_gguf(self.gguf)
        return self._tokenizer

    def chat_template(self):
        """Return the file's chat template."""
        self.check_open()
        if self._template is None:
            from cudflash.loader.chat_template import ChatTemplate

            self._template = ChatTemplate.from_gguf(self.gguf, self.tokenizer)
        return self._template

    # -- life -----------------------------------------------------------------------------------

    def __enter__(self):
        self.check_open()
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        """Free weights, scratch and the caches of all sessions; results stay valid. Idempotent.

        Raises
        ------
        UsageError
            While another thread is generating.
        """
        if self.closed:
            return
        for session in tuple(self._sessions):
            session.close()
        with self.lock:
            self.closed = True
            self.parking.close()
            self.work.release()
            self.model = self.work = self.draft = self.drafter = self.gguf = None
            self._target = self._mtp = None
            self.allocator = self._tokenizer = self._template = None
            self.backend.release()

    def _load(self, pair, full_block, progress):
        """Allocate and fill everything that sessions share."""
        ops, target = self.ops, pair.target
        self.backend.reserve(self.plan.total - self.session_bytes())
        self.allocator = Allocator(ops)
        self.model = load_target(ops, target, self.n_ctx, self.allocator, progress)
        self.work = Workspace(
            self.allocator, ops, target.config, self.model.matrices(),
            defaults.PREFILL_ROWS, defaults.LOGIT_ROWS, self.activations,
        )  # fmt: skip
        if pair.draft is not None:
            from cudflash.draft_side import DraftSide

            self.draft = DraftSide(ops, pair, self.model, self.n_ctx, full_block, progress)
        self.backend.prepare(self.plan.workspace)

    def session_bytes(self):
        """What of the plan one session allocates."""
        draft = self.plan.draft
        return self.plan.session_bytes + draft.get("kv", 0) + draft.get("io", 0)

    def check_open(self):
        """Raise UsageError after ``close``."""
        if self.closed:
            raise UsageError(f"the engine of {self._name} is closed; load the model again")

    def begin_pass(self, owner=None):
        """Refuse a pass that is begun from inside another one, by a drafter, say.

        The lock does not: it is reentrant. An owner that died of an interrupt does not count.

        Parameters
        ----------
        owner : Generation, optional
            Whose pass begins; ``end_pass`` follows.
        """
        inside = self._pass_owner
        if inside is not None and inside is not owner and inside.running:
            raise UsageError(
                "the engine was used from inside a pass of an answer on it, expected use between "
                "passes; load a second engine for a drafter that needs a model"
            )
        self._pass_owner = owner

    def end_pass(self, owner):
        """End the pass of an owner."""
        if self._pass_owner is owner:
            self._pass_owner = None

    # -- answers --------------------------------------------------------------------------------

    def session(self):
        """Return a new conversation."""
        self.check_open()
        session = Session(self)
        self._sessions.add(session)
        return session

    def mtp_drafter(self, k=None):
        """Return a drafter that uses the MTP block of the model's own file, for one conversation.

        For ``Session.generate``. The block is loaded when it is first asked for.

        Parameters
        ----------
        k : int, optional
            Tokens drafted per round, 1 to 15; 3 if absent.

        Raises
        ------
        UnsupportedError
            If the file has no such block.
        """
        self.check_open()
        side = self._load_mtp()
        return side.drafter() if k is None else side.drafter(k)

    def _load_mtp(self):
        if self._mtp is None:
            from cudflash.mtp_side import load_side

            with self.lock:
                self._mtp = load_side(self, self._target)
        return self._mtp

    def generate(self, prompt, **options):
        """Return the Result of a prompt in a fresh session; options as in ``Session.generate``."""
        with closing(self.session()) as session:
            return session.generate(prompt, **options).result()

    # -- plain passes ---------------------------------------------------------------------------

    def logits(self, tokens):
        """Evaluate tokens from an empty state.

        Parameters
        ----------
        tokens : sequence of int

        Returns
        -------
        ndarray of shape (n, vocab_size), float32
            Row i: logits after token i.
        """
        runner, ids = self._fresh(tokens)
        out = np.empty((len(ids), self.config.vocab_size), np.float32)
        for start, n_rows in self._blocks(runner, ids, ALL):
            for first in range(0, n_rows, self.work.logit_rows):
                last = min(first + self.work.logit_rows, n_rows)
                runner.head(first, last)
                out[start + first : start + last] = self.ops.download(
                    self.work.logits[: last - first]
                )
        return out

    def taps(self, tokens, layers):
        """Evaluate tokens from an empty state and return residuals on the way.

        Parameters
        ----------
        tokens : sequence of int
        layers : sequence of int
            0-based; the residual stream after that layer.

        Returns
        -------
        ndarray of shape (n, len(layers), hidden_dim), float32
        """
        layers = check_taps(layers, self.config.n_layers)
        runner, ids = self._fresh(tokens)
        runner.set_taps(layers)
        out = np.empty((len(ids), len(layers), self.config.hidden_dim), np.float32)
        for start, n_rows in self._blocks(runner, ids, NONE):
            out[start : start + n_rows] = self.ops.download(runner.tap_rows(n_rows))
        return out

    def draft_block(self, tap_rows, anchor):
        """Run one draft pass from an empty context; for tests and diagnosis.

        Parameters
        ----------
        tap_rows : ndarray of shape (n, n_taps, hidden_dim), float32
            Residuals of n tokens, as ``taps`` returns them for the draft's layers.
        anchor : int
            The token after them.

        Returns
        -------
        DraftBlock
            ``context_k``, ``context_v``, ``hidden``, ``logits``, ``tokens``.
        """
        self.check_open()
        if self.draft is None:
            raise UnsupportedError("no draft is loaded; pass draft= to load()")
        with self.lock:
            self.begin_pass()
            return self.draft.block(tap_rows, anchor)

    def _fresh(self, tokens):
        self.check_open()
        ids = check_ids(tokens, self.config.vocab_size)
        if not ids:
            raise UsageError("there are no tokens, expected at least one")
        if len(ids) > self.n_ctx:
            raise ContextLengthError(
                f"there are {len(ids)} tokens, the context holds {self.n_ctx}; load the model with "
                "a larger n_ctx"
            )
        return Runner(self.ops, self.model, self.work, len(ids), self.kv_type), ids

    def _blocks(self, runner, ids, which):
        """Evaluate ids in blocks; yields (first row, rows) while the block's buffers hold."""
        for start in range(0, len(ids), runner.max_rows):
            block = ids[start : start + runner.max_rows]
            with self.lock:
                self.begin_pass()
                runner.step(block, which, head=False)
                runner.commit(len(block))
                yield start, len(block)

    # -- identity -------------------------------------------------------------------------------

    def target_digest(self):
        """SHA-256 of the model file; read once, on first use."""
        return self.files.sha256()

    def receipt(self, request):
        """Return how an answer was made; ``request`` is what ``Session.generate`` recorded."""
        return self.receipt_maker(request)()

    def receipt_maker(self, request):
        """Take down how an answer is made; the result makes the receipt without the engine.

        Returns
        -------
        ReceiptMaker
        """
        import platform

        import cudflash

        facts = {
            "schema": RECEIPT_SCHEMA,
            "versions": {
                "cudflash": cudflash.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "target": {
                "path": str(self.gguf.path),
                "sha256": None,  # read when the receipt is
                "arch": self.config.arch,
                "name": self.config.name,
            },
            "draft": None if self.draft is None else self.draft.describe(),
            "device": dict(vars(self.device)),
            "kernel_path": self.backend.kernel_path(),
            "threads": self.ops.threads(),
            "n_ctx": self.n_ctx,
            "kv_type": self.kv_type,
            "activations": self.activations,
            "numerics": defaults.NUMERICS,
            **request,
        }
        return ReceiptMaker(facts, self.files, None if self.draft is None else self.draft.files)

    def check_files(self):
        """Raise FormatError if a file in use was written to since it was loaded.

        Called before each answer. A file that shrinks while it is read ends the process (bus
        error): that cannot be prevented, so leave files of a loaded model alone.
        """
        for files in (self.files, None if self.draft is None else self.draft.files):
            if files is not None:
                files.check()
