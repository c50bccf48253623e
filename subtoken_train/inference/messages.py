"""Prompts in the forms in which people give them: a text, turns, or OpenAI's messages.

    [{"role": "system", "content": "Be brief."},
     {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}]}]

Roles are ``ROLES``; the parts of a content are joined by line breaks, as those of training's records are. A picture's
part stands for one of the pictures beside the prompt, or holds its own (``{"type": "image", "image": IMAGE}``, a video
likewise). Whatever else a message or a part says is refused, since nothing would obey it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subtoken_train.documents import check_characters, text_problem
from subtoken_train.errors import check_word
from subtoken_train.families.chat_template import Message, messages_of
from subtoken_train.families.images import Picture
from subtoken_train.families.literal_marks import IMAGE_MARK, VIDEO_MARK
from subtoken_train.typed import shown
from subtoken_train.types import Turn

ROLES = ("system", "user", "assistant")
Prompt = str | Sequence[Turn] | Sequence[Mapping[str, Any]]
_MARKS = {"image": IMAGE_MARK, "video": VIDEO_MARK}


def read_messages(prompt: Any, pictures: Sequence[Picture] = ()) -> tuple[list[Message], list[Picture]]:
    """Return a prompt as messages of texts, the last one the user's or an assistant's, and its marks' pictures."""
    if isinstance(prompt, str):
        messages: list[Message] = [{"role": "user", "content": prompt}]
        found = list(pictures)
    else:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise _no_prompt(prompt)
        if not prompt:
            raise ValueError("the prompt has no message; write what the model should answer")
        if all(isinstance(each, Turn) for each in prompt):
            messages, found = messages_of(prompt), list(pictures)
        else:
            messages, found = _read_mappings(prompt, pictures)
        if (role := messages[-1]["role"]) == "system" or all(each["role"] != "user" for each in messages):
            raise ValueError(f"the last message is the {role}'s, and nothing is asked; end with what the user says")
    check_characters([each["content"] for each in messages], "the prompt")
    if problem := text_problem(messages[-1]["content"]):
        raise ValueError(f"the prompt {problem}; write what the model should answer or continue")
    return messages, found


def goes_on(prompt: Any, raw: bool = False) -> bool:
    """Return whether the answer goes on with a text: a raw prompt, or what the assistant says last."""
    return raw or (not isinstance(prompt, str) and read_messages(prompt)[0][-1]["role"] == "assistant")


def alternating_turns(messages: Sequence[Message]) -> list[Turn]:
    """Return messages as turns, what the system says in front of the first question, as training puts it.

    For chat formats that are no template. What one says in several messages is joined by line breaks.
    """
    told, said = "", list[Message]()
    for number, message in enumerate(messages, 1):
        role, last = message["role"], said[-1]["role"] if said else None
        due = "assistant" if last == "user" else "user"
        if role == "system" and number == 1:
            told = message["content"].strip()
        elif role == last:
            said[-1] = {**message, "content": f"{said[-1]['content']}\n{message['content']}"}
        elif role == due:
            said.append(message)
        else:
            raise ValueError(
                f"message {number} is the {role}'s where the {due}'s is due; user and assistant take turns, after one "
                "system message at most"
            )
    contents = [each["content"] for each in said]
    if told:
        contents[0] = f"{told}\n\n{contents[0]}"
    answers = [*contents[1::2], *([None] if len(contents) % 2 else [])]
    return [Turn(asked, answer) for asked, answer in zip(contents[::2], answers, strict=True)]


def _read_mappings(prompt: Sequence[Any], pictures: Sequence[Picture]) -> tuple[list[Message], list[Picture]]:
    messages: list[Message] = []
    own: list[Picture] = []
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping):
            raise _no_prompt(message, f"message {number}")
        _check_keys(message, ("role", "content"), f"message {number}")
        role, content = message.get("role"), message.get("content")
        check_word(f"role of message {number}", role, ROLES)
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence) or not parts:
            raise ValueError(f"message {number} says {shown(content)}; its content is a text, or a list of parts")
        texts = []
        for part in parts:
            text, picture = _read_part(part, number)
            texts.append(text)
            own += [] if picture is None else [picture]
        messages.append({"role": str(role), "content": "\n".join(texts)})
    if own and pictures:
        raise ValueError("pictures are given both in the messages and beside them; give them in one place")
    return messages, own or list(pictures)


def _read_part(part: Any, number: int) -> tuple[str, Picture | None]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _check_keys(part, ("type", "text"), f"a part of message {number}")
        return part["text"], None
    if not isinstance(kind, str) or kind not in _MARKS:
        raise ValueError(f"message {number} has a part {shown(part)}; parts are text, image or video")
    _check_keys(part, ("type", kind), f"a part of message {number}")
    picture = part.get(kind)
    if isinstance(picture, str):
        raise ValueError(
            f"message {number} names the {kind} {shown(picture)}, but files are not opened here; open it, or give "
            "it beside the prompt"
        )
    return _MARKS[kind], picture


def _check_keys(given: Mapping[str, Any], allowed: Sequence[str], place: str) -> None:
    if more := [name for name, value in given.items() if name not in allowed and value is not None]:
        raise ValueError(f"{place} has {shown(more[0])}, which is not read; leave it out ({', '.join(allowed)})")


def _no_prompt(given: Any, place: str = "the prompt") -> ValueError:
    return ValueError(
        f"{place} is of type {type(given).__name__}; a prompt is a text, a list of Turn, or a list of messages: "
        '[{"role": "user", "content": "..."}]'
    )
