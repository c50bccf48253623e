"""Worded errors for users' mistakes, warnings, and nearest-name suggestions.

``ValueError`` is what the library raises for wrong input, one short message and exit code 2 on the command line.
"""

import difflib
import errno
import math
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from numbers import Real
from pathlib import Path
from typing import Any


class SubTokenWarning(UserWarning):
    """Something a user should know about a result that is given all the same; commands print it on one line."""


_GONE = {
    ("key", "data.streaming"): "leave it out: a corpus is tokenised once, into a cache",
    ("key", "early_stopping.mode"): "leave it out: it follows from the monitor",
    ("setting", "eviction_unit"): "write it in eviction_keep, as 64tokens",
    ("key of an arm", "eviction_unit"): "write it in eviction_keep, as 64tokens",
    ("trainer.logger", "tensorboard csv"): "leave it out: every run logs to CSV, and to an installed TensorBoard",
    ("trainer.callbacks", "modelsummary richmodelsummary"): "write trainer.enable_model_summary: true",
    ("trainer.callbacks", "richprogress modelcheckpoint"): "leave it out: a run shows progress and keeps checkpoints",
    ("trainer.callbacks", "earlystopping"): "write the group early_stopping (docs/watching.md)",
    ("setting of DeepSpeed", "optimizer scheduler"): "write it in model.optimizer",
    ("setting of DeepSpeed", "fp16 bf16 torch_autocast"): "write it in trainer.precision",
    ("setting of DeepSpeed", "gradient_clipping"): "write it in trainer.gradient_clip_val",
    ("setting of DeepSpeed", "gradient_accumulation_steps"): "write it in trainer.accumulate_grad_batches",
    ("setting of DeepSpeed", "train_batch_size train_micro_batch_size_per_gpu"): "write it in data.batch_size",
    ("generate", "--num-beams --video --fps --frames"): "Python has it (generate, Video)",
    ("diagnose", "--new-tokens"): "leave it out: 16 are generated",
}


def instead(place: str, name: str) -> str | None:
    """Return what to write instead of a name that left that place, or that Lightning or DeepSpeed has there."""
    alike = {name, re.sub(r"_|(logger|bar)$", "", name.lower())}  # of a class and of its name
    return next((words for (where, names), words in _GONE.items() if where == place and alike & {*names.split()}), None)


def unknown_name(kind: str, got: object, allowed: Iterable[str], listed: str | None = None) -> ValueError:
    """Return the error for an unknown name: what was got, the nearest name, what is allowed (None: the first ones)."""
    if words := instead(kind, str(got)):
        return ValueError(f"unknown {kind} {got!r}; {words}")
    names = sorted(allowed)
    nearest = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"unknown {kind} {clipped(repr(got), _GOT)}.{hint} Allowed: {listed or first_names(names)}")


def first_names(names: Collection[str]) -> str:
    """Return as many names as a message holds, and how many more there are."""
    listed = [words for words in accumulate(names, "{}, {}".format) if len(words) <= _LISTED]
    more = f", and {len(names) - len(listed)} more" if len(listed) < len(names) else ""
    return f"{listed[-1] if listed else ''}{more}"


def nearest_folder(path: Path) -> str | None:
    """Return the name of a folder beside a path that is not there, the nearest one; None where none is near."""
    names = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    return next(iter(difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)), None)


def check_word(kind: str, got: object, allowed: Collection[str]) -> None:
    """Raise ``unknown_name`` unless a name is allowed."""
    if got not in allowed:
        raise unknown_name(kind, got, allowed)


def refuse(*faults: tuple[object, str]) -> None:
    """Raise ``ValueError`` with the words of the first fault that is there."""
    for there, words in faults:
        if there:
            raise ValueError(words)


def check_together(*pairs: tuple[object, object, str]) -> None:
    """Raise ``ValueError`` for the first two settings, in words, that are both there: ``why; what else to do``."""
    for one, other, why in pairs:
        reason, _, instead = why.partition("; ")
        rest = f", or {instead}" if instead else ""
        refuse((one and other, f"{one} does not go with {other}: {reason}; leave one of them out{rest}"))


def check_package(package: str, extra: str, need: str, instead: str = "") -> None:
    """Raise ``ValueError`` unless a package is installed, with the pip command that adds it, and what else helps."""
    other = f", or {instead}" if instead else ""
    refuse((find_spec(package) is None, f"{need} needs {package}, which is not installed: {pip_line(extra)}{other}"))


def pip_line(extra: str) -> str:
    """Return the command that adds an extra: the package's name is on no index."""
    return f"pip install '.[{extra}]' in a checkout of subtoken_train"


