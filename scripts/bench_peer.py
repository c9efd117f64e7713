"""Compare speeds with llama.cpp on the same files, in one run: plain decoding and draft-dflash.

    python scripts/bench_peer.py --llama-bench llama-bench --llama-speculative llama-speculative-simple
    python scripts/bench_peer.py --target T.gguf --draft D.gguf --llama-speculative PROGRAM

Without files the embedded pair is measured, and the small models in ./models where they are. Both
sides take turns (A B B A) and neither works while the other is measured; ratios are taken within
each neighbouring pair, above 1 means that cudflash is faster. Programs that are not given are looked
for on the PATH; a peer that is absent is said to be absent, and cudflash's figure stands alone. The
last line is one JSON object: ``python scripts/speed_tables.py --take docs/records/NAME.json``.

llama.cpp's threads spin while they wait, so on a busy machine it is slowed down far more than
cudflash: take no ratio from a machine that does other work.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench_peers import BenchPeer, Ours, PeerError, WorkerPeer, has_llama_cpp
from fetch_models import MODELS

from cudflash.bench.machine import ForeignLoad, facts
from cudflash.bench.report import table
from cudflash.bench.statistics import Spread

SETTLE_SECONDS = 0.25  # llama.cpp's threads spin some milliseconds after their last task
N_CTX = 1024
PREFIX = 64
ATTEMPTS = 3  # its last lines are lost now and then: they are written by a thread of their own
DRAFT_TIMEOUT = 600  # seconds for one drafted answer of the peer
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
COUNTS = {name: re.compile(rf"{name}\s*=\s*(\d+)") for name in ("n_drafted", "n_accept")}
PROMPTS = (  # natural text; the pair is trained on text about Python
    "def median(values):\n    \"\"\"Return the median of a list of numbers.\"\"\"\n",
    "The module provides a small set of functions for reading and writing files. A file consists of",
    "class RingBuffer:\n    \"\"\"Keep the newest items; older ones are overwritten.\"\"\"\n",
)


def in_turns(sides, repeats, shares=None):
    """Return one list of figures per side, measured A B B A after one untimed call each.

    Parameters
    ----------
    sides : sequence of callable
        Each returns tokens per second; the first one is ours, in this process.
    repeats : int
    shares : list, optional
        Gets the share of the machine that others used during each of our turns.
    """
    found = [[] for _ in sides]
    for side in sides:
        side()
    for repeat in range(repeats):
        order = range(len(sides)) if repeat % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            time.sleep(SETTLE_SECONDS)
            with ForeignLoad(os.getpid()) as others:
                found[index].append(sides[index]())
            if index == 0 and shares is not None and others.share is not None:
                shares.append(others.share)
    return found


def plain_row(path, args, absent):
    """Plain decoding of one model by both sides."""
    ours = Ours(str(path), args.threads, N_CTX)
    prefix = [token % ours.engine.config.vocab_size for token in range(1000, 1000 + PREFIX)]
    peer = None
    if args.peer_python or has_llama_cpp(sys.executable):
        peer = WorkerPeer(args.peer_python or sys.executable, path, args.threads, N_CTX, "auto")
    elif args.llama_bench:
        peer = BenchPeer(args.llama_bench, path, args.threads, "auto")
    else:
        absent.add("no llama_cpp package (--peer-python) and no llama-bench (--llama-bench)")

    def speed(side):
        seconds = side.decode(prefix, args.tokens)
        if seconds is None:
            raise PeerError(f"{path}: the model ends its text at once; use another model")
        return 1 / seconds

    sides = [lambda: speed(ours)] + ([lambda: speed(peer)] if peer else [])
    try:
        found = in_turns(sides, args.repeats, args.shares)
    finally:
        if peer:
            peer.close()
    return {
        "name": f"plain, {args.tokens} tokens after {PREFIX}", "model": Path(path).name,
        "ours": found[0], "peer": found[1] if peer else [],
    }  # fmt: skip


def our_drafted(engine, prompt, length, tokens):
    """Tokens per second of a drafted answer, from its first token to its last."""
    import cudflash

    session = engine.session()
    greedy = cudflash.SamplingConfig(temperature=0.0)

    def speed():
        result = session.generate(
            prompt, max_tokens=tokens, sampling=greedy, speculative="on", verify_length=length,
            ignore_eos=True,
        ).result()  # fmt: skip
        return result.stats["decode_tps"]

    return speed


def peer_command(program, target, draft, prompt, length, args):
    """The command of llama.cpp for the same answer, by the settings of a fair comparison."""
    return [
        str(program), "-m", str(target), "-md", str(draft), "--spec-type", "draft-dflash",
        "--spec-draft-n-max", str(length), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0",
        "-p", prompt, "-n", str(args.tokens), "--temp", "0", "-t", str(args.threads), "-c",
        str(N_CTX), "--ignore-eos", "-ctk", "f16", "-ctv", "f16",
    ]  # fmt: skip


class NothingPrinted(PeerError):
    """The peer has ended without telling its figures."""


def parse_drafted(text):
    """Return (tokens per second, drafted, accepted) of what the peer has printed.

    Raises
    ------
    PeerError
        If the line about decoding is not there.
    """
    found = DECODED.search(text)
    if found is None or float(found[2]) == 0:
        last = (text.strip().splitlines() or ["no message"])[-1]
        raise NothingPrinted(f"llama.cpp printed no line 'decoded N tokens in S seconds' ({last})")
    counts = [pattern.search(text) for pattern in COUNTS.values()]
    drafted, accepted = (int(match[1]) if match else None for match in counts)
    return int(found[1]) / float(found[2]), drafted, accepted


def peer_drafted(command, notes):
    """Tokens per second of a drafted answer of llama.cpp; the model is loaded anew, untimed."""

    def speed():
        for _ in range(ATTEMPTS - 1):
            try:
                return once()
            except NothingPrinted:
                continue
        return once()

    def once():
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=DRAFT_TIMEOUT
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{command[0]}: {error}") from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerError(f"{command[0]} ended with exit status {done.returncode}: {last}")
        tps, drafted, accepted = parse_drafted(done.stderr + done.stdout)
        notes["peer_drafted"], notes["peer_accepted"] = drafted, accepted
        return tps

    return speed


def draft_rows(target, draft, args, absent):
    """Drafted decoding of a pair by both sides, one row per verify length and prompt."""
    import cudflash

    engine = cudflash.load(str(target), str(draft), device="cpu", threads=args.threads, n_ctx=N_CTX)
    kind, block = engine.draft_config.kind, engine.draft_config.block_size
    program = args.llama_speculative
    if program is None:
        absent.add("no llama-speculative-simple (--llama-speculative), so no drafted peer")
    for length in [n for n in args.lengths if n < block]:
        for number, prompt in enumerate(PROMPTS):
            notes = {}
            sides = [our_drafted(engine, prompt, length, args.tokens)]
            if program is not None:
                command = peer_command(program, target, draft, prompt, length, args)
                sides.append(peer_drafted(command, notes))
            try:
                found = in_turns(sides, args.repeats, args.shares)
            except PeerError as error:
                absent.add(f"{kind}, verify {length}: {error}")
                found = in_turns(sides[:1], args.repeats, args.shares)
            yield {
                "name": f"{kind}, verify {length}, prompt {number}", "model": Path(target).name,
                "ours": found[0], "peer": found[1] if len(found) > 1 else [], **notes,
            }  # fmt: skip


def files(args):
    """(targets measured plain, pairs measured drafted)."""
    if args.target:
        return [args.target], [(args.target, draft) for draft in args.draft]
    from cudflash.demo import demo_files

    target, drafts = demo_files()
    targets = [Path(target)]
    targets += [
        path for model in MODELS.values() if (path := args.models_dir / model.file_name).exists()
    ]
    return targets, [(Path(target), Path(draft)) for draft in drafts.values()]


def parse(argv):
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", type=Path, help="GGUF file of a model")
    add("--draft", type=Path, action="append", default=[], help="its draft; may be given twice")
    add("--models-dir", type=Path, default=Path("models"))
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=4, help="figures per side; even, so that A B B A closes")
    add("--tokens", type=int, default=128)
    add("--lengths", type=int, nargs="+", default=[7], help="verify lengths")
    add("--peer-python", type=Path, help="a Python that can import llama_cpp")
    add("--llama-bench", type=Path, default=_on_path("llama-bench"))
    add("--llama-speculative", type=Path, default=_on_path("llama-speculative-simple"))
    args = parser.parse_args(argv)
    args.shares = []
    if args.repeats < 1 or args.tokens < 2 or args.threads < 1:
        parser.error("--repeats and --threads must be at least 1, --tokens at least 2")
    if args.draft and not args.target:
        parser.error("--draft needs --target")
    for path in (args.target, *args.draft):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist: give the path of a GGUF file")
    return args


def _on_path(program):
    found = shutil.which(program)
    return Path(found) if found else None


def main(argv=None):
    """Measure and print; return the exit status."""
    args = parse(argv)
    rows, absent = [], set()
    targets, pairs = files(args)
    try:
        for path in targets:
            print(f"{path.name}: plain", file=sys.stderr)
            rows.append(plain_row(path, args, absent))
        for target, draft in pairs:
            print(f"{draft.name}: drafted", file=sys.stderr)
            rows += draft_rows(target, draft, args, absent)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    lines = []
    for row in rows:
        theirs = Spread.of(row["peer"])
        ratio = Spread.of(a / b for a, b in zip(row["ours"], row["peer"]))
        lines.append([
            row["name"], row["model"], Spread.of(row["ours"]).text(1),
            theirs.text(1) if theirs else "absent", ratio.text(2) if ratio else "–",
        ])  # fmt: skip
    print(table(["measure", "model", "cudflash, tok/s", "llama.cpp, tok/s", "ratio"], lines))
    for reason in sorted(absent):
        print(f"\nAbsent: {reason}.")
    if shares := Spread.of(args.shares):
        print(f"\nDuring cudflash's turns everything else used {100 * shares.median:.1f} % of the "
              f"machine (median), {100 * shares.high:.1f} % at most.")  # fmt: skip
    record = {
        "bench": "peer", **facts(), "threads": args.threads, "tokens": args.tokens, "rows": rows,
        "absent": sorted(absent), "others_shares": args.shares,
    }  # fmt: skip
    print("\n" + json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
