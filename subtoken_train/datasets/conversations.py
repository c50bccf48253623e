"""Turns the forms in which people keep conversations into LLaVA's: the one place that knows any other.

LLaVA and ShareGPT: ``conversations`` of ``from`` (human, gpt) and ``value``, ``image``; OpenAI: ``messages`` of
``role`` (user, assistant) and ``content``, ``images``. Either list may have either pair of keys and either key of
images; a content is a text or a list of parts. A system text goes in front of the first question; for a language model
it stays a turn. A message that is not learnt becomes a turn with ``"loss": false``. Nothing is downloaded.
"""

from typing import Any

from subtoken_train.datasets import record_format as form
from subtoken_train.documents import text_problem
from subtoken_train.errors import at_place, refuse, unknown_name
from subtoken_train.typed import shown

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "human"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "gpt"),
    **dict.fromkeys(("system", "developer"), "system"),
}  # speaker of each role; OpenAI calls a system message a developer's in later models
CONVERSATION_LISTS = ("conversations", "messages")  # under which a record keeps its messages
_REPLACED = ("messages", "images", "system", "system_prompt")  # what LLaVA's form says otherwise
_PICTURE_KEYS = ("image_url", "image", "path", "url")
_TEXT_KINDS, _PICTURE_KINDS = ("text", "input_text", "output_text", None), ("image", "image_url", "input_image", None)
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def checked_record(row: Any, place: str, as_document: bool = False) -> dict[str, Any]:
    """Return a record of any form in LLaVA's, checked; ``place`` is for messages, else as ``llava_form``."""
    with at_place(f"{place}: "):
        made: dict[str, Any] = llava_form(row, as_document)
        if problem := form.record_problem(made, as_document):
            raise ValueError(problem)
    return made


def llava_form(row: Any, as_document: bool = False) -> Any:
    """Return a record in LLaVA's form, or as it is; ``as_document``: a system text stays a turn, the first."""
    lists = CONVERSATION_LISTS if isinstance(row, dict) else ()
    if not (there := [name for name in lists if isinstance(row.get(name), list) and row[name]]):
        return row
    refuse((len(there) > 1, f"it has {' and '.join(there)}, and one of them is read; leave the other out"))
    messages = row[there[0]]
    form.check_fields("record", row)
    if not all(isinstance(message, dict) for message in messages):
        return row
    _check_order(messages, "its messages are")
    asked, own_names, turns = False, list[str](), list[dict[str, Any]]()
    for number, message in enumerate(messages, 1):
        form.check_fields("message", message, f"message {number}")
        role = _either(message, f"message {number} has", "from", "role")
        text, names = _content(_either(message, f"message {number} has", "value", "content"), number)
        own_names += names
        if not isinstance(role, str) or role not in _SPEAKERS:
            raise ValueError(f"message {number}: {unknown_name('role', str(role), _SPEAKERS)}")
        turn = {"from": _SPEAKERS[role], "value": text}
        _check_text(turn, number, asked)
        asked = asked or turn["from"] == "human"
        if (learnt := form.read_switch(message, f"message {number}")) and turn["from"] != "gpt":
            raise ValueError(f"message {number}, which is not an answer, is marked to be learnt; only answers are")
        turns.append({**turn, "loss": False} if learnt is False else turn)
    made = {key: value for key, value in row.items() if key not in _REPLACED}
    named = [row[key] for key in ("image", "images") if row.get(key)] + ([own_names] if own_names else [])
    refuse((len(named) > 1, "images are named in several places; name them in image, in images, or in the messages"))
    if named:
        made["image"] = named[0]
    turns = _system_first(turns, _either(row, "it has", "system", "system_prompt"))
    return {**made, "conversations": turns if as_document else _system_asked(turns)}


def conversation_document(row: dict[str, Any]) -> str:
    """Return a conversation as one document, all of which is learnt."""
    if not all(turn.get("loss", True) for turn in row["conversations"]):
        whole = "without a chat template a conversation is learnt whole"
        raise ValueError(f"a message is not to be learnt, and {whole}; drop it, or use a backbone with a template")
    said = [turn["value"].strip() for turn in form.used_turns({"conversations": _system_asked(row["conversations"])})]
    pairs = zip(said[::2], said[1::2], strict=True)
    return "\n".join(f"USER: {question} ASSISTANT: {answer}" for question, answer in pairs)


