"""Turns the forms in which people keep conversations into LLaVA's: the one place that knows any other.

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}], "image": ...}  LLaVA, ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], "images": [...]}  OpenAI

Either list may have either pair of keys, and either key may name the images. A content is a text or a list of parts
(``text``, ``image_url``, ``image``, as OpenAI and transformers write them). A first ``system`` message, or a text
``system`` beside the list, goes in front of the first question; for a language model it stays a turn, which its
template may have a place for. A message that is not learnt becomes a turn with ``"loss": false``. Nothing is
downloaded.
"""

from __future__ import annotations

from typing import Any

from subtoken_train.datasets.record_fields import LABELS, SWITCHES, check_fields, read_switch, switched
from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER, record_problem, said_turns, used_turns
from subtoken_train.documents import text_problem
from subtoken_train.errors import unknown_name
from subtoken_train.typed import shown

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "human"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "gpt"),
    **dict.fromkeys(("system", "developer"), "system"),
}  # speaker of each role; OpenAI calls a system message a developer's in later models
_TOOLS = ("tool", "function", "function_call", "observation", "ipython", "tool_call", "tool_response", "environment")
CONVERSATION_LISTS = ("conversations", "messages")  # under which a record keeps its messages
_REPLACED = ("messages", "images", "system", "system_prompt", *LABELS, *SWITCHES)
"""Fields of a record that LLaVA's form says otherwise, or that have said all."""
_PICTURE_KEYS = ("image_url", "image", "path", "url")
_TEXT_KINDS, _PICTURE_KINDS = ("text", "input_text", "output_text", None), ("image", "image_url", "input_image", None)
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def checked_record(row: Any, place: str, as_document: bool = False) -> dict[str, Any]:
    """Return a record of any form in LLaVA's, checked; ``place`` is for messages, else as ``llava_form``."""
    try:
        made = llava_form(row, as_document)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if problem := record_problem(made, as_document):
        raise ValueError(f"{place}: {problem}")
    checked: dict[str, Any] = made
    return checked


def llava_form(row: Any, as_document: bool = False) -> Any:
    """Return a record in LLaVA's form; one that is no conversation at all as it is, for ``record_problem``.

    ``as_document``: it is for a language model, and its system text is a turn of its own, the first.
    """
    there = [name for name in CONVERSATION_LISTS if isinstance(row, dict) and isinstance(row.get(name), list)]
    there = [name for name in there if row[name]]
    if not there:
        return row
    if len(there) > 1:
        raise ValueError(f"it has {' and '.join(there)}, and one of them is read; leave the other out")
    messages = row[there[0]]
    check_fields("record", row)
    if not all(isinstance(message, dict) for message in messages):
        return row
    asked, own_names, turns = False, list[str](), list[dict[str, Any]]()
    for number, (message, beside) in enumerate(zip(messages, _switches_beside(row, len(messages)), strict=True), 1):
        check_fields("message", message, f"message {number}")
        role, content = (
            _either(message, f"message {number} has", *keys) for keys in (("from", "role"), ("value", "content"))
        )
        text, names = _content(content, number)
        own_names += names
        turn = {"from": _speaker(role, number, message), "value": text}
        _check_text(turn, number, asked)
        asked = asked or turn["from"] == "human"
        turns.append(_with_switch(turn, message, beside, number))
    made = {key: value for key, value in row.items() if key not in _REPLACED}
    named = [row[key] for key in ("image", "images") if row.get(key)] + ([own_names] if own_names else [])
    if len(named) > 1:
        raise ValueError("images are named in several places; name them in image, in images, or in the messages")
    if named:
        made["image"] = named[0]
    turns = _system_first(turns, _either(row, "it has", "system", "system_prompt"))
    return {**made, "conversations": turns if as_document else _system_asked(turns)}


