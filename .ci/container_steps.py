"""Runs what the Dockerfile runs, without a container: its RUN lines and its default command, in an empty folder.

    python .ci/container_steps.py            # needs the package index; takes minutes
    python .ci/container_steps.py --steps 3  # of the default command's training
    python .ci/container_steps.py --dry-run

Stages follow one another in one folder, which the image's own folders lie in; the environment holds nothing but PATH,
what ENV and ARG say, and what tells pip where to look. That a base image has what the lines need is not shown by it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("/src", "/wheels", "/opt/venv", "/runs")
"""Of the image; here they lie below the trial's folder."""
PASSED_ON = ("PATH", "LANG")
_PIP = re.compile(r"(PIP_|SSL_CERT|HTTPS?_PROXY|https?_proxy)")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its words) of a Dockerfile, comments left out and continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, words.strip()) for name, _, words in (line.strip().partition(" ") for line in joined)]


def ignored(path: str, rules: list[str]) -> bool:
    """Whether ``.dockerignore`` leaves a path of the build's folder out: the last rule that matches it decides."""
    found = False
    for rule in rules:
        name = rule.removeprefix("!").removeprefix("**/")
        parents = ["/".join(path.split("/")[: depth + 1]) for depth in range(path.count("/") + 1)]
        names = path.split("/") if "**/" in rule else parents
        if any(fnmatch(one, name) for one in names):
            found = not rule.startswith("!")
    return found


def context_files() -> list[str]:
    """What ``COPY . DESTINATION`` copies: the files that git knows, but those of ``.dockerignore``."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for path in known if not ignored(path, rules) and (ROOT / path).is_file()]


def here(words: str, trial: Path) -> str:
    """The words with the image's folders below ``trial``."""
    pattern = "|".join(map(re.escape, FOLDERS))
    return re.sub(rf"(?<![\w./])({pattern})(?![\w-])", lambda found: f"{trial}{found[0]}", words)


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the lines, run nothing")
    parser.add_argument("--steps", type=int, help="of the default command's training (default: the recipe's)")
    args = parser.parse_args()
    trial = Path(tempfile.mkdtemp(prefix="container-"))
    (trial / "opt").mkdir()
    environment = {k: v for k, v in os.environ.items() if k in PASSED_ON or _PIP.match(k)}
    place = trial
    try:
        for name, words in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
            given = here(words, trial)
            if name in ("ARG", "ENV"):
                key, _, value = given.partition("=")
                environment[key] = value.replace("$PATH", environment["PATH"])
            elif name == "WORKDIR":
                place = Path(given)
            elif name == "COPY" and not words.startswith("--from"):
                for path in context_files():
                    target = Path(given.split()[1]) / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ROOT / path, target)
            if name not in ("RUN", "CMD"):
                continue
            if name == "CMD" and args.steps is not None:
                given = given.replace("--overwrite", f"--overwrite --trainer.max_steps {args.steps}")
            command = json.loads(given) if name == "CMD" else ["sh", "-c", given]
            print(f"{name} {words}", flush=True)
            if not args.dry_run:
                subprocess.run(command, check=True, cwd=place, env=environment)
    except subprocess.CalledProcessError as error:
        print(f"exit code {error.returncode}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(trial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
