"""What the monitor costs: tokens per second with it and without, in turns, and its own time.

    python scripts/bench_monitor.py models/SmolLM2-135M-Instruct.Q4_1.gguf [--repeats 5]

The screen is drawn on a real pseudo-terminal whose other side reads and forgets. Answers are plain
(one event a token) and scripted (a drafter that knows the plain answer: as many events a second as
there can be). "Inside" is the share of the deciding thread's processor time that is spent in
``Monitor.see`` or in the recorder: other work on the machine hardly moves it, while the ratio of
speeds needs a quiet one. Prints a Markdown table, then one line of JSON.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from bench_common import Spread, machine, table
from rich.console import Console

import cudflash
from cudflash.drafters import Oracle
from cudflash.events import TokenEvent
from cudflash.recording import Recorder
from cudflash.sampling import SamplingConfig
from cudflash.tui import Monitor

GREEDY = SamplingConfig(temperature=0.0)
PROMPT = "The history of the city begins with"
VIEWS = {"none": None, "80x24": (80, 24), "160x48": (160, 48), "recording": "recording"}


class Terminal:
    """A pseudo-terminal with somebody who reads."""

    def __init__(self, size):
        master, slave = os.openpty()
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        threading.Thread(target=self._read, args=(master,), daemon=True).start()
        self.console = Console(
            file=self.file, force_terminal=True, width=size[0], height=size[1],
            color_system="truecolor", legacy_windows=False,
        )  # fmt: skip

    @staticmethod
    def _read(master):
        try:
            while os.read(master, 65536):
                pass
        except OSError:
            pass


def viewer(view, folder):
    """(what sees events, what ends it, processor seconds inside so far)."""
    inside = [0.0]
    if view is None:
        return (lambda event: None), (lambda: None), inside
    if view == "recording":
        recorder = Recorder.to_file(Path(folder) / "events")
        see, end = recorder.see, recorder.close
    else:
        monitor = Monitor(Terminal(view).console, live=True).__enter__()
        see = monitor.see

        def end():
            monitor.__exit__(None, None, None)

    def timed(event):
        started = time.thread_time()
        see(event)
        inside[0] += time.thread_time() - started

    return timed, end, inside


def measure(engine, options, view, n_tokens, folder):
    """(tokens per second, share inside the view) from the first token to the last."""
    see, end, inside = viewer(view, folder)
    started = None
    answer = engine.session().generate(PROMPT, max_tokens=n_tokens, sampling=GREEDY,
                                       ignore_eos=True, **options)
    for event in answer:
        see(event)
        if isinstance(event, TokenEvent):
            ended = time.perf_counter()
            if started is None:
                started, began, inside[0] = ended, time.thread_time(), 0.0
    wall = ended - started
    share = inside[0] / (time.thread_time() - began)
    end()
    return (n_tokens - 1) / wall, share


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    engine = cudflash.load(args.model, threads=args.threads)
    plain = engine.generate(PROMPT, max_tokens=args.tokens, sampling=GREEDY, ignore_eos=True,
                            speculative="off")
    lanes = {
        "plain": {"speculative": "off"},
        "scripted, verify 7": {"speculative": "on", "verify_length": 7,
                               "drafter": Oracle(plain.tokens)},
    }
    found = {lane: {name: [] for name in VIEWS} for lane in lanes}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats + 1):
            for lane, options in lanes.items():
                for name in VIEWS if repeat % 2 else reversed(list(VIEWS)):
                    result = measure(engine, options, VIEWS[name], args.tokens, folder)
                    if repeat:
                        found[lane][name].append(result)
    print(f"### {args.model.name}, {args.threads} threads, {args.tokens} tokens, "
          f"{args.repeats} repeats\n")
    rows = []
    for lane, views in found.items():
        base = [tps for tps, _ in views["none"]]
        for name, results in views.items():
            ratio = [tps / other for (tps, _), other in zip(results, base)]
            rows.append([lane, name, Spread.of([tps for tps, _ in results]).text(1),
                         Spread.of(ratio).text(3),
                         Spread.of([100 * share for _, share in results]).text(2)])
    print(table(["decoding", "view", "tokens/s", "ratio to none", "inside, %"], rows))
    print(json.dumps({"benchmark": "monitor", "model": args.model.name, "machine": machine(),
                      "results": found}))


if __name__ == "__main__":
    main()
