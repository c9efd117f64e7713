"""llama.cpp's samplers, one class each: `apply` changes a candidate list, `accept` sees a token.

All arithmetic is float32 in list order, as in llama.cpp, unless a line says otherwise; sums that
llama.cpp forms one by one are ``np.add.accumulate``, which also adds one by one. Random draws come
only from the generator a sampler owns. Invariant: everything that changes from token to token is
in `state()`.

Source: llama.cpp ``src/llama-sampler.cpp``; behaviour reproduced, no code taken.
"""

from collections import Counter

import numpy as np

from cudflash.sampling.candidates import draw_index, normalised
from cudflash.sampling.floatmath import log2f, logf, powf
from cudflash.sampling.mt19937 import Mt19937
from cudflash.sampling.sorting import introsort

_F32_LOWEST = np.finfo(np.float32).min


class Sampler:
    """One step of the chain. A step without memory keeps these defaults."""

    def apply(self, candidates):
        """Change the candidate list."""
        raise NotImplementedError

    def accept(self, token):
        """Take note of a token that became part of the text."""

    def state(self):
        """What this step remembers, as a value that later calls do not change."""

    def set_state(self, state):
        """Return to a state given by ``state()``."""

    def reset(self):
        """Forget everything, as just built with the same seed."""


class LogitBias(Sampler):
    """Add a bias to the logits of given ids."""

    def __init__(self, bias):
        self.ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))

    def apply(self, candidates):
        logits = candidates.logits.copy()
        logits[self.ids] += self.bias
        candidates.replace_logits(logits)


class Penalties(Sampler):
    """Repeat, frequency and presence penalty of ids among the last ``last_n`` accepted."""

    def __init__(self, last_n, repeat, frequency, presence):
        self.last_n = last_n
        self.repeat = np.float32(repeat)
        self.frequency = np.float32(frequency)
        self.presence = np.float32(presence)
        self.reset()

    def reset(self):
        self._recent, self._counts = [], Counter()

    def accept(self, token):
        if len(self._recent) == self.last_n:
            old = self._recent.pop(0)
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]
        self._recent.append(token)
        self._counts[token] += 1

    def state(self):
        return tuple(self._recent)

    def set_state(self, state):
        self._recent, self._counts = list(state), Counter(state)

    def apply(self, candidates):
        candidates.sorted = False
        if not self._counts:
            return
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        places = ids
        if not candidates.fresh:
            at = {int(ident): i for i, ident in enumerate(candidates.ids)}
            found = [(at[i], j) for j, i in enumerate(ids.tolist()) if i in at]
            places = np.array([p for p, _ in found], np.int64)
            counts = counts[[j for _, j in found]]
        logits = candidates.logits.copy()
        chosen = logits[places]
        chosen = np.where(chosen <= 0, chosen * self.repeat, chosen / self.repeat)
        logits[places] = chosen - (counts * self.frequency + self.presence)
        candidates.replace_logits(logits)


class TopNSigma(Sampler):
    """Logits below max - n * std become -inf; std over finite logits, divided by their count."""

    def __init__(self, n):
        self.n = np.float32(n)

    def apply(self, candidates):
        logits = candidates.logits
        if len(logits) <= 1:
            return
        finite = logits[logits != -np.inf]
        count = np.float32(len(finite))
        mean = np.add.accumulate(finite)[-1] / count
        deviation = (finite - mean).astype(np.float64)
        spread = np.sqrt(float32_sum_of_doubles(deviation * deviation) / count)
        lowest = finite.max() - self.n * spread
        candidates.replace_logits(np.where(logits < lowest, np.float32(-np.inf), logits))


class TopK(Sampler):
    """Keep the k largest logits, in descending order."""

    def __init__(self, k):
        self.k = k

    def apply(self, candidates):
        k = min(self.k, len(candidates))
        if candidates.sorted:
            candidates.shorten(k)
        else:
            candidates.sort(k)


class Typical(Sampler):
    """Keep the candidates whose surprise is closest to the entropy; order: by that distance."""

    def __init__(self, p, min_keep):
        self.p = np.float32(p)
        self.min_keep = min_keep

    def apply(self, candidates):
        candidates.softmax(sort=True)
        p = candidates.p
        surprise = -logf(p)
        with np.errstate(invalid="ignore"):  # 0 * inf where a probability is 0: NaN, see below
            entropy = np.add.accumulate(p * surprise)[-1]
            distance = np.abs(surprise - entropy)
        if np.isnan(entropy):
            distance = np.zeros_like(p)  # comparisons with NaN are false: all keys are equal
        order = np.argsort(distance)
        settled = 0
        keep = self._count(p[order])
        while settled < min(keep + 1, len(p)):
            settled = min(2 * keep + 64, len(p))
            head = distance[order[: settled + 1]]
            if (head[1:] == head[:-1]).any():
                order[:settled] = introsort(-distance, np.arange(settled))
                keep = self._count(p[order])
        candidates.take(order[:keep])
        candidates.sorted = False

    def _count(self, p):
        running = np.add.accumulate(p)
        first = int(np.searchsorted(running, self.p, "right"))  # the first running sum > p
        return min(max(first, self.min_keep - 1) + 1, len(p))


