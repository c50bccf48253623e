"""Conversations in a tokenizer's own chat template: the text, its parts, and what assistants say in it.

A template is somebody else's program: it runs in transformers' sandbox, for at most ``MAX_STEPS`` of its lines and
``MAX_WRITTEN`` characters. What looks like a special token in a content is text. Where a message stands is found by
rendering once more with marks around each content; without them that rendering must be the conversation.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from types import FrameType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from transformers.utils.chat_template_utils import render_jinja_template

from subtoken_train.families.literal_marks import hidden_specials, special_places
from subtoken_train.types import Asked, RenderedPrompt, Turn

Message = Mapping[str, str]
MAX_STEPS = 5_000_000  # A few seconds; long conversations take some ten thousands
MAX_WRITTEN = 10_000_000  # beside four times what is said
_BEGIN, _END = "\udffe", "\udfff"
_MARK = re.compile("([\udffe\udfff])([\udfe0-\udfe9]+)")
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_TAG = re.compile(r"\W.+\W", re.DOTALL)
_GIVEN = {"messages", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}


def messages_of(turns: Iterable[Turn]) -> list[Message]:
    """Return turns as messages of user and assistant."""
    said = (each for turn in turns for each in (("user", turn.prompt), ("assistant", turn.answer)))
    return [{"role": role, "content": content} for role, content in said if content is not None]


def checked_variables(tokenizer: Any, given: Any) -> dict[str, Any]:
    """Return variables by name for a tokenizer's chat template (``chat_template_kwargs``), as ``enable_thinking``."""
    if given is None or given == {}:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"chat_template_kwargs are {given!r}; give names and values: {{'enable_thinking': False}}")
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("chat_template_kwargs are for a chat template, which is not used here; leave them out")
    read = sorted(_variables(tokenizer.get_chat_template()) - set(tokenizer.special_tokens_map))
    if unknown := [name for name in given if name not in read]:
        names = f"only {', '.join(read)}" if read else "none"
        raise ValueError(f"chat_template_kwargs have {unknown[0]!r}, but the tokenizer's chat template reads {names}")
    return dict(given)


@lru_cache(maxsize=8)
def _variables(template: str) -> set[str]:
    tree = _parsed(template)
    made = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    asked = (each.node for each in tree.find_all((nodes.Test, nodes.Filter)) if each.name in ("defined", "default"))
    made -= {node.name for node in asked if isinstance(node, nodes.Name)}  # which it makes where they are not given
    return meta.find_undeclared_variables(tree) - made - _GIVEN - set(jinja2.Environment().globals)


