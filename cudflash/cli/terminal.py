"""Lines of a conversation from a terminal or a pipe."""

import sys

from cudflash.cli.output import is_terminal
from cudflash.errors import UsageError

PROMPT, MORE = "> ", ". "
QUOTES = '"""'


class LineReader:
    """Reads what the user says: a line, or several between triple quotes.

    The prompt is shown on terminals only, and never on stdout unless that is the terminal.
    """

    def __init__(self, output):
        self._output = output
        self.interactive = is_terminal(sys.stdin)
        self._interrupts = 0
        if self.interactive and is_terminal(sys.stdout):
            try:
                import readline  # noqa: F401  (gives input() its editing and history)
            except ImportError:
                pass

    def read(self):
        """Return the next input, None at the end of the input.

        Raises
        ------
        UsageError
            If a line is not UTF-8.
        """
        line = self._line(PROMPT)
        self._interrupts = 0
        if line is None or not line.startswith(QUOTES):
            return line
        lines, refused = [line.removeprefix(QUOTES)], None
        while not lines[-1].endswith(QUOTES):
            try:
                line = self._line(MORE)
            except UsageError as err:  # the rest is read, or it would be taken for questions
                refused, line = err, ""
            if line is None:
                break
            lines.append(line)
        if refused is not None:
            raise refused
        lines[-1] = lines[-1].removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def interrupted(self):
        """Count a Ctrl-C at the prompt; True for the second in a row."""
        self._interrupts += 1
        if self._interrupts > 1:
            self._output.note("")
            return True
        self._output.note("\nCtrl-C again, Ctrl-D or /exit leaves")
        return False

    def _line(self, prompt):
        if self.interactive and is_terminal(sys.stdout):
            try:
                return input(prompt)
            except EOFError:
                return None
            except UnicodeDecodeError as err:
                raise _not_text(err) from None
        if self.interactive:
            self._output.prompt(prompt)
        if sys.stdin is None:
            return None
        data = sys.stdin.buffer.readline()
        if not data:
            return None
        try:
            return data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as err:
            raise _not_text(err) from None


def _not_text(err):
    return UsageError(
        f"byte {err.start} of an input line is not UTF-8, expected UTF-8 text; it was left out"
    )
