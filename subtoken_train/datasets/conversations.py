"""The forms in which people keep conversations, all turned into LLaVA's: the one place that knows any other.

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}], "image": ...}  LLaVA, ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], "images": [...]}  OpenAI

Either list may have either pair of keys, ``from`` and ``value`` or ``role`` and ``content``, and either key may name
the images. A content is a text or a list of parts (``text``, ``image_url``, ``image``, as OpenAI and transformers write
them). A first ``system`` message, or a text ``system`` beside the list, goes in front of the first question, where chat
formats put it that have no place of its own for it. Nothing is downloaded: images are files.
"""

from __future__ import annotations

from typing import Any

from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER, used_turns, without_placeholders
from subtoken_train.errors import unknown_name
from subtoken_train.typed import shown

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "human"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "gpt"),
    "system": "system",
}
"""Whose turn a role is."""
_TOOLS = ("tool", "function", "function_call", "observation", "ipython", "tool_call", "tool_response", "environment")
CONVERSATION_LISTS = ("conversations", "messages")
"""Under which a record keeps its messages."""


def llava_form(row: Any) -> Any:
    """A record in LLaVA's form; one that is no conversation at all comes back as it is, for ``record_problem``.

    Raises:
        ValueError: what it says cannot be trained on; the message counts from 1.
    """
    if not isinstance(row, dict):
        return row
    there = [name for name in CONVERSATION_LISTS if isinstance(row.get(name), list) and row[name]]
    if not there:
        return row
    if len(there) > 1:
        raise ValueError(f"it has {' and '.join(there)}, and one of them is read; leave the other out")
    name = there[0]
    _refuse_tools(row)
    own_names, turns = [], []
    for number, message in enumerate(row[name], 1):
        if not isinstance(message, dict):
            return row
        role, content = (_either(message, *keys) for keys in (("from", "role"), ("value", "content")))
        text, names = _content(content, number)
        own_names += names
        speaker = _speaker(role, number, message)
        if name == "messages" and speaker == "gpt" and not _is_text(text):
            raise ValueError(f"message {number}, an answer, is empty; write the answer, or drop the record")
        turns.append({"from": speaker, "value": text})
    made = {key: value for key, value in row.items() if key not in ("messages", "images", "system")}
    names = _images(row, own_names)
    if names:
        made["image"] = names
    return {**made, "conversations": _with_system(turns, row.get("system"))}


def conversation_text(row: dict[str, Any]) -> str:
    """A conversation without images, in LLaVA's form, as one document for a language model."""
    turns = [without_placeholders(row, turn["value"]) for turn in used_turns(row)]
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return "\n".join(f"USER: {question} ASSISTANT: {answer}" for question, answer in pairs)


def _either(message: dict[str, Any], first: str, second: str) -> Any:
    return message[first] if first in message else message.get(second)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _speaker(role: Any, number: int, message: dict[str, Any]) -> Any:
    """``human``, ``gpt`` or ``system``."""
    if (isinstance(role, str) and role in _TOOLS) or message.get("tool_calls") or message.get("function_call"):
        raise ValueError(f"message {number} calls a tool or is a tool's answer, which is not trained; drop the record")
    if message.get("weight", 1) != 1:
        raise ValueError(f"message {number} has weight {shown(message['weight'])}; all answers of a record are learnt")
    if not isinstance(role, str) or role not in _SPEAKERS:
        got = role if isinstance(role, str) else shown(role)
        raise ValueError(f"message {number}: {unknown_name('role', got, _SPEAKERS)}")
    return _SPEAKERS[role]


def _content(content: Any, number: int) -> tuple[Any, list[str]]:
    """A message's text with a placeholder per image, and the images that it names itself."""
    if not isinstance(content, list):
        return content, []
    if not content:
        raise ValueError(f"message {number} is an empty list; write a text, or parts: text, image or image_url")
    lines, names = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            lines.append(part["text"])
        elif kind in ("image", "image_url"):
            lines.append(IMAGE_PLACEHOLDER)
            names += _part_name(part, number)
        else:
            raise ValueError(f"message {number} has a part {shown(part)}; parts are text, image or image_url")
    return "\n".join(lines), names


def _part_name(part: dict[str, Any], number: int) -> list[str]:
    """The file that a part names; none where the record lists its images."""
    given = next((part[key] for key in ("image_url", "image", "path", "url") if part.get(key) is not None), None)
    if isinstance(given, dict):
        given = given.get("url")
    elif given is None:
        return []
    if not isinstance(given, str) or given.startswith(("data:", "http://", "https://")):
        raise ValueError(f"message {number} names the image {shown(given)}; save it as a file, and name that")
    return [given.removeprefix("file://")]


def _images(row: dict[str, Any], own: list[str]) -> Any:
    """The images of a record, from the one place that names them."""
    beside = [row[key] for key in ("image", "images") if row.get(key)]
    if len(beside) + bool(own) > 1:
        raise ValueError("images are named in several places; name them in image, in images, or in the messages")
    return own or (beside[0] if beside else None)


def _with_system(turns: list[dict[str, Any]], beside: Any) -> list[dict[str, Any]]:
    """The turns, what the system says put in front of the first question."""
    told = [beside] if beside else []
    if turns[0]["from"] == "system":
        told, turns = [*told, turns[0]["value"]], turns[1:]
    if not all(isinstance(text, str) for text in told) or any(turn["from"] == "system" for turn in turns):
        raise ValueError("a system message is no text, or not the first; one, at the start, is read")
    asked = next((place for place, turn in enumerate(turns) if turn["from"] == "human"), None)
    if asked is None or not isinstance(turns[asked]["value"], str):
        return turns
    text = "\n\n".join([*(text.strip() for text in told if text.strip()), turns[asked]["value"]])
    return [*turns[:asked], {**turns[asked], "value": text}, *turns[asked + 1 :]]


def _refuse_tools(row: dict[str, Any]) -> None:
    if row.get("tools") or row.get("functions"):
        raise ValueError("it lists tools, which are not trained; drop the record, or its tools")
