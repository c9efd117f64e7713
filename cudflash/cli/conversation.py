"""The conversation behind ``cudflash chat``: messages, slash commands, saving.

Owns the list of messages. Must not know where lines come from. Invariant: the list is what a saved
file holds, character for character, and after any failure it is what it was before.
"""

import json
import os
import tempfile
from pathlib import Path

from cudflash.cli.running import chat_prompt, stats_line, stream_answer
from cudflash.errors import ContextLengthError, CudflashError, UsageError

HELP = """\
/help          this list
/exit          leave (also /quit, Ctrl-D)
/clear         forget the conversation; the system prompt stays
/system TEXT   set the system prompt; without TEXT show it, with - remove it
/retry         answer the last question again
/save FILE     write the conversation as JSON messages
/load FILE     continue a saved conversation
/stats         counts and rates of the last answer
Several lines: begin with three double quotes, end with three. A line that begins with a space is
never a command."""


class Conversation:
    """One conversation.

    Parameters
    ----------
    output : Output
    engine : Engine
    system : str or None
    sampling : SamplingConfig
    seed : int or None
        Of every answer; a retry adds 1, so that it differs.
    request : dict
        Further arguments of ``Session.generate``.
    template : dict
        Variables of the chat template.
    as_json : bool
        Write each answer as one object, a line each, instead of its text.
    watch : Watch, optional
        Who else sees the events.
    """

    def __init__(
        self, output, engine, *, system, sampling, seed, request, template, as_json, watch=None
    ):
        self._as_json, self._watch = as_json, watch
        self._output, self._engine = output, engine
        self._session = engine.session()
        self._sampling, self._seed = sampling, seed
        self._request, self._template = request, template
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._last = None  # result of the last answer
        self._retries = 0
        self._commands = {
            "/help": self._help, "/?": self._help, "/exit": None, "/quit": None, "/bye": None,
            "/clear": self._clear, "/system": self._system, "/retry": self._retry,
            "/save": self._save, "/load": self._load, "/stats": self._stats,
        }  # fmt: skip

    def take(self, line):
        """Do what a line says.

        Returns
        -------
        int or None
            An exit code, 0 for success; None to leave.
        """
        try:
            if line.startswith("/"):
                name, _, argument = line.partition(" ")
                if name in self._commands and self._commands[name] is None:
                    return None
                self._command(name, argument.strip())
            elif line.strip():
                self._retries = 0
                self._ask([*self.messages, {"role": "user", "content": line.removeprefix(" ")}])
        except ContextLengthError as err:
            return self._refuse(type(err), f"{err}; /clear forgets the conversation so far")
        except CudflashError as err:
            return self._refuse(type(err), str(err))
        except RecursionError:  # a loaded message may carry fields that the template walks through
            return self._refuse(
                UsageError, "the conversation is nested too deeply; /clear forgets it"
            )
        except KeyboardInterrupt:  # the second one during an answer
            self._output.note("stopped; the question was dropped")
        return 0

    def _refuse(self, kind, sentence):
        """Tell why a line was not done; returns the exit code of such an error."""
        self._output.error(sentence)
        self._output.json_error(kind.__name__, sentence, kind.exit_code)
        return kind.exit_code

    def _command(self, name, argument):
        if name not in self._commands:
            raise UsageError(
                f"there is no command {name}; /help lists them, and a line that begins with a "
                "space is sent as it is"
            )
        try:
            self._commands[name](argument)
        except (OSError, ValueError, RuntimeError) as err:  # no slip may cost the conversation
            reason = getattr(err, "strerror", None) or err or type(err).__name__
            raise UsageError(f"{name} cannot be done ({reason}); check what follows it") from None

    def _ask(self, messages):
        """Answer the last message of a list, and keep the list with the answer."""
        prompt = chat_prompt(self._engine, messages, self._template)
        seed = None if self._seed is None else self._seed + self._retries
        generation = self._session.generate(
            prompt, sampling=self._sampling, seed=seed, **self._request
        )
        on_stdout = self._watch is not None and self._watch.on_stdout
        result, _ = stream_answer(
            self._output, generation, not (self._as_json or on_stdout), self._watch
        )
        if self._as_json:
            self._output.json(result.to_dict())
        elif not on_stdout and not result.text.endswith("\n"):
            self._output.answer("\n")
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        self._last = result
        if result.finish_reason != "stop":
            self._output.note(f"(ended by {result.finish_reason})")

    # -- slash commands -------------------------------------------------------------------------

    def _help(self, argument):
        self._output.say(HELP)

    def _clear(self, argument):
        self.messages = [m for m in self.messages if m["role"] == "system"][:1]
        self._output.note("the conversation is empty")

    def _system(self, argument):
        old = [m["content"] for m in self.messages[:1] if m["role"] == "system"]
        if not argument:
            self._output.say(f"system prompt: {old[0]}" if old else "there is no system prompt")
            return
        rest = self.messages[len(old) :]
        system = [] if argument == "-" else [{"role": "system", "content": argument}]
        self.messages = [*system, *rest]
        self._output.note("system prompt set" if system else "system prompt removed")

    def _retry(self, argument):
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not asked:
            raise UsageError("there is no question to answer again; ask one first")
        if self._sampling.greedy:
            self._output.note("temperature 0 gives the same answer again")
        self._retries += 1
        self._ask(self.messages[: asked[-1] + 1])

    def _save(self, argument):
        path = _path(argument, "/save")
        if path.exists():
            read_messages(path)  # only a saved conversation may be overwritten
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        try:
            _replace(path, text.encode())
        except OSError as err:
            raise UsageError(
                f"{path}: cannot be written ({err.strerror}); choose another path"
            ) from None
        self._output.note(f"{len(self.messages)} messages saved to {path}")

    def _load(self, argument):
        path = _path(argument, "/load")
        self.messages = read_messages(path)
        self._output.note(f"{len(self.messages)} messages loaded from {path}")

    def _stats(self, argument):
        if self._last is None:
            raise UsageError("there is no answer yet; ask something first")
        used = self._last.usage.prompt_tokens + self._last.usage.completion_tokens
        line = f"{stats_line(self._last)}; context {used} of {self._engine.n_ctx}"
        self._output.say(line)


def read_messages(path):
    """Messages of a saved conversation.

    Raises
    ------
    UsageError
        If the file cannot be read or is not a list of {role, content} messages.
    """
    from cudflash.loader.chat_template import check_messages

    try:
        messages = json.loads(_regular_bytes(path).decode())
        if messages:
            check_messages(messages)
        json.dumps(messages, ensure_ascii=False).encode()
    except OSError as err:
        raise UsageError(f"{path}: cannot be read ({err.strerror}); check the path") from None
    except UnicodeEncodeError:
        raise UsageError(
            f"{path}: not a saved conversation (it has half of a surrogate pair, which is no text)"
        ) from None
    except RecursionError:
        raise UsageError(f"{path}: not a saved conversation (nested too deeply)") from None
    except (ValueError, UsageError) as err:
        raise UsageError(f"{path}: not a saved conversation ({err})") from None
    if not isinstance(messages, list):
        raise UsageError(f"{path}: not a saved conversation, expected a list of messages")
    return messages


def _regular_bytes(path):
    """Contents of a file; a pipe or a device is refused, since reading it could last for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError("it is no regular file")
    return path.read_bytes()


def _replace(path, data):
    """Write a file whole or not at all; nothing else in its folder is touched."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=".cudflash-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        os.chmod(part, mode & 0o777)  # mkstemp's own is for secrets
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _path(argument, command):
    if not argument:
        raise UsageError(f"{command} needs the name of a file")
    return Path(argument).expanduser()