class TopP(Sampler):
    """Keep the shortest descending prefix whose probability reaches p."""

    def __init__(self, p, min_keep):
        self.p = np.float32(p)
        self.min_keep = min_keep

    def apply(self, candidates):
        candidates.softmax(sort=False)
        n = len(candidates)
        if candidates.sorted:
            candidates.shorten(self._count(candidates.p, n))
            return
        if n > 1024:
            # llama.cpp orders 256 first and all only if they do not reach p; ties can fall
            # differently in the two, so the same two steps are taken here
            ordering = candidates.ordering(256)
            keep = self._count(candidates.p[ordering.order], n)
            if keep <= 256:
                candidates.adopt(ordering)
                candidates.shorten(keep)
                return
        candidates.sort(n)
        candidates.shorten(self._count(candidates.p, n))

    def _count(self, p, n):
        """Candidates to keep; more than len(p) where p does not reach the sum."""
        first = int(np.searchsorted(np.add.accumulate(p), self.p))  # the first running sum >= p
        return min(max(first, self.min_keep - 1) + 1, n)


class MinP(Sampler):
    """Keep the candidates with at least p times the largest probability."""

    def __init__(self, p, min_keep):
        self.log_p = logf(np.array([p], np.float32))[0]
        self.min_keep = min_keep

    def apply(self, candidates):
        logits = candidates.logits
        if not candidates.sorted:
            lowest = max(logits.max(), _F32_LOWEST) + self.log_p
            kept = np.flatnonzero(logits >= lowest)
            if len(kept) and len(kept) >= self.min_keep:
                candidates.take(kept)
                return
            candidates.sort(len(candidates))
            logits = candidates.logits
        lowest = logits[0] + self.log_p
        reach = len(logits) - int(np.searchsorted(logits[::-1], lowest))  # leading logits >= lowest
        candidates.shorten(min(max(reach, self.min_keep, 1), len(logits)))


class Xtc(Sampler):
    """With a given chance, drop all candidates above a probability but the least likely of them."""

    def __init__(self, probability, threshold, min_keep, seed):
        self.probability = np.float32(probability)
        self.threshold = np.float32(threshold)
        self.min_keep = min_keep
        self.rng = Mt19937(seed)

    def reset(self):
        self.rng = Mt19937(self.rng.seed)

    def state(self):
        return self.rng.state()

    def set_state(self, state):
        self.rng.set_state(state)

    def apply(self, candidates):
        if len(candidates) < 2 or self.rng.uniform_float() > self.probability:
            return
        candidates.softmax(sort=True)
        below = candidates.p < self.threshold
        above = int(np.argmax(below)) if below.any() else len(candidates)
        last = max(above - 1, 0)
        if last > 0 and len(candidates) - last >= self.min_keep:
            candidates.drop_front(last)


class Temperature(Sampler):
    """Divide logits by a temperature; at 0 or below only the first largest logit stays finite."""

    def __init__(self, temperature):
        self.temperature = np.float32(temperature)

    def apply(self, candidates):
        scale_by_temperature(candidates, self.temperature)


class DynamicTemperature(Sampler):
    """A temperature between t - range and t + range, by the entropy of the candidates."""

    def __init__(self, temperature, spread, exponent):
        temperature, spread = np.float32(temperature), np.float32(spread)
        self.low = max(np.float32(0), temperature - spread)
        self.high = temperature + spread
        self.exponent = np.float32(exponent)

    def apply(self, candidates):
        if len(candidates) <= 1:
            return
        count = np.float32(len(candidates))
        highest = -logf(np.array([np.float32(1) / count]))[0]
        candidates.softmax(sort=True)
        p = candidates.p[candidates.p > 0]
        entropy = np.add.accumulate(-(p * logf(p)))[-1]
        share = powf(entropy / highest, self.exponent)
        scale_by_temperature(candidates, self.low + (self.high - self.low) * share)


def scale_by_temperature(candidates, temperature):
    """Divide (not multiply by the inverse), or mask all but the first largest at 0 or below."""
    logits = candidates.logits
    if temperature > 0:
        candidates.replace_logits(logits / temperature)
        return
    masked = np.full(len(logits), -np.inf, np.float32)
    best = int(np.argmax(logits))
    masked[best] = logits[best]
    candidates.replace_logits(masked)


class Greedy(Sampler):
    """Select the largest logit; among equal ones the lowest id."""

    def apply(self, candidates):
        logits = candidates.logits
        best = int(np.argmax(logits))
        if not candidates.fresh:
            equal = np.flatnonzero(logits == logits[best])
            if len(equal) > 1:
                best = int(equal[np.argmin(candidates.ids[equal])])
        candidates.selected = best


