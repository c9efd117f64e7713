"""Chat templates: messages to a prompt, by the Jinja template in the file.

Owns the sandbox, the checks of messages, and the tokenisation of a rendered prompt. Must not know
sessions or models. Two invariants: BOS appears exactly once, and the text of a control token in a
message stays text.

A template comes with a file somebody else made, so it runs in a bounded sandbox
(``template_sandbox``).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence

from cudflash.loader import template_sandbox
from cudflash.loader.template_sandbox import one_line
from cudflash.loader.tokenizer import Tokenizer

from cudflash.errors import CudflashError, FormatError, UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEY = "tokenizer.chat_template"
_SENTINELS = range(0xF0000, 0xFFFFE)  # private-use characters that stand for protected text


class ChatTemplate:
    """One template with the tokens it may use.

    Parameters
    ----------
    source : str or None
        Jinja text; None if the file has none (``render`` then says so).
    path : str
        For messages.
    bos_token, eos_token : str
    clock : callable
        Where ``strftime_now`` gets its time; a fixed one makes prompts reproducible.
    """

    def __init__(
        self,
        source: str | None,
        path: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ):
        self.source = source
        self.path = path
        self.bos_token, self.eos_token = bos_token, eos_token
        self._clock = clock
        self._compiled = None

    @classmethod
    def from_gguf(cls, gguf, tokenizer: Tokenizer | None = None, name: str | None = None, **kw):
        """Read the template of an open file.

        Parameters
        ----------
        gguf : object with ``.metadata`` and ``.path``
        tokenizer : Tokenizer, optional
            Gives the texts of BOS and EOS; built from the file if absent.
        name : str, optional
            A named template (``tokenizer.chat_template.NAME``) instead of the default one.

        Raises
        ------
        UsageError
            If a named template is asked for and the file does not have it.
        """
        metadata, path = gguf.metadata, str(gguf.path)
        source = metadata.get(_KEY if name is None else f"{_KEY}.{name}")
        if source is None and name is not None:
            names = sorted(k.removeprefix(_KEY + ".") for k in metadata if k.startswith(_KEY + "."))
            raise UsageError(
                f"{path}: there is no chat template {name!r}, expected one of "
                f"{', '.join(names) or 'none (the file has no named templates)'}"
            )
        if source is not None and not isinstance(source, str):
            raise FormatError(f"{path}: {_KEY} is not text, expected a Jinja template")
        if source is not None:
            tokenizer = tokenizer or Tokenizer.from_gguf(gguf)
            for role in ("bos", "eos"):
                token = getattr(tokenizer, role + "_id")
                kw.setdefault(role + "_token", "" if token is None else tokenizer.token_text(token))
        return cls(source, path, **kw)

    def render(
        self, messages: Sequence[Mapping], *, add_generation_prompt: bool = True, **extra
    ) -> str:
        """Return the prompt text of a conversation.

        Parameters
        ----------
        messages : sequence of mappings with ``role`` and ``content``
        add_generation_prompt : bool
            End with the opening of an assistant turn.
        **extra
            Further variables of the template (``tools``, ``enable_thinking``, ...).

        Raises
        ------
        UsageError
            If the file has no template, a message is malformed, or the template refuses.
        FormatError
            If the template itself is broken or leaves its bounds.
        """
        check_messages(messages)
        return self._render(messages, add_generation_prompt, extra)

    def _render(self, messages, add_generation_prompt: bool, extra: Mapping) -> str:
        if not self.source:
            raise UsageError(
                f"{self.path}: the file has no chat template ({_KEY}), expected one for chat "
                "messages; give the prompt as text, or use an instruction-tuned file"
            )
        variables = {
            **extra,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            if self._compiled is None:
                self._compiled = template_sandbox.environment(self._clock).from_string(self.source)
            return template_sandbox.render(self._compiled, variables)
        except CudflashError as err:
            raise type(err)(f"{self.path}: {err}") from None
        except TemplateSyntaxError as err:
            raise FormatError(
                f"{self.path}: line {err.lineno} of the chat template is not valid Jinja "
                f"({err.message}); use another file or give the prompt as text"
            ) from None
        except (TemplateError, RecursionError, MemoryError) as err:
            raise FormatError(
                f"{self.path}: the chat template failed ({one_line(err)}); use another file or "
                "give the prompt as text"
            ) from None
        except Exception as err:  # noqa: BLE001 - whatever a template provokes
            raise FormatError(
                f"{self.path}: the chat template cannot use these messages ({one_line(err)}); "
                "check them or give the prompt as text"
            ) from None


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping],
    *,
    add_generation_prompt: bool = True,
    check_text: Callable[[str], None] | None = None,
    **extra,
) -> list[int]:
    """Return the ids of a rendered conversation.

    ``check_text`` is called with the rendered text before it is tokenised, which takes long for a
    very long one.

    The text of control tokens is parsed in what the template writes and nowhere else: each one in
    a message (or in ``extra``) is replaced by a private-use character before rendering and put
    back after the control tokens have been cut out. All other text is tokenised exactly as a
    plain render, across the borders of messages.

    Notes
    -----
    BOS is added if the file asks for it and the template has not written it. EOS is never added:
    the prompt is to be continued.
    """
    check_messages(messages)
    texts = list(_strings_in([messages, extra]))
    protected = tokenizer.control_texts_in("\0".join(texts))
    back: dict[str, str] = {}
    if protected:
        seen = set().union(template.source or "", *texts)
        free = (chr(code) for code in _SENTINELS if chr(code) not in seen)
        back = dict(zip(free, protected))
        messages, extra = _protect([messages, extra], back)
    prompt = template._render(messages, add_generation_prompt, extra)
    if check_text is not None:
        check_text(prompt)
    parts = tokenizer.partition(prompt, parse_special=True)
    for sentinel, text in back.items():
        parts = [p if isinstance(p, int) else p.replace(sentinel, text) for p in parts]
    ids: list[int] = []
    if tokenizer.add_bos and parts[:1] != [tokenizer.bos_id]:
        ids.append(tokenizer.bos_id)
    tokenizer.encode_parts(parts, ids)
    return ids


def check_messages(messages: Sequence[Mapping]) -> None:
    """Raise UsageError for the first message that is not {role, content: text}."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(
            f"chat messages are given as {type(messages).__name__}, expected a list of "
            "{role, content} objects"
        )
    if not messages:
        raise UsageError("there are no chat messages, expected at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"chat message {i} is a {type(message).__name__}, expected an object with role and "
                "content"
            )
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UsageError(
                f"chat message {i} has the role {role!r}, expected one of {', '.join(ROLES)}"
            )
        if content is None and role == "assistant" and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            raise UsageError(
                f"chat message {i} has content of type {type(content).__name__}, expected text "
                "(images and lists of parts are not supported)"
            )


def _strings_in(value) -> Iterable[str]:
    """Yield every string of a nest of lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings_in(key)
            yield from _strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_in(item)


def _protect(value, back: Mapping[str, str]):
    """Copy a nest with protected texts replaced by their sentinels (longest text first)."""
    if isinstance(value, str):
        for sentinel, text in back.items():
            value = value.replace(text, sentinel)
        return value
    if isinstance(value, Mapping):
        return {_protect(key, back): _protect(item, back) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_protect(item, back) for item in value]
    return value
