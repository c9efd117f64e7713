"""Write the text that ``cudflash bench -d`` puts before a prompt: our own documents and sources.

    python scripts/make_bench_filler.py > cudflash/bench/prompts/filler.txt

The file is a snapshot and stays as it is: records made with different fillers cannot be compared, so
run this only together with a new version of the prompt sets. Natural text, because a repeated
sentence hides conditioning faults.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 160_000  # characters: about 40,000 tokens
FILES = (
    "docs/SPECULATION.md", "cudflash/spec/gate.py", "docs/SAMPLING.md", "cudflash/stop.py",
    "docs/NUMERICS.md", "cudflash/spec/drafters.py", "docs/TOKENIZER.md", "cudflash/session.py",
    "cudflash/sampling/dry.py", "loader/gguf.py", "cudflash/spec/round.py", "cudflash/receipt.py",
    "cudflash/model/cache.py", "cudflash/spec/acceptance.py", "cudflash/sampling/samplers.py",
    "cudflash/generation.py", "loader/tokenizer.py", "cudflash/spec/stats.py",
    "cudflash/sampling/chain.py", "loader/draft_config.py", "cudflash/verify.py",
)  # fmt: skip


def git(*arguments):
    """Output of git in the repository."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def main():
    """Write the text to stdout, ASCII only, so that it can be cut anywhere."""
    commit = git("log", "-1", "--format=%h").strip()
    parts, size = [], 0
    for name in FILES:
        text = git("show", f"{commit}:{name}").encode("ascii", "ignore").decode().strip() + "\n\n"
        parts.append(text)
        size += len(text)
        if size > LIMIT:
            break
    print(f"{len(parts)} files as of commit {commit}", file=sys.stderr)
    sys.stdout.write("".join(parts)[:LIMIT].rstrip() + "\n")


if __name__ == "__main__":
    main()
