"""The embedded pair: a small target and two drafts, trained for this project, under the name demo.

Owns the word and where the files lie. Must not open a model. ``demo`` is accepted wherever a model
file is, ``demo:dflash`` and ``demo:dflash2`` (``demo``: the default one) wherever a draft is; a file
of that name is reached as ``./demo``.
"""

import os
from pathlib import Path

from cudflash.errors import UsageError

NAME = "demo"
DEFAULT = "dflash2"  # more of its drafts are accepted, see the model card
SINK = 0  # the drafts were trained without pinned rows

_FOLDER = Path(__file__).parent / "demo_pair"
_TARGET = "glimmer-tiny-q3_k_m.gguf"
_DRAFTS = {
    "dflash": "dflash-glimmer-tiny-q4_k_s.gguf",
    "dflash2": "dflash2-glimmer-tiny-q4_k_m.gguf",
}


def demo_files():
    """Return the files of the pair.

    Returns
    -------
    (str, dict of str to str)
        Path of the target; paths of the drafts by kind.

    Raises
    ------
    UsageError
        Where the installation lacks one.
    """
    paths = {kind: _FOLDER / name for kind, name in {"": _TARGET, **_DRAFTS}.items()}
    for path in paths.values():
        if not path.is_file():
            raise UsageError(
                f"{path}: the embedded pair is not complete, expected this file; install cudflash "
                "again"
            )
    target = paths.pop("")
    return str(target), {kind: str(path) for kind, path in paths.items()}


def resolve_model(name):
    """Return the path of a target: the embedded one for ``demo``, anything else as it is."""
    return demo_files()[0] if name == NAME else name


def resolve_draft(name):
    """Return the path of a draft: an embedded one for ``demo`` or ``demo:KIND``.

    Raises
    ------
    UsageError
        For a kind that there is not.
    """
    if not isinstance(name, str) or name.partition(":")[0] != NAME:
        return name
    kind = name.partition(":")[2] if ":" in name else DEFAULT
    if kind not in _DRAFTS:
        raise UsageError(
            f"the embedded pair has no draft {kind!r}, expected "
            f"{' or '.join(f'{NAME}:{kind}' for kind in _DRAFTS)}"
        )
    return demo_files()[1][kind]


def is_demo_target(path):
    """Whether a path is the embedded target."""
    return _same(path, _FOLDER / _TARGET)


def is_demo_draft(path):
    """Whether a path is one of the embedded drafts."""
    return any(_same(path, _FOLDER / name) for name in _DRAFTS.values())


def default_draft(path):
    """The draft of a target that the user named no draft for: (path, explanation).

    Returns
    -------
    (str, str) or None
        None for a target that is not the embedded one.
    """
    if not is_demo_target(path):
        return None
    others = ", ".join(f"{NAME}:{kind}" for kind in _DRAFTS if kind != DEFAULT)
    return demo_files()[1][DEFAULT], f"more of its drafts are accepted; {others} is the other"


def demo_prompt():
    """Return the prompt that ``cudflash demo`` continues: held out of every training."""
    return (_FOLDER / "prompt.txt").read_text(encoding="utf-8")


def _same(path, own):
    try:
        return os.path.abspath(os.fspath(path)) == str(own)
    except TypeError:
        return False