class Dist(Sampler):
    """Select by one double of the generator; exactly one per call, even with one candidate."""

    def __init__(self, seed):
        self.rng = Mt19937(seed)

    def reset(self):
        self.rng = Mt19937(self.rng.seed)

    def state(self):
        return self.rng.state()

    def set_state(self, state):
        self.rng.set_state(state)

    def apply(self, candidates):
        uniform = self.rng.uniform_double()
        candidates.selected = draw_index(candidates.weights(), uniform)

    @staticmethod
    def set_probabilities(candidates):
        """Set p as llama.cpp leaves it after the draw (not needed for the draw itself)."""
        weights = candidates.weights()
        candidates.p = normalised(weights, np.add.accumulate(weights.astype(np.float64))[-1])


class _Mirostat(Sampler):
    """What both versions share: the surprise aimed at, and the draw.

    The draw is C++'s ``discrete_distribution``: one double unless one candidate is left, then none.
    """

    def __init__(self, seed, tau, eta):
        self.tau, self.eta = np.float32(tau), np.float32(eta)
        self.rng = Mt19937(seed)
        self.mu = np.float32(2) * self.tau

    def reset(self):
        self.rng = Mt19937(self.rng.seed)
        self.mu = np.float32(2) * self.tau

    def state(self):
        return self.rng.state(), self.mu

    def set_state(self, state):
        self.rng.set_state(state[0])
        self.mu = state[1]

    def apply(self, candidates):
        candidates.softmax(sort=True)
        self.truncate(candidates)
        candidates.softmax(sort=True)
        index = 0
        if len(candidates) > 1:
            p = candidates.p.astype(np.float64)
            running = np.add.accumulate(p / np.add.accumulate(p)[-1])
            running[-1] = 1.0
            index = int(np.searchsorted(running, self.rng.uniform_double()))
        candidates.selected = index
        error = -log2f(candidates.p[index]) - self.tau
        self.mu = self.mu - self.eta * error

    def truncate(self, candidates):
        """Shorten the sorted list to what this version admits."""
        raise NotImplementedError


class MirostatV1(_Mirostat):
    """Mirostat 1.0: the number of candidates from an estimated Zipf exponent (100 tokens)."""

    M = 100

    def __init__(self, n_vocab, seed, tau, eta):
        super().__init__(seed, tau, eta)
        self.n_vocab = np.float32(n_vocab)

    def truncate(self, candidates):
        p = candidates.p[: self.M]
        rank = np.arange(1, len(p), dtype=np.float32)
        t = logf((rank + np.float32(1)) / rank)
        with np.errstate(all="ignore"):
            ratio = p[:-1] / p[1:]
            b = np.where(np.isfinite(ratio), logf(np.where(np.isfinite(ratio), ratio, 1)), ratio)
            top = np.add.accumulate(t * b)[-1] if len(t) else np.float32(0)
            bottom = np.add.accumulate(t * t)[-1] if len(t) else np.float32(0)
            s = top / bottom
            epsilon = s - np.float32(1)
            bulk = np.float32(1) - powf(self.n_vocab, -epsilon)
            k = powf((epsilon * powf(np.float32(2), self.mu)) / bulk, np.float32(1) / s)
        # note: C converts NaN and what does not fit an int to the lowest int on x86, so to 1 here
        count = int(k) if abs(k) < 2**31 else 1
        candidates.shorten(max(count, 1))


class MirostatV2(_Mirostat):
    """Mirostat 2.0: candidates with a surprise above mu are dropped."""

    def truncate(self, candidates):
        p = candidates.p
        low, high = 0, len(p)  # the first place whose surprise exceeds mu; surprise never falls
        while low < high:
            middle = (low + high) // 2
            if -log2f(p[middle]) > self.mu:
                high = middle
            else:
                low = middle + 1
        candidates.shorten(max(low, 1))


def float32_sum_of_doubles(terms) -> np.float32:
    """Return the sum of C++'s ``float acc = 0; for (double t : terms) acc += t;``, exactly.

    Each step rounds float64(acc) + t to float64, then to float32. Between two powers of two the
    accumulator moves in steps of one unit u, so a step adds round(t / u): those are summed at once
    up to the next power of two. Terms too close to half a unit, where the rounding direction
    depends on the accumulator, take one honest step each.

    Parameters
    ----------
    terms : ndarray of shape (n,), float64
        Not negative, finite.
    """
    acc = np.float32(0)
    i, n = 0, len(terms)
    while i < n:
        acc = np.float32(np.float64(acc) + terms[i])
        i += 1
        if acc < 2.0**-100 or not np.isfinite(acc):
            continue
        unit = float(np.spacing(acc))
        rest = terms[i : i + min(max(256, i), 16384)]
        units = rest / unit
        whole = np.rint(units)
        safe = np.abs(np.abs(units - whole) - 0.5) > 2.0**-20
        limit = np.float64(2.0 ** (np.floor(np.log2(float(acc))) + 1))
        reach = np.float64(acc) / unit + np.add.accumulate(whole)
        good = safe & (reach * unit < limit)
        steps = len(good) if good.all() else int(np.argmin(good))
        if steps:
            acc = np.float32(reach[steps - 1] * unit)
            i += steps
    return acc
