"""Proof that what a session has done before does not show: answers of a used one against a fresh one.

Owns which requests are made in which order. Must not know how two answers are compared. Every
request is answered three times: plainly and drafted by fresh sessions' measure, and drafted by one
that has answered all requests before it. What a state of a target carries on by mistake, rows of a
cache, a recurrent state, a draft's context, would show as another token.
"""

from dataclasses import dataclass

import numpy as np

from cudflash.drafters import Cycle

REQUESTS = 6
MAX_TOKENS = 24
KS = (15, 0, 3, 1, 7, 2)  # right tokens per round of the scripted drafter


@dataclass(frozen=True)
class Script:
    """Requests in the order in which one session gets them."""

    name: str  # "requests", "shorter" or "alternating"
    prompts: tuple  # of token ids


def scripts(ids, n_requests, seed):
    """Return the scripts made of a prompt's token ids; lengths and contents are drawn by ``seed``.

    - requests: random lengths, random parts of the prompt, some of them repeated whole;
    - shorter: the longest prompt there is, then a beginning of it, then a short other one;
    - alternating: two conversations by turns, each longer than before.
    """
    ids = list(ids)
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(n_requests):
        n = int(rng.integers(1, len(ids) + 1))
        turned = ids[index % 3 :] + ids[: index % 3]  # other tokens from the first one on, or not
        requests.append(turned[:n])
    longest = ids + ids[::-1]
    half = max(1, len(ids) // 2)
    one, two = list(ids), list(ids[:half]) + list(ids[:half])[::-1]
    turns = [one, two, one + two[:half], two + one[:half]]
    return (
        Script("requests", tuple(requests)),
        Script("shorter", (longest, ids[:half], ids[-1:])),
        Script("alternating", tuple(turns)),
    )


def session_checks(verifier, ids, n_requests=REQUESTS):
    """Yield a Check per request.

    Parameters
    ----------
    verifier : Verifier
    ids : list of int
        A prompt.
    n_requests : int
        Requests of random lengths.
    """
    engine = verifier.engine
    limit = engine.n_ctx - MAX_TOKENS
    drafts = engine.draft is not None or engine.mtp_k is not None
    for script in scripts(ids, n_requests, verifier.seed):
        session = engine.session()
        for index, prompt in enumerate(script.prompts):
            prompt = prompt[: max(1, limit)]
            sampling = verifier.modes[index % 2]
            room = min(MAX_TOKENS, engine.n_ctx - len(prompt))
            options = {"max_tokens": room, "ignore_eos": True}
            plain = verifier.answer(prompt, sampling, speculative="off", **options)
            drafter = None
            if not drafts or index % 3 == 1:
                drafter = Cycle(plain.tokens, KS)
            length = verifier.lengths[-1] if drafter is None else 15
            drafted = verifier.answer(
                prompt, sampling, session=session, drafter=drafter, speculative="on",
                verify_length=length, **options,
            )  # fmt: skip
            yield verifier.compare(
                f"session-{script.name}", index, prompt, plain, drafted, length, sampling
            )
        session.close()