def filled_template(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """Return messages as one text in a tokenizer's chat template; ``options``: of ``apply_chat_template``."""
    with _bounded():
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        if len(text) > MAX_WRITTEN + 4 * sum(len(each["content"]) for each in messages):
            raise ValueError(f"it writes {len(text):,} characters")
    return text


def rendered_prompt(tokenizer: Any, messages: Sequence[Message], **variables: Any) -> RenderedPrompt:
    """Return a conversation that is to be answered, or whose last message is to be gone on with, without spans."""
    shown = _shown(tokenizer, messages)
    options = {"add_generation_prompt": messages[-1]["role"] == "user", **variables}
    text = filled_template(tokenizer, shown, **options)
    places = _places(tokenizer, shown, text, **options)
    last = max(place for place, each in enumerate(messages) if each["role"] == "user")
    said = [place for each, place in zip(messages[:last], places, strict=False) if each["role"] != "system"]
    start, end = places[last]
    asked = Asked(said[-1][1] if said else 0, start, end)
    system_end = _system_end(shown, places, late=start)
    written = text if options["add_generation_prompt"] else text[: places[-1][1]]
    return RenderedPrompt(written, [], "", system_end, asked, places[0] if messages[0]["role"] == "system" else (0, 0))


def answer_opening(tokenizer: Any) -> str:
    """Return what a template writes between what the user says and the answer, with thinking off."""
    said = [{"role": "user", "content": "?"}]
    if (opening := _after(tokenizer, said, add_generation_prompt=True, enable_thinking=False)) is None:
        raise _unwritten("user")
    return opening


def rendered_conversation(tokenizer: Any, messages: Sequence[Message], **variables: Any) -> RenderedPrompt:
    """Return a conversation with the spans of what assistants say; after a question the opening of its answer.

    A span is what the template marks as generated; else it begins where the prompt before it ends, if that goes on as
    the prompt does, or with the message's words, and ends with the end of the turn, without white space.
    """
    shown = _shown(tokenizer, messages)
    options = {"add_generation_prompt": messages[-1]["role"] != "assistant", **variables}
    text = filled_template(tokenizer, shown, **options)
    places = _places(tokenizer, shown, text, **options)
    said = [number for number, message in enumerate(shown) if message["role"] == "assistant"]
    if (spans := _generated(tokenizer, shown, **options)) is None:
        spans = [_span(tokenizer, shown, number, text, places, **variables) for number in said]
    if len(spans) != len(said):
        raise ValueError(f"the tokenizer's chat template marks {len(spans)} texts as generated, of {len(said)} answers")
    return RenderedPrompt(text, spans, "", _system_end(shown, places))


def asked_otherwise(tokenizer: Any, **variables: Any) -> tuple[str, str, str] | None:
    """Return what stands before an answer in a conversation and in a prompt, and before which; None: they agree."""
    talk = messages_of([Turn("?", "!"), Turn("?", "!")])
    text = filled_template(tokenizer, talk, **variables)
    places = _places(tokenizer, talk, text, **variables)
    for number, which in ((3, "an answer"), (1, "an earlier answer")):
        asked, said = places[number - 1][1], places[number][0]
        opening = _after(tokenizer, talk[:number], add_generation_prompt=True, **variables)
        if opening is not None and not text.startswith(opening, asked):
            return text[asked:said], opening, which
    return None


def rendered_as_asked(tokenizer: Any, messages: Sequence[Message], **variables: Any) -> RenderedPrompt:
    """Return a conversation whose last answer, thoughts included, alone has a span, behind the prompt asking it."""
    prompt = rendered_prompt(tokenizer, messages[:-1], **variables)
    rendered = rendered_conversation(tokenizer, messages, **variables)
    text, (_, until) = rendered.text, rendered.answer_spans[-1]
    if not text.startswith(prompt.text):
        shown = _shown(tokenizer, messages)
        start, end = _places(tokenizer, shown, text, add_generation_prompt=False, **variables)[-1]
        opening = prompt.text.rstrip()
        answer, written = shown[-1]["content"].strip(), text[start:end]
        opened = (answer[:size] for size in range(len(answer), 0, -1) if opening.endswith(answer[:size]))
        if _TAG.fullmatch(tag := next(opened, "")):
            answer = answer.removeprefix(tag).lstrip()
        elif answer == written.strip():
            answer = written
        text = prompt.text + answer + text[end:until]
        until = len(text)
    return RenderedPrompt(text[:until], [(len(prompt.text), until)], "", prompt.system_end, prompt.asked)


def _shown(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    return [{**each, "content": hidden_specials(tokenizer, each["content"])} for each in messages]


def _system_end(messages: Sequence[Message], places: Sequence[tuple[int, int]], late: int | None = None) -> int:
    """Return where the beginning of a text and what the system says first end; ``late``: where it stands in a turn."""
    first = next((place[0] for each, place in zip(messages, places, strict=True) if each["role"] != "system"), 0)
    if not (messages[0]["role"] == "system" and messages[0]["content"].strip()) or places[0][1] <= first:
        return first
    return places[0][1] if late is None else late  # some templates put it into the last turn


def _places(tokenizer: Any, messages: Sequence[Message], text: str, **options: Any) -> list[tuple[int, int]]:
    forms = [_forms(tokenizer, each["content"]) for each in messages]
    found = _tried(tokenizer, messages, text, {number: form[0] for number, form in enumerate(forms)}, **options)
    for number, message in enumerate(messages):
        if number in found:
            continue
        tries = (_tried(tokenizer, messages, text, {number: form}, **options) for form in forms[number])
        if (place := next(filter(None, tries), {}).get(number)) is None and message["role"] == "assistant":
            raise ValueError(f"the tokenizer's chat template does not write the words of message {number + 1} as it is")
        others = [*messages[:number], *messages[number + 1 :]]
        told = place is not None or not message["content"].strip()
        # some systems' texts are orders to the template (SmolLM3's /no_think), which obeys them and writes no word
        if not told and (message["role"] != "system" or filled_template(tokenizer, others, **options) == text):
            raise _unwritten(message["role"])
        found[number] = place or (0, 0)
    return [found[number] for number in range(len(messages))]


def _forms(tokenizer: Any, content: str) -> list[tuple[int, int]]:
    """Return what a template may write of a content: all, stripped, or what follows a word that the template knows."""
    words = [word for word in _tags(tokenizer.get_chat_template()) if word in content]
    cuts = {place + len(word) for word in words for place in (content.find(word), content.rfind(word))}
    ends = [len(each) for each in (content, content.rstrip("\n"), content.rstrip())]
    forms = []
    for rest in (content[cut:] for cut in (0, *sorted(cuts))):
        begins = (len(content) - len(each) for each in (rest, rest.lstrip("\n"), rest.lstrip()))
        forms += [(begin, max(begin, end)) for begin, end in product(begins, ends)]
    return list(dict.fromkeys(forms))


@lru_cache(maxsize=8)
def _tags(template: str) -> tuple[str, ...]:
    named = (node.value for node in _parsed(template).find_all(nodes.Const))
    return tuple(sorted(filter(_TAG.fullmatch, {word.strip() for word in named if isinstance(word, str)})))


def _parsed(template: str) -> nodes.Template:
    with _bounded():
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))