@contextmanager
def at_place(before: str, after: str = "") -> Iterator[None]:
    """Raise a ``ValueError`` of the block again with words around it: its place, and what to do."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{before}{error}{after}") from None


@contextmanager
def ending_with(command: str) -> Iterator[None]:
    """Raise a ``ValueError`` of the block again with the command to type next where that helps; a decorator too."""
    try:
        yield
    except ValueError as error:
        words = str(error)
        if isinstance(error, UncutError) or any(each in words for each in _NO_KEYS):
            raise
        raise ValueError(f"{words}{' ' if words.endswith(('.', '?')) else '; '}{command}") from None


_NO_KEYS = ("subtoken-train ", "is not a regular file", "is not UTF-8", "unexpected argument")
in_a_recipe = ending_with("'subtoken-train fit --help' lists the keys, with types and defaults")
in_a_grid = ending_with("'subtoken-train recipes show mini_recall' prints a whole grid")


def no_numbers(where: str, dtype: object) -> ValueError:
    """Return the error for a model that gives NaN or infinity: where, and what helps."""
    name = str(dtype).removeprefix("torch.")
    wider = {"float16": "choose a wider dtype (bfloat16 or float32)", "bfloat16": "choose a wider dtype (float32)"}
    advice = wider.get(name, "there is no wider dtype to choose: check its weights and its inputs")
    return ValueError(f"the model gave NaN or infinite numbers {where}, computing in {name}; {advice}")


@contextmanager
def panics_in_words() -> Iterator[None]:
    """Raise ``ValueError`` where a tokenizer's Rust panics, whose exception is no ``Exception``; a decorator too."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        why = clipped(" ".join(str(error).split()), 120)
        raise ValueError(f"the tokenizer broke down at this text ({why}); shorten it, or break up its runs") from None


def clipped(text: str, most: int) -> str:
    """Shorten a text to ``most`` characters for a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def system_words(error: OSError) -> str:
    """Say what the system refused, of which path, and what to do: ``Not a directory: a/b; a part of it is a file``."""
    return f"{error.strerror}: {error.filename}; {_ADVICE.get(error.errno or 0, 'name another file or folder')}"


_ADVICE = {
    errno.ENOENT: "check its spelling, and the folder that you are in",
    **dict.fromkeys((errno.EEXIST, errno.EROFS), "name another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or name another place"),
    errno.ENOTDIR: "a part of that path is a file; check its spelling",
    errno.EISDIR: "name a file",
    errno.ENAMETOOLONG: "no file has so long a name; look at the command for a missing space",
    errno.ELOOP: "its symbolic links form a loop; name the file itself",
    errno.ENXIO: "the pipe has no reader; name a regular file",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "nothing was lost: make room, or write elsewhere"),
}


class UncutError(ValueError):
    """A user's mistake whose message is shown whole: it lists what differs, or ends with a command to type."""


def plain(text: str) -> str:
    r"""Return a text with control characters and the like written out (``\x1b``); line breaks and tabs stay."""
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shell_words(*words: object) -> str:
    r"""Return words as a command for bash, or a part of one, on one line: quoted, controls as bytes (``$'\x0a'``)."""
    quoted = []
    for word in map(str, words):
        if _UNTYPED.search(word):
            plain_word = re.sub(r"[\\']", r"\\\g<0>", word)
            escaped = _UNTYPED.sub(lambda at: "".join(map("\\x{:02x}".format, os.fsencode(at[0]))), plain_word)
            quoted.append(f"$'{escaped}'")
        else:
            quoted.append(shlex.quote(word))
    return " ".join(quoted)


_LISTED, _GOT = 220, 80
_CONTROLS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
"""Control characters, what turns the direction of writing, halves of characters, and what shows nothing.

The joiners U+200C and U+200D are letters of Persian, Hindi and emoji.
"""
_UNSHOWN, _UNTYPED = re.compile(f"[{_CONTROLS}]"), re.compile(rf"[\t\n{_CONTROLS}]")


MAX_SEED = 2**32 - 1  # largest seed that every generator of random numbers takes
COLD = 1e-5  # a temperature at which the likeliest token is drawn; divided by a lower one, logits may be no numbers
MAX_TOKENS = 2**24  # more than any model reads; a length past it is a slip of the hand, and would be allocated
MAX_COUNT = 10**9


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise ``ValueError`` unless a value is None, or a finite number from ``low`` to ``high``."""
    number = isinstance(value, Real)
    if value is None or (number and low <= value <= min(high, sys.float_info.max)):
        return
    allowed = f"{low:,} or more" if high == math.inf else f"{low:,} to {high:,}"
    got = f"{value:,}" if number else clipped(repr(value), _GOT)
    got = "a number of many digits" if isinstance(value, int) and abs(value) >= 10**15 else got
    raise ValueError(f"{name} is {got}; it must be {allowed}")
