"""Programs of a document's code blocks, run as a reader would: in a folder of their own, on this source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.readme_blocks import Block

SHELL = ("bash", "-euxo", "pipefail", "-c")


class Reader:
    """Somebody who types a document's blocks.

    Attributes:
        folder: where.
        source: the tree whose package runs.
    """

    def __init__(self, folder: Path, source: Path, programs: Path) -> None:
        self.folder = folder
        programs.mkdir()
        for name, further in (("python", ""), ("subtoken-train", "-m subtoken_train ")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {further}"$@"\n')
            (programs / name).chmod(0o755)
        settings = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "1"}

    def run(self, *argv: str) -> str:
        """What a program that must end well says, stdout and then stderr."""
        done = subprocess.run(argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def type(self, block: Block) -> str:
        """What a block says."""
        program = ("python", "-c") if block.language == "python" else SHELL
        return self.run(*program, block.text)
