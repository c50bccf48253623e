r"""LLaVA's instruction format: what a record holds, and what is wrong with one.

A record is ``{"id": ..., "image": "a.jpg" | ["a.jpg", ...], "kind": ..., "conversations": [{"from": "human", "value":
"<image>\n..."}, {"from": "gpt", "value": "..."}, ...]}``; ``image`` and ``kind`` may be absent. As in LLaVA's own
training, what gpt says before the first human turn is left out (ShareGPT's records have such turns), and so is a last
human turn that nobody answers.
"""

from __future__ import annotations

from typing import Any

from subtoken_train.typed import shown

IMAGE_PLACEHOLDER = "<image>"


def record_id(row: Any, index: int) -> str:
    """The record's own id as text, or its place in the file."""
    return str(row.get("id", index) if isinstance(row, dict) else index)


def image_names(row: dict[str, Any]) -> list[str]:
    """Its images; none for a text-only record."""
    images = row.get("image") or []
    return [images] if isinstance(images, str) else images


def used_turns(row: dict[str, Any]) -> list[dict[str, str]]:
    """Its turns from the first one of human to the last one of gpt."""
    roles = [message.get("from") for message in row["conversations"]]
    start = next((place for place, role in enumerate(roles) if role != "gpt"), len(roles))
    turns: list[dict[str, str]] = row["conversations"][start:]
    return turns[:-1] if len(turns) % 2 and turns[-1].get("from") == "human" else turns


def text_length(row: dict[str, Any]) -> int:
    """Characters of its turns, without placeholders and the white space around them."""
    return sum(len(message["value"].replace(IMAGE_PLACEHOLDER, "").strip()) for message in used_turns(row))


def record_problem(row: Any) -> str | None:
    """What is wrong with a record and what to do about it; None when nothing is."""
    if not isinstance(row, dict) or not isinstance(row.get("conversations"), list) or not row["conversations"]:
        return 'it has no turns; a record is {"id", "image", "conversations": [{"from", "value"}, ...]}'
    names = image_names(row)
    if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
        return f"image is {shown(row['image'])}; a path or a list of paths is needed"
    messages = row["conversations"]
    if not all(isinstance(m, dict) and isinstance(m.get("value"), str) for m in messages):
        return 'a turn is not {"from": ..., "value": text}'
    used = used_turns(row)
    if not used or [message.get("from") for message in used] != ["human", "gpt"] * (len(used) // 2):
        roles = ", ".join(str(message.get("from")) for message in messages)
        return f"turns come from {roles}; they must alternate human, gpt and end with gpt"
    if not isinstance(row.get("kind"), str | None):
        return f"kind is {shown(row['kind'])}; a text is needed"
    return _placeholder_problem(used, len(names))


def _placeholder_problem(messages: list[dict[str, str]], num_images: int) -> str | None:
    counts = [message["value"].count(IMAGE_PLACEHOLDER) for message in messages]
    if any(counts[1::2]):
        return f"a gpt turn holds {IMAGE_PLACEHOLDER}; images belong in human turns"
    if sum(counts) == num_images:
        return None
    if num_images == 0:
        return f"{sum(counts)} {IMAGE_PLACEHOLDER} but no image; add the image's path or remove the placeholder"
    return (
        f"{sum(counts)} {IMAGE_PLACEHOLDER} for {num_images} image(s); write exactly one per image in the human turns"
    )
