"""Prompt sets: the shipped texts, a user's own, and the text that fills a context to a depth.

Owns which texts are measured and what they are called. Must not know engines. Invariant: a set says
of itself whether it is natural or synthetic, and a text that turns out periodic is synthetic
whatever its set says, because periodic text hides conditioning faults and flatters every draft.
"""

import hashlib
from dataclasses import dataclass, replace
from importlib import resources

from cudflash.errors import ContextLengthError, FormatError, UsageError

NATURAL, SYNTHETIC = "natural", "synthetic"
NATURAL_SETS = ("code", "maths", "prose", "chat", "list", "languages", "recall", "copy")
SYNTHETIC_SETS = ("periodic", "counting")
SETS = NATURAL_SETS + SYNTHETIC_SETS
FILLER_SET = "filler"
DEPTH_MARK = "{depth}"
SEPARATOR = "==="
OWN = "own"  # set of the prompts that a user brings
CONTEXT_STEP = 64  # n_ctx is rounded up to a multiple, so that near-equal runs get equal contexts

LONGEST_PERIOD = 64  # tokens
PERIODIC_SHARE = 0.9  # of the tokens equal those one period earlier
FEWEST_FOR_PERIOD = 12  # tokens; shorter texts are not judged
LOOP_TAIL = 48  # last tokens of an answer that are looked at


@dataclass(frozen=True)
class PromptSet:
    """Texts of one kind.

    Attributes
    ----------
    name : str
    kind : {"natural", "synthetic"}
    source, what : str
        Where the texts come from, what they are.
    template : bool
        Whether the model's chat template is used where it has one.
    texts : tuple of str
    """

    name: str
    kind: str
    source: str
    what: str
    template: bool
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """One prompt at one depth, ready to be answered.

    Attributes
    ----------
    set : str
    index : int
        Of the text in its set.
    depth : int
        Tokens of filler asked for.
    kind : {"natural", "synthetic"}
    note : str
        Why it is synthetic although its set is natural, "" otherwise.
    ids : tuple of int
    """

    set: str
    index: int
    depth: int
    kind: str
    note: str
    ids: tuple[int, ...]

    @property
    def sha256(self):
        """Digest of the token ids."""
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()

    def to_dict(self):
        """What a record says about it."""
        return {
            "set": self.set, "index": self.index, "depth": self.depth, "kind": self.kind,
            "note": self.note, "n_tokens": len(self.ids), "sha256": self.sha256,
        }  # fmt: skip


def _shipped(name):
    return resources.files("cudflash.bench").joinpath("prompts", f"{name}.txt").read_text("utf-8")


def load_set(name):
    """Return a shipped set.

    Raises
    ------
    UsageError
        For a name that is none.
    """
    if name not in SETS:
        raise UsageError(f"there is no prompt set {name!r}, expected one of {', '.join(SETS)}")
    return parse_set(name, _shipped(name))


def parse_set(name, text):
    """Return the set in a text: lines ``key: value``, then prompts after lines of ``===``.

    Raises
    ------
    FormatError
        For a missing key or an empty prompt.
    """
    head, *texts = text.replace("\r\n", "\n").split(f"{SEPARATOR}\n")
    keys = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    for key in ("kind", "source", "what"):
        if key not in keys:
            raise FormatError(f"prompt set {name}: the key {key!r} is missing from its head")
    if keys["kind"] not in (NATURAL, SYNTHETIC):
        raise FormatError(f"prompt set {name}: kind is {keys['kind']!r}, expected natural, synthetic")
    texts = tuple(text.removesuffix("\n") for text in texts)
    if not texts or not all(text.strip() for text in texts):
        raise FormatError(f"prompt set {name}: a prompt is empty, expected text after each ===")
    return PromptSet(
        name, keys["kind"], keys["source"], keys["what"], "template" in keys, texts
    )


def own_set(texts, source):
    """Return a user's prompts as a set; it is natural unless a text is periodic."""
    if not texts:
        raise UsageError(f"{source}: there is no prompt in it, expected one per line")
    return PromptSet(OWN, NATURAL, source, "prompts given by the user", False, tuple(texts))


def choose_sets(names):
    """Return shipped sets by name: ``all`` (natural), ``synthetic``, or single names."""
    chosen = []
    for name in names or ("all",):
        group = {"all": NATURAL_SETS, SYNTHETIC: SYNTHETIC_SETS}.get(name, (name,))
        chosen += [one for one in group if one not in chosen]
    return [load_set(name) for name in chosen]


