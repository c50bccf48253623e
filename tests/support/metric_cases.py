"""A few answers for every task's metric: what the tests of all metrics run on. A new task is one line in ``CASES``."""

from collections.abc import Mapping, Sequence
from typing import Any

Answered = Sequence[tuple[Any, Mapping[str, Any]]]
"""Predictions with the references of their samples."""

YES_NO = [("Yes", "yes"), ("no", "no"), ("No, it is", "yes"), ("yes.", "no"), ("NO", "no")]
FREE = [("0.28", ["0.28"]), ("itc", ["ITC Limited", "itc ltd"]), ("cat", ["dog"]), ("new  york", ["new york"] * 3)]


def _pope() -> Answered:
    kinds = ("random", "random", "popular", "popular", "adversarial")
    return [(text, {"label": label, "category": kind}) for (text, label), kind in zip(YES_NO, kinds, strict=True)]


def _mme() -> Answered:
    pairs = ("count/1", "OCR/1", "count/1", "OCR/1", "OCR/2")
    return [
        (text, {"answer": answer, "category": pair.partition("/")[0], "pair": pair})
        for (text, answer), pair in zip(YES_NO, pairs, strict=True)
    ]


def _mmbench() -> Answered:
    options = {"A": "cat", "B": "red dog"}
    rows = [("A", 1, "A"), ("B. red dog", 2, "B"), ("a red dog", 1_000_001, "B"), ("B", 1_000_002, "A"), ("?", 3, "A")]
    return [(text, {"index": index, "answer": answer, "options": options}) for text, index, answer in rows]


def _scienceqa() -> Answered:
    rows = [("A", True), ("b", True), ("B. x", False), ("The answer is B.", True), ("", False)]
    return [(text, {"answer": 1, "choices": 3, "image": image}) for text, image in rows]


def _people() -> Answered:
    return [(text, {"answers": answers}) for text, answers in FREE]


def _chartqa() -> Answered:
    rows = [("1", "1", "human"), ("2", "9", "human"), ("3%", "0.03", "human"), ("4", "4", "augmented")]
    return [(text, {"answer": answer, "kind": kind}) for text, answer, kind in rows]


def _captions() -> Answered:
    rows = [("a dog runs", ["a dog runs fast", "the dog"]), ("ein Hündchen", ["a cat"]), ("", ["two red cars", "cars"])]
    return [(text, {"captions": captions}) for text, captions in rows]


def _local() -> Answered:
    rows = [("exact_match", "a cat."), ("contains", "not it"), ("relaxed", "9"), ("anls", "a cta")]
    return [(text, {"answers": ["a cat"], "metric": metric}) for metric, text in rows]


def _letters(task: str) -> Answered:
    return [(text, {"task": task, "answer": letter}) for text, letter in [("B", "B"), ("b. x", "A"), ("It is C", "C")]]


def _mmstar() -> Answered:
    rows = [("A", "geometry"), ("B.", "geometry"), ("the answer is A", "localization"), ("", "recognition")]
    return [(text, {"answer": "A", "l2_category": axis}) for text, axis in rows]


def _mmmu() -> Answered:
    rows = [("B", ["x", "y"], ["B"]), ("It is 1,000", [], ["1000"]), ("no", [], ["7", "seven"]), ("?", ["x"], ["A"])]
    return [(text, {"options": options, "answers": answers}) for text, options, answers in rows]


def _mathematics(harness: str) -> Answered:
    rows = [(r"So it is $\boxed{\frac{1}{2}}$.", "0.5"), ("$7$", "7"), ("It is 70.", "70"), ("", "3")]
    return [(text, {"answer": right, "solution": rf"\boxed{{{right}}}", "harness": harness}) for text, right in rows]


def _mathvista() -> Answered:
    rows = [("float", "1.23", 1.0, "1.2"), ("integer", "it is 7", None, "7"), ("list", "none", None, "[1, 2]")]
    kinds = {"choices": None, "question_type": "free_form"}
    return [
        (text, {**kinds, "answer_type": kind, "precision": precision, "answer": answer})
        for kind, text, precision, answer in rows
    ]


def _ruler() -> Answered:
    rows = [("vt", "AB and CD"), ("vt", "AB"), ("qa_1", "cd"), ("cwe", "nothing")]
    return [(text, {"task": task, "answers": ["AB", "CD"]}) for task, text in rows]


def _longbench() -> Answered:
    rows = [("qasper", "a cat", "the cat"), ("samsum", "A cat. It ran.\n", "a cat ran"), ("lcc", "  x = 1", "  x = 2")]
    return [(text, {"set": name, "answers": [answer, "?"]}) for name, text, answer in rows]


def _longbench_v2() -> Answered:
    rows = [("(B).", "easy", "short"), ("B", "hard", "long"), ("", "easy", "long")]
    groups = [{"answer": "B", "difficulty": group, "length": size} for _, group, size in rows]
    return [(f"The correct answer is {said}", group) for (said, *_), group in zip(rows, groups, strict=True)]


def _scenes(kind: str, *answers: str) -> Answered:
    return [(answers[0], {"kind": kind, "answer": answer}) for answer in answers]


CASES: dict[str, Answered] = {
    "ai2d": _letters("ai2d"),
    "aime25": _mathematics("aime"),
    "chartqa": _chartqa(),
    "coco_caption": _captions(),
    "docvqa": _people(),
    "gqa": [("Surfing.", {"answer": "surfing"}), ('"no"', {"answer": "no"}), ("a", {"answer": "b"})],
    "infographicvqa": _people(),
    "local": _local(),
    "local_text": _local(),
    "longbench": _longbench(),
    "longbench_v2": _longbench_v2(),
    "math500": _mathematics("hendrycks_math"),
    "mathvista": _mathvista(),
    "mmbench": _mmbench(),
    "mmbench_cn": _mmbench(),
    "mmbench_video": [("a man", {}), ("", {}), ("B", {})],
    "mme": _mme(),
    "mmlu": [([-1.0, -2.0], {"answer": 0}), ([-1.0, -2.0], {"answer": 1}), ([-3.0, -2.0], {"answer": 1})],
    "mmmu": _mmmu(),
    "mmstar": _mmstar(),
    "needle_map": _ruler(),
    "ocrbench": [(text, {"answers": ["Cafe 24"], "formula": formula}) for text, formula in (("cafe 24!", 0), ("x", 1))],
    "pope": _pope(),
    "realworldqa": _letters("realworldqa"),
    "recall": [
        (" baran amber falcon.", {"codes": {"baran": "amber falcon", "calek": "icy owl"}}),
        ("", {"codes": {"a": "b"}}),
    ],
    "ruler": _ruler(),
    "ruler_synthetic": _ruler(),
    "scienceqa": _scienceqa(),
    "scenes_caption": _scenes("describe", "A1 red 7", "A1 red 7 B2 blue 3"),
    "scenes_gqa": _scenes("color", "red", "blue"),
    "scenes_mmbench": _scenes("choice", "A", "B"),
    "scenes_pope": _scenes("exists", "yes", "no"),
    "scenes_textvqa": _scenes("read", "red 7", "red 8"),
    "seedbench": _letters("seedbench"),
    "textcaps": _captions(),
    "textvqa": _people(),
    "video_tt": [("A", {}), ("", {})],
    "vizwiz": _people(),
    "vqav2": _people(),
    "wikitext": [
        ([-9.5], {"words": 2, "bytes": 9}),
        ([-3.0], {"words": 1, "bytes": 5}),
        ([-40.0], {"words": 8, "bytes": 41}),
    ],
}
