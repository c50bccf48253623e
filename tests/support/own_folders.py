"""Folders as people have them: a few pictures and a table, texts, conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from tests.support.commands import printed


def pictures(folder: Path, count: int = 6, below: str = "images") -> list[str]:
    """Small pictures of different colours; their paths below ``folder``."""
    (folder / below).mkdir(parents=True, exist_ok=True)
    names = [f"{below}/{number:02d}.png" for number in range(count)]
    for number, name in enumerate(names):
        Image.new("RGB", (12, 12), (40 * number % 256, number, 90)).save(folder / name)
    return names


def table(folder: Path, rows: Iterable[Sequence[str]], name: str = "questions.csv", header: str = "") -> Path:
    """A CSV file; the usual header where none is given."""
    lines = [header or "image,question,answer", *(",".join(row) for row in rows)]
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def own_images(folder: Path, count: int = 6) -> Path:
    """Pictures and two questions about each, in the tiny VLM's words."""
    names = pictures(folder, count)
    table(folder, [row for name in names for row in ((name, "is there a 3 ?", "yes"), (name, "list .", "none"))])
    return folder


def conversations(path: Path, count: int = 400) -> Path:
    """Chats without images, as OpenAI's messages."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what comes after {i} ?"},
                {"role": "assistant", "content": f"{i + 1}"},
            ]
        }
        for i in range(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def inits(capsys, *argv: object) -> list[str]:
    """Run ``init`` that must succeed; its lines."""
    return printed(capsys, "init", *argv).splitlines()
