"""Commands that print or write what is to be run, with words of a shell in every name; bash runs it."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.hostile.acts import command
from tests.hostile.case import CANARY, Answer, Case, Expect, Place, Reference
from tests.hostile.pool import VLM

TOUCH = f"touch {CANARY}"
PIECES = (
    *(f"\n{TOUCH}\n", f"\r\n{TOUCH} #", f"`{TOUCH}`", f"$({TOUCH})", f"; {TOUCH};", f"' {TOUCH} '", f'" {TOUCH} "'),
    *("\n", "\t", " ", "'", '"', "\\", "#", "*", "~", "!", "$HOME", "&", "\x1b[31m", "\u202e", "\u200b", "\x85", "é"),
)
"""What a shell or a terminal would take for its own."""


def name(draw: random.Random) -> str:
    """A name of a file or a folder."""
    return "".join(f"x{piece}" for piece in draw.choices(PIECES, k=draw.choice((1, 2, 4))))


def make(draw: random.Random, place: Place) -> Case:
    """A sweep, a sweep as an array, a grid's fits or a recipe's anchor."""
    kind, mine, folder = draw.choice(("--dry-run", "--slurm", "grid", "anchor")), name(draw), f"runs/{name(draw)}"
    text = (place.pool / f"{VLM}.yaml").read_text()
    place.write(f"{mine}.yaml", text)
    if kind == "anchor":
        place.write("plain.yaml", text)
        made = f"{name(draw)}.yml"
        words = ["recipes", "anchor", f"{mine}.yaml", made]
        return Case(f"{kind}: {mine!r}", words, Expect.TAKEN, (made,), reference=settings(place.work, made))
    fit = ["fit", "--config", f"{mine}.yaml"]
    if kind == "grid":
        arms = [{"adapter": f"runs/{mine}/adapter"}]
        grid = {"out": "results", "anchors": "none", "tasks": ["scenes_pope"], "arms": arms}
        place.write("grid.yaml", yaml.safe_dump(grid))
        words = ["sweep", "--grid", "grid.yaml", "--slurm"]
        return Case(
            f"{kind}: {mine!r}", words, Expect.TAKEN, reference=run(place, [[*fit, f"--output_dir=runs/{mine}"]])
        )
    right = [[*fit, f"--data.seed={seed}", f"--output_dir={folder}/seed={seed}"] for seed in (1, 2)]
    words = ["sweep", *fit[1:], "--set", "data.seed=1,2", "--output_dir", folder, kind]
    # what Slurm reads itself knows no way to write such a character
    unnamed = kind == "--slurm" and not folder.isprintable()
    expect, says = (Expect.REFUSED, ("#SBATCH",)) if unnamed else (Expect.TAKEN, ())
    return Case(f"{kind}: {mine!r} {folder!r}", words, expect, reference=run(place, right), says=says)


def run(place: Place, right: Sequence[Sequence[str]]) -> Reference:
    """Each task of the script, or each of its lines, starts ``subtoken-train`` with these words; there are no more."""

    def difference(answer: Answer) -> str | None:
        programs = place.root / "bin"
        programs.mkdir()
        for program, said in (("subtoken-train", '"$@"'), ("srun", '"${@:2}"')):
            (programs / program).write_text(f"#!/bin/bash\nprintf '%s\\0' {said}\nprintf '\\n\\0'\n")
            (programs / program).chmod(0o755)
        tasks = range(len(right)) if "SLURM" in answer.out else range(1)
        said = b""
        for task in tasks:
            around = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(task)}
            done = subprocess.run(
                ["bash", "-c", answer.out], env=around, cwd=place.root, capture_output=True, check=False
            )
            said += done.stdout + done.stderr
        if (place.root / CANARY).exists():
            return f"the script ran a name: {answer.out[-600:]}"
        wanted = b"".join(os.fsencode("\0".join((*words, "\n", ""))) for words in right)
        return None if said == wanted else f"{said[-400:]!r} is not {wanted[-400:]!r}"

    return difference


def settings(work: Path, made: str) -> Reference:
    """The file says what the command writes where all names are plain; comments may differ, settings may not."""

    def difference(answer: Answer) -> str | None:
        assert command(["recipes", "anchor", str(work / "plain.yaml"), str(work / "plain.yml")]).code == 0
        got, right = (yaml.safe_load((work / path).read_text()) for path in (made, "plain.yml"))
        return None if got == right else f"{got} is not {right}"

    return difference
