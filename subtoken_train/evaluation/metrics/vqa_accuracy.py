"""How the VQA challenges make answers comparable, with the oddities that their numbers rest on.

``evalai_answer`` is EvalAI's processor, as LLaVA (``m4c_evaluator.py``) and lmms-eval (``vqa_eval_metric.py``) use it;
its two last steps are also the normalisation of the official VQA scorer (``vqaEval.py``). What is odd and kept:

- a punctuation mark is deleted where it touches a space *anywhere in the input*, or where the input has a comma between
  digits; else it becomes a space, so that "a-b" is two words and "a -b, c-d" is not;
- a full stop goes unless a digit follows ("5." loses it, ".5" and "a.5" keep it), and only the first 32 of a text go:
  the original passes a flag where ``re.sub`` takes a count;
- number words become digits before articles go, "none" becomes "0", and "ten" is the last;
- missing apostrophes come back, except in words that are others too (its, were, well); "somebody'd" loses its own.

It does not know synonyms, plurals or numbers above ten.
"""

from __future__ import annotations

import re

MARKS = ';/[]"{}()=+\\_-><@`,?!'
ARTICLES = frozenset({"a", "an", "the"})
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
NUMBERS = {word: str(n) for n, word in enumerate(_NUMBER_WORDS.split())}
NUMBERS["none"] = "0"

EVALAI_COMMA = re.compile(r"(?<=\d),+(?=\d)")
OFFICIAL_COMMA = re.compile(r"\d,\d")
"""Differs in texts like "1,,2" alone."""

MAX_STOPS = 32
STOP = re.compile(r"\.(?!\d)")

_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
APOSTROPHES = {
    word[:place] + word[place + 1 :]: word
    for word in _CONTRACTIONS.split()
    for place, mark in enumerate(word)
    if mark == "'"
}
"""Every contraction with one of its apostrophes missing -> the contraction."""
APOSTROPHES["somebody'd"] = "somebodyd"


def evalai_answer(text: str) -> str:
    """The text as EvalAI compares it: ``word_tokens``, then ``without_marks``, then ``plain_words``."""
    return plain_words(without_marks(one_line(word_tokens(text))))


def word_tokens(text: str) -> str:
    """Lower case, no commas and question marks, a space before every "'s"."""
    return text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()


def one_line(text: str) -> str:
    """Line ends and tabs as spaces, none around the text."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def without_marks(text: str, comma: re.Pattern[str] = EVALAI_COMMA) -> str:
    """Punctuation deleted or made a space.

    Args:
        text: any.
        comma: finds what makes all marks of a text be deleted: a comma between digits.
    """
    spaced, has_comma = text, comma.search(text) is not None
    for mark in MARKS:
        touches_space = f"{mark} " in text or f" {mark}" in text
        spaced = spaced.replace(mark, "" if has_comma or touches_space else " ")
    return STOP.sub("", spaced, count=MAX_STOPS)


def plain_words(text: str) -> str:
    """Lower case, number words as digits, no articles, apostrophes where they belong, single spaces."""
    words = (NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(APOSTROPHES.get(word, word) for word in words if word not in ARTICLES)
