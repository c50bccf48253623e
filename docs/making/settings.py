"""Tables of settings and files of the example package, put between marks in pages that people write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subtoken_train.plugins.harness import MODEL_SETTINGS
from subtoken_train.serving import chat_request as fields
from subtoken_train.settings import ARM_SETTINGS, Setting

FOLDER = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- settings: docs/generate.py -->\n\n", "\n<!-- end of settings -->"
NAMES = {"reducers": "[list](methods.md)", "evictions": "[list](methods.md)", "wrappers": "wrappers"}
"""In the place of methods' names, which have pages of their own."""

OBEYED = {
    "model": "the one that is served (404 otherwise)",
    "messages": "system, developer, user, assistant; texts, and pictures as data URLs",
    "prompt": "`/v1/completions`: a text, or a list of one, which goes on without a chat template",
    "max_tokens, max_completion_tokens": "at least 1; more than `--max-new-tokens` or the model's positions is capped",
    "temperature": "0 to 2; up to 0.00001, or left out: greedy",
    "top_p": "above 0, to 1",
    "seed": "of the draws",
    "stop": "4 texts of at most 200 characters",
    "stream, stream_options": "`include_usage`",
    "chat_template_kwargs": "what the tokenizer's chat template reads, as `enable_thinking`; 400 for another name",
    "continue_final_message, add_generation_prompt": "400 where they deny that a last message of the assistant goes on",
    "eviction, eviction_keep, context": "see below",
}
"""Fields of a request to the server that are read, and how."""


def arms_page() -> str:
    """Return the page about grids with its table of an arm's keys."""
    return _filled("evaluation.md", _table("key", ARM_SETTINGS))


def arguments_page() -> str:
    """Return the page about harnesses with its table of model arguments that no arm of a grid has."""
    of_harness = {name: each for name, each in MODEL_SETTINGS.items() if each.harness and name not in ARM_SETTINGS}
    return _filled("plugins.md", _table("argument", of_harness))


def own_router_page() -> str:
    """Return the page about one's own router and loss with the router's file of the example package."""
    file = FOLDER / "example_package" / "more_methods" / "low_rank.py"
    shown = f"`more_methods/{file.name}`:\n\n<!-- shows -->\n```python\n{file.read_text(encoding='utf-8')}```\n"
    return _filled("own_router.md", shown)


def serving_page() -> str:
    """Return the page about the server with its table of a request's fields."""
    return _filled("serving.md", f"{_request_table()}\n")


def _request_table() -> str:
    """Return a row for each field of a request, and what happens."""
    rows = [(_code(names), words) for names, words in OBEYED.items()]
    rows.append((_code(", ".join(fields.IGNORED)), "ignored, whatever it says"))
    neutral: dict[str, list[str]] = {}
    for name, values in fields.NEUTRAL.items():
        neutral.setdefault(_words(values), []).append(name)
    rows += [(_code(", ".join(names)), words) for words, names in neutral.items()]
    rows.append((_code(", ".join(fields.OF_DRAWS[1:])), "ignored where the answer is greedy"))
    rows += [(f"{_code(name)} of a message", _words(values)) for name, values in fields.OF_MESSAGES.items()]
    rows += [(f"{_code(name)} of `stream_options`", _words(values)) for name, values in fields.OF_STREAMS.items()]
    rows.append(("`detail` of `image_url`; any other of a message or of a part of it", "ignored"))
    rows.append(("any other; one that is null", "400, with the nearest name; as if left out"))
    return "\n".join(["| field | what happens |", "|---|---|", *(f"| {name} | {words} |" for name, words in rows)])


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _words(neutral: Sequence[Any]) -> str:
    """Return what happens to a field with such values without effect."""
    values = " or ".join(f"`{json.dumps(value)}`" for value in neutral)
    return f"{values}: ignored; else 400" if values else "400"


def _table(heading: str, settings: dict[str, Setting]) -> str:
    rows = [f"| `{name}` | {each.words.format(**NAMES)} |" for name, each in settings.items()]
    return "\n".join([f"| {heading} | meaning |", "|---|---|", *rows]) + "\n"


def _filled(page: str, made: str) -> str:
    before, _, rest = (FOLDER / page).read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + made + END + after