def _tried(
    tokenizer: Any, messages: Sequence[Message], text: str, chosen: Mapping[int, tuple[int, int]], **options: Any
) -> dict[int, tuple[int, int]]:
    """Return where parts of some contents stand; none where marks around them make another text."""
    marked = [dict(each) for each in messages]
    for number, (begin, end) in chosen.items():
        content, name = messages[number]["content"], "".join(chr(0xDFE0 + int(digit)) for digit in str(number))
        marked[number]["content"] = f"{content[:begin]}{_BEGIN}{name}{content[begin:end]}{_END}{name}{content[end:]}"
    found: dict[tuple[str, str], list[int]] = {}
    bare, seen = "", 0
    whole = filled_template(tokenizer, marked, **options)
    for mark in _MARK.finditer(whole):
        bare += whole[seen : mark.start()]
        seen = mark.end()
        found.setdefault((mark[1], "".join(str(ord(digit) - 0xDFE0) for digit in mark[2])), []).append(len(bare))
    if bare + whole[seen:] != text:
        return {}
    places = {}
    for number, (begin, end) in chosen.items():
        match found.get((_BEGIN, str(number))), found.get((_END, str(number))):
            case [start], [stop]:
                if text[start:stop] == messages[number]["content"][begin:end] or messages[number]["role"] == "system":
                    places[number] = start, stop
    return places


def _after(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str | None:
    """Return what a template writes behind the last message; None where it leaves that message's end out."""
    marked = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
    _, mark, after = filled_template(tokenizer, marked, **options).rpartition(_END)
    return after if mark else None


def _generated(tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[tuple[int, int]] | None:
    """Return what the template marks as generated; None where it has no such marks."""
    template = tokenizer.get_chat_template()
    if not _GENERATION.search(template):
        return None
    with _bounded():
        given = {"return_assistant_tokens_mask": True, **tokenizer.special_tokens_map, **options}
        _, (spans,) = render_jinja_template(conversations=[list(messages)], chat_template=template, **given)
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        joined.append((joined.pop()[0] if joined and joined[-1][1] == begin else begin, end))
    return joined


def _span(
    tokenizer: Any, messages: Sequence[Message], number: int, text: str, places: list[tuple[int, int]], **variables: Any
) -> tuple[int, int]:
    """Return the span of one assistant's message in a conversation without marks of what is generated."""
    start, end = places[number]
    opening = number and _after(tokenizer, messages[:number], add_generation_prompt=True, **variables)
    if opening and text.startswith(opening, asked := places[number - 1][1]):
        start = asked + len(opening)
    ending = text[end:] if number + 1 == len(messages) else _after(tokenizer, messages[: number + 1], **variables)
    ending, stop, _ = (ending or "").partition(tokenizer.eos_token or _END)
    ending += stop
    # the text may go on otherwise than it would end here: behind one of its special tokens, for one
    ends = [len(ending), *(place for span in special_places(tokenizer, ending) for place in span)]
    endings = {part.rstrip() or part for part in (ending[:place] for place in ends)}
    return start, end + max(len(each) for each in endings | {""} if text.startswith(each, end))


def _unwritten(role: str) -> ValueError:
    return ValueError(f"the tokenizer's chat template does not write what the {role} says; set another chat_template")


@contextmanager
def _bounded() -> Iterator[None]:
    """Turn whatever a template raises into a ``ValueError``, and stop one after ``MAX_STEPS`` of its lines."""
    left, before = MAX_STEPS, sys.gettrace()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<template>":  # as jinja names what it compiles
            return None
        left -= 1
        if left < 0:
            raise RuntimeError(f"it does not end within {MAX_STEPS:,} steps")
        return count

    try:
        sys.settrace(count)
        yield
    except Exception as error:  # whatever a template raises
        words = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"the tokenizer's chat template cannot be filled: {words}") from error
    finally:
        sys.settrace(before)
