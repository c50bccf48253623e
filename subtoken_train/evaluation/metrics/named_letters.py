"""The letter of the option that a free answer names, by the rules of several programs without judge.

Sources: MMBench_Evaluator of lmms-eval (``tasks/mmbench/mmbench_evals.py``) and the fallback of its static task
(``tasks/_task_utils/mcq_extract.py`` of v0.7.2); ``utils/matching_util.py`` of VLMEvalKit. Where these programs ask a
language model or draw a letter at random, the answer here names no option. Options are a mapping from letter to text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

LETTERS = "ABCDE"
_LETTER = re.compile(r"\(?([A-E])(?:[.:,)].*)?", re.DOTALL)
_LMMS_FRAMES = (
    ("", "."), ("", ","), ("", ":"), ("", ")"), ("", ")."), ("(", ")"), ("(", ")."),
    (":", ""), (":", ","), (":", "."), (":", ")"), (":", ")."),
)  # fmt: skip
_STATIC_PHRASES = (
    *(f"{before}{what} is" for what in ("answer", "option", "choice") for before in ("correct ", "the correct ")),
    *(f"{before}{what} is" for what in ("answer", "option") for before in ("best ", "the best ")),
    *(f"{before}{what} is" for what in ("answer", "choice") for before in ("", "the ", "my ")),
    *(f"i {verb}" for verb in ("choose", "select", "pick")),
)
_STATIC_FRAMES = ((3, "{})"), (4, "{}:"), (5, "{}."), (6, "({})"), (2, "{} "))
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_VERBOSE = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_PUNCTUATION = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def plain_letter(text: str, options: Mapping[str, str]) -> str | None:
    """An answer that is a letter (LLaVA-1.5's form): alone, in brackets, or with a mark and more text after it."""
    match = _LETTER.fullmatch(text.strip())
    return match[1] if match and match[1] in options else None


def lmms_letter(text: str, options: Mapping[str, str]) -> str | None:
    """lmms-eval's ``can_infer``: a letter, else the one option whose text the answer contains."""
    return _lmms_option(text) or _contained(text, options)


def lmms_static_letter(text: str, options: Mapping[str, str]) -> str | None:
    """lmms-eval's task ``mmbench_en_dev_static``: ``can_infer``, else the best-placed letter of an option.

    Of that fallback's phrases, those in other languages than English are left out.
    """
    return lmms_letter(text, options) or _best_placed(text, options)


def vlmevalkit_letter(text: str, options: Mapping[str, str]) -> str | None:
    """VLMEvalKit's ``can_infer``; ``Z`` for an answer that refuses to choose."""
    if any(refusal in text for refusal in _REFUSALS):
        return "Z"
    words = text.translate(_PUNCTUATION).split()
    found = [letter for letter in options if letter in words]
    if len(found) == 1 and words.index(found[0]) > len(words) - 5:  # among the last four words
        return found[0]
    if not found and "Z" in words:
        return "Z"
    match = _VERBOSE.search(text)
    if match and match[1].upper() in options:
        return match[1].upper()
    if len(text) > 2 * sum(map(len, options.values())):
        return None
    return _contained(text, options)


READINGS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "": plain_letter,
    "lmms_": lmms_letter,
    "lmms_static_": lmms_static_letter,
    "vlmevalkit_": vlmevalkit_letter,
}
"""The rules by the prefix that their scores have."""


def _contained(text: str, options: Mapping[str, str]) -> str | None:
    found = [letter for letter, option in options.items() if option.lower() in text.lower()]
    return found[0] if len(found) == 1 else None


def _lmms_option(text: str) -> str | None:
    """A letter that is the only one among the words; then one in the first frame in which only one letter is."""
    words = text.split()
    alone = _among(words, "", "")
    if len(alone) == 1 and not ("A" in words and len(words) > 3):  # in a longer answer "A" may be an article
        return alone[0]
    return next((found[0] for frame in _LMMS_FRAMES if len(found := _among(words, *frame)) == 1), None)


def _among(words: list[str], before: str, after: str) -> list[str]:
    return [letter for letter in LETTERS if before + letter + after in words]


def _best_placed(text: str, options: Mapping[str, str]) -> str | None:
    """The letter in the most telling place, and among equals the last: start, end, phrase, frame, any word."""
    text = text.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    padded, bare = f" {text} ", text.strip()
    places: list[tuple[int, int, str]] = []
    for letter in options:
        frames = ((rank, frame.format(letter)) for rank, frame in _STATIC_FRAMES)
        places += [(rank, padded.rfind(framed), letter) for rank, framed in frames if framed in padded]
        after = (padded.lower().find(phrase) + len(phrase) for phrase in _STATIC_PHRASES if phrase in padded.lower())
        places += [(7, padded.find(letter, start), letter) for start in after if letter in padded[start:]]
        if bare.startswith(letter) and not bare[1:2].isalpha():
            places.append((10, 0, letter))
        if bare.endswith(letter) and not bare[-2:-1].isalpha():
            places.append((9, len(padded) - 1, letter))
    places = places or [(0, padded.rfind(letter), letter) for letter in options if letter in padded]
    return max(places)[2] if places else None