class Filler:
    """Natural text of any length in tokens, cut at a token.

    Attributes
    ----------
    n_tokens : int
        Of the shipped text; more than these can only be had by repeating it.
    """

    def __init__(self, tokenizer, text=None):
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(_shipped(FILLER_SET) if text is None else text,
                                     add_special=False)
        self.n_tokens = len(self._ids)

    def text(self, n_tokens):
        """Return about ``n_tokens`` tokens of text; it repeats itself beyond its own length."""
        ids = self._ids * -(-n_tokens // self.n_tokens)
        return self._tokenizer.decode(ids[:n_tokens]).decode("utf-8", "ignore")


class Prompts:
    """Makes items for one model.

    Parameters
    ----------
    encode : callable
        Text or chat messages -> token ids (``cudflash.prompts.prompt_ids`` of the model).
    tokenizer : Tokenizer
    has_template : bool
    all_chat : bool
        Send every prompt through the chat template.
    """

    def __init__(self, encode, tokenizer, has_template, all_chat=False):
        if all_chat and not has_template:
            raise UsageError("--chat needs a chat template, but the model's file has none; omit it")
        self._encode, self._tokenizer = encode, tokenizer
        self._has_template, self._all_chat = has_template, all_chat
        self._filler = None

    def items(self, prompt_set, depth, limit=None):
        """Return the items of a set at a depth, the first ``limit`` of them."""
        return [
            self._item(prompt_set, index, text, depth)
            for index, text in enumerate(prompt_set.texts[:limit])
        ]

    def _item(self, prompt_set, index, text, depth):
        chat = self._all_chat or (prompt_set.template and self._has_template)
        ids, bare = (self._ids(text, filler, chat) for filler in self._fillers(depth))
        item = Item(prompt_set.name, index, depth, prompt_set.kind, "", ids)
        if depth and depth > self._filler.n_tokens:
            note = f"the filler of {self._filler.n_tokens} tokens repeats itself"
            return _relabelled(item, note)
        if item.kind == NATURAL and period(bare) is not None:  # whatever stands before it
            return _relabelled(item, f"periodic, {period(bare)} tokens")
        return item

    def _fillers(self, depth):
        """The filler of a depth, and none."""
        if depth:
            self._filler = self._filler or Filler(self._tokenizer)
        return (self._filler.text(depth) if depth else ""), ""

    def _ids(self, text, filler, chat):
        if DEPTH_MARK in text:
            text = text.replace(DEPTH_MARK, f"\n{filler}\n" if filler else "")
        elif filler:
            text = f"{filler}\n\n{text}"
        return tuple(self._encode([{"role": "user", "content": text}] if chat else text))


def _relabelled(item, note):
    """A text of a natural set that is none here: it gets cells of its own."""
    name = item.set if item.kind == SYNTHETIC else f"{item.set} ({SYNTHETIC})"
    return replace(item, set=name, kind=SYNTHETIC, note=note)


def period(ids):
    """Return the shortest period, in tokens, that most of a text follows; None without one."""
    n = len(ids)
    if n < FEWEST_FOR_PERIOD:
        return None
    for p in range(1, min(LONGEST_PERIOD, n // 3) + 1):
        same = sum(a == b for a, b in zip(ids, ids[p:]))
        if same >= PERIODIC_SHARE * (n - p):
            return p
    return None


def loops(ids):
    """Whether an answer has ended up repeating itself: its acceptance says little about text."""
    return period(tuple(ids)[-LOOP_TAIL:]) is not None


def needed_context(items, n_tokens):
    """Return the context that the longest item and its answer need, rounded up."""
    longest = max(len(item.ids) for item in items) + n_tokens
    return -(-longest // CONTEXT_STEP) * CONTEXT_STEP


def check_context(items, n_tokens, n_ctx):
    """Refuse items that do not fit, before anything is loaded.

    Raises
    ------
    ContextLengthError
        Naming the longest item and both numbers.
    """
    worst = max(items, key=lambda item: len(item.ids))
    if len(worst.ids) + n_tokens > n_ctx:
        raise ContextLengthError(
            f"prompt {worst.index} of the set {worst.set!r} at depth {worst.depth} needs "
            f"{len(worst.ids)} + {n_tokens} = {len(worst.ids) + n_tokens} tokens, the context holds "
            f"{n_ctx}; pass a larger -c, or smaller -d and -n"
        )


def prompts_digest(items):
    """SHA-256 over all items in order: equal digests mean the same prompts."""
    text = "\n".join(f"{item.set} {item.index} {item.depth} {item.sha256}" for item in items)
    return hashlib.sha256(text.encode()).hexdigest()
