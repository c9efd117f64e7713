"""Record the run that the monitor's tests replay: true rounds of a tiny pair, scripted proposals.

    python -m tests.helpers.make_recording tests/vectors/recordings/scripted.jsonl

The tests' random target has no draft that guesses it, so proposals are made from its own plain
answer, spoiled after 7, 2, 5, 1, 3, 7, 0 and 4 tokens in turn, and after none between tokens 200 and
260: the gate closes there, and opens again. Everything else is real: the draft's context is computed
and wraps, the target verifies, the clock runs. Needs the ``test`` extra.
"""

import argparse
from pathlib import Path

import cudflash
from cudflash.recording import Recorder
from cudflash.spec.proposals import POINT_MASS, Proposal
from tests.helpers.speculation import GREEDY, draft_engine

KEEPS = (7, 2, 5, 1, 3, 7, 0, 4)
BAD = range(200, 260)  # answer indices at which nothing is right
PROMPT = list(range(3, 40))
N_TOKENS = 420


def scripted(plain):
    """A ``propose`` that knows the plain answer and is wrong on purpose."""
    rounds = iter(range(10**6))

    def propose(anchor, n, context):
        at = context.answer_index
        keep = 0 if at in BAD else KEEPS[next(rounds) % len(KEEPS)]
        right = plain[at + 1 : at + 1 + n]
        tokens = [t if i < keep else (t + 1) % context.vocab_size for i, t in enumerate(right)]
        return Proposal(tuple(tokens), POINT_MASS)

    return propose


def main():
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    engine = draft_engine("v1-muse-swa", "kq")
    request = {"max_tokens": N_TOKENS, "sampling": GREEDY, "ignore_eos": True}
    plain = engine.generate(PROMPT, speculative="off", **request)
    session = engine.session()
    session._drafter.drafter.propose = scripted(plain.tokens)  # all but the guesses is the draft's
    session.generate(PROMPT, **request).result()  # kernels and passes are made here
    recorder = Recorder.to_file(args.path)
    for event in session.generate(PROMPT, **request):
        recorder.see(event)
    recorder.close()
    if recorder.trouble:
        raise SystemExit(recorder.trouble)
    if session.tokens[len(PROMPT) :] != plain.tokens[:-1]:
        raise SystemExit("the drafted answer differs from the plain one")
    print(f"{args.path}: {args.path.stat().st_size} bytes, cudflash {cudflash.__version__}")


if __name__ == "__main__":
    main()
