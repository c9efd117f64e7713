"""An engine without a model: scripted tokens through the real answer machinery."""

import threading
from types import SimpleNamespace

from cudflash.loader.streaming import StreamDecoder

from cudflash.choose import Choice
from cudflash.generation import Generation, Request
from cudflash.rounds import Rounds
from cudflash.stop import StopRules

EOG = 999


class PieceTokenizer:
    """Token i is the i-th piece of bytes; ``EOG`` ends the answer and has no text."""

    add_space_prefix = False

    def __init__(self, pieces):
        self.pieces = list(pieces)

    def decode(self, tokens):
        return b"".join(self.decode_piece(token) for token in tokens)

    def decode_piece(self, token, special=False):
        return b"" if token == EOG else self.pieces[token]

    def stream(self, *, special=False, continuation=False):
        return StreamDecoder(self, special=special, continuation=continuation)


class ScriptedRunner:
    """Keeps ids as a real runner does; can lose everything on a rewind, as a wrapped ring."""

    def __init__(self, max_rows=4, loses=False):
        self.max_rows, self.loses = max_rows, loses
        self.tokens, self.evaluated, self.pending = [], 0, 0
        self.cache = SimpleNamespace(holder="a sliding layer")

    def rewind(self, length):
        kept = 0 if self.loses and length < len(self.tokens) else length
        del self.tokens[kept:]
        return kept

    def rollback(self):
        pass

    def prompt_stops(self, start, n_prompt, n_same):
        return ()

    def prefill_chunk(self, tokens, last):
        self.evaluated += len(tokens)
        self.tokens += tokens


class ScriptedRounds(Rounds):
    """Emits a list of tokens in rounds of given sizes; keeps the runner's ids as rounds must."""

    def __init__(self, runner, script, sizes=(1,), fail_at=None):
        super().__init__(runner)
        self.runner, self.script = runner, list(script)
        self.sizes, self.n_rounds, self.fail_at = sizes, 0, fail_at
        self.at, self.open, self.settled, self.abandoned = 0, None, [], 0

    def choose_first(self):
        self.at = 1
        return [Choice(self.script[0], None)]

    def next(self, room):
        if self.fail_at == self.n_rounds:
            self.open = []
            raise RuntimeError("scripted failure")
        size = min(self.sizes[self.n_rounds % len(self.sizes)], room)
        self.n_rounds += 1
        self.open = self.script[self.at : self.at + size]
        return [Choice(token, None) for token in self.open]

    def settle(self, kept):
        # rows of the token before the round and of all kept but the last
        self.runner.tokens += self.script[self.at - 1 : self.at - 1 + kept]
        self.settled.append((len(self.open), kept))
        self.at += kept
        self.open = None

    def abandon(self):
        self.abandoned += 1
        self.open = None


class ScriptedReceipt(dict):
    """A receipt that needs no files."""

    def of(self, part):
        return ScriptedReceipt({**self, **part()})

    def __call__(self):
        return dict(self)


def scripted_generation(
    script, tokenizer, *, prompt=(0,), max_tokens=1000, stop=(), sizes=(1,), runner=None,
    fail_at=None, on_end=lambda generation: None,
):  # fmt: skip
    """A Generation that emits ``script``; ``.rounds`` and ``.runner`` are kept for inspection."""
    runner = runner or ScriptedRunner()
    rounds = ScriptedRounds(runner, script, sizes, fail_at)
    strings = tuple(item for item in stop if isinstance(item, str))
    ids = frozenset([EOG, *(item for item in stop if not isinstance(item, str))])
    request = Request(list(prompt), max_tokens, StopRules(strings, ids), None, {"seed": 1})
    engine = SimpleNamespace(
        begin_pass=lambda owner: None, end_pass=lambda owner: None,
        tokenizer=tokenizer, lock=threading.RLock(),
        receipt_maker=lambda request: ScriptedReceipt({"schema": "x", **request}),
    )  # fmt: skip
    generation = Generation(engine, runner, request, rounds, on_end)
    generation.rounds, generation.runner = rounds, runner
    return generation
