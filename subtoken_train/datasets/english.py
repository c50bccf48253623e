"""The embedded English: prose of Python's own reference manual, in three disjoint splits; no paragraph stands twice."""

import json
import lzma
from functools import lru_cache
from pathlib import Path

from subtoken_train.artifact.whole_folder import FolderKind, whole_folder
from subtoken_train.errors import check_word
from subtoken_train.resources import resource

SNAPSHOT = "data/english/topics.json.xz"
SPLITS = ("train", "dev", "test")
_FILES = FolderKind("a folder of English text", "subtoken-train data english")
_HELD_OUT = {7: "dev", 9: "test"}  # last digit of a document's place; the rest is for training
_SHORTEST = 6  # words of a paragraph that counts as prose


def documents(split: str) -> list[str]:
    """Return the documents of ``split`` (``train`` | ``dev`` | ``test``): one per topic, a paragraph per line."""
    check_word("split", split, SPLITS)
    return [text for place, text in enumerate(_prose()) if _HELD_OUT.get(place % 10, "train") == split]


def write_english(folder: str | Path, overwrite: bool = False) -> None:
    """Write ``train.jsonl``, ``dev.jsonl`` and ``test.jsonl``: ``{"text": document}`` a line; ``test.txt`` whole."""
    with whole_folder(Path(folder), overwrite, _FILES) as partial:
        for split in SPLITS:
            lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents(split)]
            (partial / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
            print(f"{split}: {len(lines)} documents")
        (partial / "test.txt").write_text("\n".join(documents("test")), encoding="utf-8")  # as the task wikitext reads


@lru_cache(maxsize=1)
def _prose() -> tuple[str, ...]:
    seen, texts = set[str](), list[str]()
    for _, text in sorted(json.loads(lzma.decompress(resource(SNAPSHOT).read_bytes())).items()):
        blocks = dict.fromkeys(" ".join(block.split()) for block in text.split("\n\n"))
        prose = (block for block in blocks if block.endswith(".") and len(block.split()) >= _SHORTEST)
        if paragraphs := [block for block in prose if block not in seen]:
            seen.update(paragraphs)
            texts.append("\n".join(paragraphs))
    return tuple(texts)
