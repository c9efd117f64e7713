"""The sandbox that chat templates run in.

Owns what a template can reach and how much it may do: Jinja's immutable sandbox, a limit on
executed lines and a limit on the size of the texts it builds. Must not know messages or tokens.

The limits stop loops, deep recursion and texts that grow out of hand; they are no promise against
every way of wasting time inside one built-in call.

Source: the functions, filters and settings are those of Hugging Face transformers,
utils/chat_template_utils.py.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping

from cudflash.errors import FormatError, UsageError

MAX_LINES = 1_000_000  # executed template lines; the longest published template needs thousands
MAX_TEXT = 16 << 20  # characters of any text a template builds
_MAX_WIDTH = 10_000  # number given to a padding method or filter
_WIDE_FORMAT = re.compile(r"\d{5,}|:[^}]*\{")  # a width of five digits, or one computed later


def one_line(cause: object) -> str:
    """Return an error's text as one line of at most 200 characters."""
    return " ".join(str(cause).split())[:200] or type(cause).__name__


def render(template, variables: Mapping) -> str:
    """Render under a limit of executed template lines, so that no loop runs for ever."""
    left = MAX_LINES
    code_name = template.root_render_func.__code__.co_filename

    def count(frame, event, arg):
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                raise FormatError(
                    f"the chat template ran more than {MAX_LINES} lines, which no sound template "
                    "does; use another file or give the prompt as text"
                )
        return count

    def enter(frame, event, arg):
        return count if frame.f_code.co_filename == code_name else None

    outer = sys.gettrace()
    sys.settrace(enter)
    try:
        return template.render(variables)
    finally:
        sys.settrace(outer)


@functools.cache
def _environment_class():
    """Build the sandbox class; Jinja is imported here, when a template is first used."""
    from jinja2.compiler import CodeGenerator
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks text for training; here it is only its contents."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    class Generator(CodeGenerator):
        """Sends ``a ~ b`` through the size check, which Jinja offers for operators only."""

        def visit_Concat(self, node, frame):
            self.write("environment.concatenated((")
            for item in node.nodes:
                self.visit(item, frame)
                self.write(", ")
            self.write("))")

    class Environment(ImmutableSandboxedEnvironment):
        """Immutable sandbox in which no text grows past MAX_TEXT."""

        code_generator_class = Generator
        intercepted_binops = frozenset(["+", "*", "**", "%"])
        generation = Generation

        def is_safe_attribute(self, obj, attr, value):
            if isinstance(obj, str | bytes) and attr in ("expandtabs", "translate", "format_map"):
                return False
            return super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value):
            wrapped = super().wrap_str_format(value)
            if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
                self.refuse("a format width")
            return wrapped

        def call_binop(self, context, operator, left, right):
            big = max((n for n in (left, right) if isinstance(n, int)), default=0)
            size = sum(len(x) for x in (left, right) if isinstance(x, str | list | tuple))
            if operator == "**" and big > 64:
                self.refuse("**")
            if (operator == "*" and size * big > MAX_TEXT) or (operator == "+" and size > MAX_TEXT):
                self.refuse(operator)
            if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
                self.refuse("a format width")
            return super().call_binop(context, operator, left, right)

        def call(self, context, obj, *args, **kwargs):
            owner = getattr(obj, "__self__", None)
            if isinstance(owner, str):
                self.check_text_method(owner, obj.__name__, args)
            return super().call(context, obj, *args, **kwargs)

        def check_text_method(self, text, name, args):
            """Refuse a method of str whose result would be too long."""
            if name == "replace" and len(args) >= 2:
                grown = text.count(str(args[0])) * len(str(args[1]))
            elif name == "join" and args and isinstance(args[0], list | tuple):
                grown = sum(len(str(item)) + len(text) for item in args[0])
            else:
                widths = [abs(value) for value in args if isinstance(value, int)]
                grown = MAX_TEXT + 1 if max(widths, default=0) > _MAX_WIDTH else 0
            if grown > MAX_TEXT:
                self.refuse(name)

        def concatenated(self, items):
            texts = [str(item) for item in items]
            if sum(map(len, texts)) > MAX_TEXT:
                self.refuse("~")
            return "".join(texts)

        def refuse(self, what):
            raise SecurityError(f"{what} would build more than {MAX_TEXT} characters")

    return Environment


def environment(clock: Callable[[], datetime.datetime]):
    """Return a sandbox with the functions and filters that published templates expect."""
    cls = _environment_class()
    env = cls(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", cls.generation],
    )

    def raise_exception(message):
        raise UsageError(f"the chat template refuses the messages: {one_line(message)}")

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # not Jinja's own filter: that one escapes HTML characters
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    env.filters["tojson"] = tojson
    for name in ("replace", "join"):
        env.filters[name] = _with_small_result(env, name)
    for name in ("center", "indent", "wordwrap", "batch", "slice", "format", "filesizeformat"):
        env.filters[name] = _with_small_numbers(env, env.filters[name])
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: clock().strftime(form)
    del env.globals["lipsum"]
    return env


def _with_small_numbers(env, function):
    """Wrap a filter so that a width or count cannot exhaust the memory."""

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > _MAX_WIDTH:
                env.refuse(f"a filter with {value}")
        return function(*args, **kwargs)

    return checked


def _with_small_result(env, name: str):
    """Replace the filters ``replace`` and ``join`` by the checked methods of str."""
    if name == "replace":

        def replace(text, old, new, count=-1):
            text, old, new = str(text), str(old), str(new)
            env.check_text_method(text, "replace", (old, new))
            return text.replace(old, new, -1 if count is None else count)

        return replace

    def join(value, d="", attribute=None):
        items = list(value)
        if attribute is not None:
            items = [env.getitem(item, attribute) for item in items]
        items = [str(item) for item in items]
        env.check_text_method(str(d), "join", (items,))
        return str(d).join(items)

    return join
