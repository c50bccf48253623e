"""A few answers for every task's metric: what the tests of all metrics run on. A new task is one line in ``CASES``."""

from collections.abc import Mapping, Sequence
from typing import Any

Answered = Sequence[tuple[Any, Mapping[str, Any]]]  # predictions with the references of their samples


def _rows(fields: str, *rows: tuple[Any, ...], **same: Any) -> Answered:
    return [(said, same | dict(zip(fields.split(), values, strict=True))) for said, *values in rows]


def _letters(task: str) -> Answered:
    return _rows("answer", ("B", "B"), ("b. x", "A"), ("It is C", "C"), task=task)


def _mathematics(harness: str) -> Answered:
    rows = [(r"So it is $\boxed{\frac{1}{2}}$.", "0.5"), ("$7$", "7"), ("It is 70.", "70"), ("", "3")]
    return [(text, {"answer": right, "solution": rf"\boxed{{{right}}}", "harness": harness}) for text, right in rows]


def _scenes(kind: str, *answers: str) -> Answered:
    return [(answers[0], {"kind": kind, "answer": answer}) for answer in answers]


_PEOPLE = _rows(
    "answers", ("0.28", ["0.28"]), ("itc", ["ITC Limited", "itc ltd"]), ("cat", ["dog"]),
    ("new  york", ["new york"] * 3),
)  # fmt: skip
_CAPTIONS = _rows(
    "captions", ("a dog runs", ["a dog runs fast", "the dog"]), ("ein Hündchen", ["a cat"]),
    ("", ["two red cars", "cars"]),
)  # fmt: skip
_LOCAL = _rows(
    "metric", ("a cat.", "exact_match"), ("not it", "contains"), ("9", "relaxed"), ("a cta", "anls"), answers=["a cat"]
)
_MMBENCH = _rows(
    "index answer", ("A", 1, "A"), ("B. red dog", 2, "B"), ("a red dog", 1_000_001, "B"), ("B", 1_000_002, "A"),
    ("?", 3, "A"), options={"A": "cat", "B": "red dog"},
)  # fmt: skip
_RULER = _rows("task", ("AB and CD", "vt"), ("AB", "vt"), ("cd", "qa_1"), ("nothing", "cwe"), answers=["AB", "CD"])
CASES: dict[str, Answered] = {
    "ai2d": _letters("ai2d"), "aime25": _mathematics("aime"),
    "chartqa": _rows(
        "answer kind", ("1", "1", "human"), ("2", "9", "human"), ("3%", "0.03", "human"), ("4", "4", "augmented")
    ),
    "coco_caption": _CAPTIONS, "docvqa": _PEOPLE,
    "gqa": _rows("answer", ("Surfing.", "surfing"), ('"no"', "no"), ("a", "b")), "infographicvqa": _PEOPLE,
    "local": _LOCAL, "local_text": _LOCAL,
    "longbench": _rows(
        "set answers", ("a cat", "qasper", ["the cat", "?"]), ("A cat. It ran.\n", "samsum", ["a cat ran", "?"]),
        ("  x = 1", "lcc", ["  x = 2", "?"]),
    ),
    "longbench_v2": _rows(
        "difficulty length", ("The correct answer is (B).", "easy", "short"),
        ("The correct answer is B", "hard", "long"), ("The correct answer is ", "easy", "long"), answer="B",
    ),
    "math500": _mathematics("hendrycks_math"),
    "mathvista": _rows(
        "answer_type precision answer", ("1.23", "float", 1.0, "1.2"), ("it is 7", "integer", None, "7"),
        ("none", "list", None, "[1, 2]"), choices=None, question_type="free_form",
    ),
    "mmbench": _MMBENCH, "mmbench_cn": _MMBENCH, "mmbench_video": [("a man", {}), ("", {}), ("B", {})],
    "mme": _rows(
        "answer category pair", ("Yes", "yes", "count", "count/1"), ("no", "no", "OCR", "OCR/1"),
        ("No, it is", "yes", "count", "count/1"), ("yes.", "no", "OCR", "OCR/1"), ("NO", "no", "OCR", "OCR/2"),
    ),
    "mmlu": _rows("answer", ([-1.0, -2.0], 0), ([-1.0, -2.0], 1), ([-3.0, -2.0], 1)),
    "mmmu": _rows(
        "options answers", ("B", ["x", "y"], ["B"]), ("It is 1,000", [], ["1000"]), ("no", [], ["7", "seven"]),
        ("?", ["x"], ["A"]),
    ),
    "mmstar": _rows(
        "l2_category", ("A", "geometry"), ("B.", "geometry"), ("the answer is A", "localization"), ("", "recognition"),
        answer="A",
    ),
    "needle_map": _RULER, "ocrbench": _rows("formula", ("cafe 24!", 0), ("x", 1), answers=["Cafe 24"]),
    "pope": _rows(
        "label category", ("Yes", "yes", "random"), ("no", "no", "random"), ("No, it is", "yes", "popular"),
        ("yes.", "no", "popular"), ("NO", "no", "adversarial"),
    ),
    "realworldqa": _letters("realworldqa"),
    "recall": _rows("codes", (" baran amber falcon.", {"baran": "amber falcon", "calek": "icy owl"}), ("", {"a": "b"})),
    "ruler": _RULER, "ruler_synthetic": _RULER,
    "scienceqa": _rows(
        "image", ("A", True), ("b", True), ("B. x", False), ("The answer is B.", True), ("", False), answer=1, choices=3
    ),
    "scenes_caption": _scenes("describe", "A1 red 7", "A1 red 7 B2 blue 3"),
    "scenes_gqa": _scenes("color", "red", "blue"), "scenes_mmbench": _scenes("choice", "A", "B"),
    "scenes_pope": _scenes("exists", "yes", "no"), "scenes_textvqa": _scenes("read", "red 7", "red 8"),
    "seedbench": _letters("seedbench"), "textcaps": _CAPTIONS, "textvqa": _PEOPLE, "video_tt": [("A", {}), ("", {})],
    "vizwiz": _PEOPLE, "vqav2": _PEOPLE,
    "facts": _rows("answers", ("Lisbon.", ["Lisbon"]), ("oslo", ["Oslo"]), ("Rome", ["Lima"]), formula=False),
    "text_loss": _rows("words bytes", ([-9.5], 2, 9), ([-3.0], 1, 5), ([-40.0], 8, 41)),
    "wikitext": _rows("words bytes", ([-9.5], 2, 9), ([-3.0], 1, 5), ([-40.0], 8, 41)),
}  # fmt: skip