def conversation_document(row: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation as one document, and the spans (start, end) of what is said in it and not learnt."""
    text, spans = "", []
    for number, turn in enumerate(used_turns({"conversations": _system_asked(row["conversations"])})):
        text += ("USER:", " ASSISTANT:", "\nUSER:")[number % 2 or 2 * bool(number)]
        start = len(text)
        text += f" {turn['value'].strip()}"
        if turn.get("loss", True) is None:
            raise ValueError(
                "its system text and its first question, which are one text without a chat template, are not learnt "
                "alike; give both messages the same loss"
            )
        if not turn.get("loss", True):
            spans.append((start, len(text)))
    return text, spans


def chat_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return a conversation without images as the messages that a chat template takes, its system text the first."""
    return [{"role": _ROLES[turn["from"]], "content": turn["value"]} for turn in said_turns(row)]


def _check_text(turn: dict[str, Any], number: int, asked: bool) -> None:
    """Refuse a message that says nothing; what gpt says before it is asked is left out."""
    speaker, text = turn["from"], "" if turn["value"] is None and turn["from"] == "gpt" else turn["value"]
    problem = text_problem(text) if isinstance(text, str) else None
    if problem is None or (speaker == "gpt" and not asked) or (speaker == "system" and "\0" not in text):
        return
    what = {"human": ", a question,", "gpt": ", an answer,"}.get(speaker, "")
    raise ValueError(f"message {number}{what} {problem}; write what is said, or drop the record")


def _switches_beside(row: dict[str, Any], messages: int) -> list[bool | None]:
    for name in LABELS:
        if row.get(name) is not None and row[name] is not True:
            why = "it is a bad answer" if row[name] is False else "it is not an answer to learn"
            raise ValueError(f"it has {name} {shown(row[name])}: {why} (KTO, classes), which is not trained; drop it")
    switches: list[bool | None] = [None] * messages
    for name in SWITCHES:
        value = row.get(name)
        if isinstance(value, list) and value:
            if len(value) != messages:
                raise ValueError(
                    f"it has {len(value)} entries of {name} for {messages} messages; write one for each message "
                    "(switches of single tokens are not obeyed), or loss: true or false in the messages"
                )
            found = [switched(name, each, f"{name} of message {number}") for number, each in enumerate(value, 1)]
            if any(one not in (None, other) for one, other in zip(switches, found, strict=True)):
                raise ValueError(f"its switches ({', '.join(SWITCHES)}) contradict each other; keep one of them")
            switches = list(found)
        elif not isinstance(value, list) and value is not None and not switched(name, value, "it"):
            raise ValueError(f"it has {name} {shown(value)}, so that nothing of it is learnt; drop the record")
    return switches


def _with_switch(turn: dict[str, Any], message: dict[str, Any], beside: bool | None, number: int) -> dict[str, Any]:
    own = read_switch(message, f"message {number}")
    if own is not None and beside is not None and own != beside:
        raise ValueError(f"message {number} has a switch of its own and another beside the messages; keep one")
    learnt = beside if own is None else own
    if learnt and turn["from"] != "gpt":
        raise ValueError(
            f"message {number}, which is not an answer, is marked to be learnt; only answers are: set its switch to "
            "false or leave it out"
        )
    return turn if learnt is not False else {**turn, "loss": False}


def _either(found: dict[str, Any], said: str, *keys: str) -> Any:
    """Return what one of two keys holds; None where neither holds anything."""
    there = [key for key in keys if found.get(key) is not None]
    if len(there) > 1 and found[there[0]] != found[there[-1]]:
        raise ValueError(f"{said} {' and '.join(there)}, which differ; keep one of them")
    return found[there[0]] if there else None


def _speaker(role: Any, number: int, message: dict[str, Any]) -> Any:
    if (isinstance(role, str) and role in _TOOLS) or message.get("tool_calls") or message.get("function_call"):
        raise ValueError(f"message {number} calls a tool or is a tool's answer, which is not trained; drop the record")
    if not isinstance(role, str) or role not in _SPEAKERS:
        got = role if isinstance(role, str) else shown(role)
        raise ValueError(f"message {number}: {unknown_name('role', got, _SPEAKERS)}")
    return _SPEAKERS[role]


def _content(content: Any, number: int) -> tuple[Any, list[str]]:
    """Return a message's text with a placeholder per image, and the images that it names itself."""
    if not isinstance(content, list):
        return content, []
    if not content:
        raise ValueError(f"message {number} is an empty list; write a text, or parts: text, image or image_url")
    lines, names = [], []
    for given in content:
        part = {"text": given} if isinstance(given, str) else given
        if isinstance(part, dict):
            check_fields("part", part, f"a part of message {number}")
        is_text = _is_text_part(part, number)
        lines.append(part["text"] if is_text else IMAGE_PLACEHOLDER)
        names += [] if is_text else _part_name(part, number)
    return "\n".join(lines), names


def is_picture(part: dict[str, Any]) -> bool:
    """Return whether a part of a content is, or names, a picture."""
    kind = part.get("type")
    return kind in _PICTURE_KINDS and (kind is not None or any(map(part.get, _PICTURE_KEYS)))


def _is_text_part(part: Any, number: int) -> bool:
    if isinstance(part, dict):
        text, named = part.get("text"), any(map(part.get, _PICTURE_KEYS))
        if part.get("type") in _TEXT_KINDS and isinstance(text, str) and not named:
            return True
        if is_picture(part) and not text:
            return False
    raise ValueError(
        f"message {number} has a part {shown(part)}; a part is either a text or a picture: text, image or image_url "
        "(videos stand beside the messages, in videos)"
    )


def _part_name(part: dict[str, Any], number: int) -> list[str]:
    given = _either(part, f"a part of message {number} has", *_PICTURE_KEYS)
    if isinstance(given, dict):
        given = given.get("url")
    elif given is None:
        return []
    if not isinstance(given, str) or given.startswith(("data:", "http://", "https://")):
        raise ValueError(f"message {number} names the image {shown(given)}; save it as a file, and name that")
    return [given.removeprefix("file://")]


def _system_first(turns: list[dict[str, Any]], beside: Any) -> list[dict[str, Any]]:
    """Return the turns, the first of them the system's where it says anything.

    Its ``loss`` is None where what stands beside the messages is learnt and the message is not.
    """
    told = [{"value": beside}] if beside else []
    if turns[0]["from"] == "system":
        told, turns = [*told, turns[0]], turns[1:]
    if not all(isinstance(turn["value"], str) for turn in told) or any(turn["from"] == "system" for turn in turns):
        raise ValueError("a system message is not text, or is not the first; only one, at the start, is read")
    told = [turn for turn in told if turn["value"].strip()]
    if not told:
        return turns
    text, switches = "\n\n".join(turn["value"].strip() for turn in told), {turn.get("loss", True) for turn in told}
    loss = {} if switches == {True} else {"loss": False if switches == {False} else None}
    return [{"from": "system", "value": text, **loss}, *turns]


def _system_asked(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns, the system's text in front of the first question; its ``loss`` is None where the two differ."""
    if not turns or turns[0]["from"] != "system":
        return turns
    system, turns = turns[0], turns[1:]
    asked = next((place for place, turn in enumerate(turns) if turn["from"] == "human"), None)
    if asked is None or not isinstance(turns[asked]["value"], str):
        return turns
    first = {**turns[asked], "value": f"{system['value']}\n\n{turns[asked]['value']}"}
    if system.get("loss", True) != first.get("loss", True):
        first["loss"] = None
    return [*turns[:asked], first, *turns[asked + 1 :]]