def chat_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return a conversation without images as the messages that a chat template takes, its system text the first."""
    return [{"role": _ROLES[turn["from"]], "content": turn["value"]} for turn in form.said_turns(row)]


def _check_text(turn: dict[str, Any], number: int, asked: bool) -> None:
    """Refuse a message that says nothing; what gpt says before it is asked is left out."""
    speaker, text = turn["from"], "" if turn["value"] is None and turn["from"] == "gpt" else turn["value"]
    problem = text_problem(text) if isinstance(text, str) else None
    if problem is None or (speaker == "gpt" and not asked) or (speaker == "system" and "\0" not in text):
        return
    what = {"human": ", a question,", "gpt": ", an answer,"}.get(speaker, "")
    raise ValueError(f"message {number}{what} {problem}; write what is said, or drop the record")


def _either(found: dict[str, Any], said: str, *keys: str) -> Any:
    there = [key for key in keys if found.get(key) is not None]
    if len(there) > 1 and found[there[0]] != found[there[-1]]:
        raise ValueError(f"{said} {' and '.join(there)}, which differ; keep one of them")
    return found[there[0]] if there else None


def _check_order(items: list[Any], said: str) -> None:
    """Refuse messages or parts that are numbered and stand in another order."""
    for name in ("index", "idx", "turn", "order", "position"):
        counted = [item[name] for item in items if isinstance(item, dict) and isinstance(item.get(name), int | float)]
        if len(counted) == len(items) and counted != sorted(counted):
            raise ValueError(f"{said} not in the order of their {name}; sort them, or drop {name}")


def _content(content: Any, number: int) -> tuple[Any, list[str]]:
    """Return a message's text with a placeholder per image, and the images that it names itself."""
    if not isinstance(content, list):
        return content, []
    refuse((not content, f"message {number} is an empty list; write a text, or parts: text, image or image_url"))
    lines, names = [], []
    _check_order(content, f"the parts of message {number} are")
    for given in content:
        part = {"text": given} if isinstance(given, str) else given
        if isinstance(part, dict):
            form.check_fields("part", part, f"a part of message {number}")
        is_text = _is_text_part(part, number)
        lines.append(part["text"] if is_text else form.IMAGE_PLACEHOLDER)
        names += [] if is_text else _part_name(part, number)
    return "\n".join(lines), names


def _is_text_part(part: Any, number: int) -> bool:
    if isinstance(part, dict):
        kind, text, named = part.get("type"), part.get("text"), any(map(part.get, _PICTURE_KEYS))
        if kind in _TEXT_KINDS and isinstance(text, str) and not named:
            return True
        if kind in _PICTURE_KINDS and (kind is not None or named) and not text:
            return False
    kinds = "a part is either a text or a picture (type: text, image or image_url); videos are named in videos"
    raise ValueError(f"message {number} has a part {shown(part)}; {kinds}")


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
    """Return the turns, a system's first, which is not learnt where a part of it is not."""
    told = [{"value": beside}] if beside else []
    if turns[0]["from"] == "system":
        told, turns = [*told, turns[0]], turns[1:]
    if not all(isinstance(turn["value"], str) for turn in told) or any(turn["from"] == "system" for turn in turns):
        raise ValueError("a system message is not text, or is not the first; only one, at the start, is read")
    told = [turn for turn in told if turn["value"].strip()]
    if not told:
        return turns
    loss = {} if all(turn.get("loss", True) for turn in told) else {"loss": False}
    return [{"from": "system", "value": "\n\n".join(turn["value"].strip() for turn in told), **loss}, *turns]


def _system_asked(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns, the system's text in front of the first question."""
    if not turns or turns[0]["from"] != "system":
        return turns
    system, turns = turns[0], turns[1:]
    asked = next((place for place, turn in enumerate(turns) if turn["from"] == "human"), None)
    if asked is None or not isinstance(turns[asked]["value"], str):
        return turns
    first = {**turns[asked], "value": f"{system['value']}\n\n{turns[asked]['value']}"}
    return [*turns[:asked], first, *turns[asked + 1 :]]
