"""Write the golden traces of the embedded pair: what its drafts propose, round by round.

    python scripts/make_demo_traces.py

Writes tests/vectors/demo_pair/traces.json and its line of SHA256SUMS. To be run after the files of the
pair or docs/NUMERICS.md have changed, never to make a failing test pass.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.demo_faults import FOLDER, KINDS, chosen, pair, trace

TOKENS = 48
PER_KIND = 2


def main():
    """Make and write the traces."""
    made = {"n_tokens": TOKENS, "drafts": {}}
    for kind in KINDS:
        one = pair(kind)
        made["drafts"][kind] = {
            "target_sha256": one.target_digest(),
            "draft_sha256": one.draft.digest(),
            "traces": [trace(one, kind, index, TOKENS) for index, _ in chosen(PER_KIND)],
        }
        rounds = [r for t in made["drafts"][kind]["traces"] for r in t["rounds"]]
        print(kind, len(rounds), "rounds,", sum(r[3] for r in rounds), "accepted")
    path = FOLDER / "traces.json"
    path.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
    sums = FOLDER / "SHA256SUMS"
    lines = [line for line in sums.read_text().splitlines() if not line.endswith("  traces.json")]
    lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  traces.json")
    sums.write_text("\n".join(lines) + "\n")
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
