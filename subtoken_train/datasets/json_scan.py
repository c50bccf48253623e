"""The records of a JSON list or a JSON-lines file one after another, with their places, in bounded memory.

A data set of a million records is often one JSON list on a single line. It is read a block at a time; what a place
names, ``file[start:stop]``, is the text of one whole record.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from subtoken_train.documents import LENIENT_JSON, check_characters, check_regular, parse_json
from subtoken_train.typed import shown

_BLOCK = 2**22  # bytes read at a time
_BOM = codecs.BOM_UTF8  # some editors begin a file with it
_TAIL = 16  # characters; an error in a block's last ones may mean that it was cut: "-Infinity", "\ud83d\u"
_SPACE = re.compile(r"[ \t\n\r]*")


class Found(NamedTuple):
    """One record: the bytes ``start`` to ``stop`` (exclusive) of the file, and what they hold."""

    start: int
    stop: int
    row: Any


def scan_records(path: Path) -> Iterator[Found]:
    """Yield all records of a file: ``.jsonl`` is one record a line, any other name one JSON list; a BOM is passed over.

    Raises:
        ValueError: the text is not UTF-8, not JSON, or not a list, or it is of the other kind; the line is named.
    """
    check_regular(path)
    return _scan_lines(path) if path.suffix.lower() == ".jsonl" else _ListScanner(path).scan()


def _scan_lines(path: Path) -> Iterator[Found]:
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            begin = start + (len(_BOM) if number == 1 and line.startswith(_BOM) else 0)
            end = start + len(line)
            try:
                text = line[begin - start :].decode("utf-8")
                if start == 0 and text.lstrip().startswith("["):
                    raise ValueError(f"{path} is one JSON list, and .jsonl is one record a line; name the file .json")
                if text.strip():
                    yield Found(begin, end, _parsed(text, f"{path}, line {number}"))
            except UnicodeDecodeError as error:
                raise _not_utf8(path, begin + error.start) from None
            start = end


def _parsed(text: str, place: str) -> Any:
    try:
        return parse_json(text, place, constants=True)
    except ValueError as error:
        raise ValueError(f"{error}; each line of a .jsonl file is one whole record") from None


class _ListScanner:
    """A window of text that moves over the file: ``text[place]`` is the next character, ``byte`` its byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text, self.place, self.byte, self.line = "", 0, 0, 1
        self._bytes_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def scan(self) -> Iterator[Found]:
        with self.path.open("rb") as self._file:
            if self._file.read(len(_BOM)) == _BOM:
                self.byte = self._bytes_read = len(_BOM)
            else:
                self._file.seek(0)
            if self._peek() != "[":
                raise self._no_list()
            self._advance(self.place + 1)
            if self._peek() != "]":
                yield self._value()
                while self._peek() == ",":
                    self._advance(self.place + 1)
                    self._peek()
                    yield self._value()
            if self._peek() != "]":
                raise self._invalid("Expecting ',' delimiter", self.place)
            self._advance(self.place + 1)
            if self._peek():
                raise self._invalid("Extra data", self.place)

    def _peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.place)
            assert space is not None
            self._advance(space.end())
            if self.place < len(self.text):
                return self.text[self.place]
            if not self._read_more():
                return ""

    def _value(self) -> Found:
        """The JSON value that starts here."""
        while True:
            try:
                row, end = LENIENT_JSON.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self.text) - _TAIL or error.msg.startswith("Unterminated string")
                if cut and self._read_more():
                    continue
                raise self._invalid(error.msg, error.pos) from None
            except RecursionError:
                raise self._invalid("nested too deep", self.place) from None
            except ValueError as error:  # a key twice, a number that Python does not read
                raise self._invalid(str(error), self.place) from None
            if isinstance(row, int | float) and end >= len(self.text) - 2 and self._read_more():
                continue  # "1.5e+" is a number and the beginning of a longer one
            if max(self.text.find(half, self.place, end) for half in ("\\ud", "\\uD")) >= 0:
                check_characters(row, f"{self.path}, line {self.line + self.text.count(chr(10), 0, self.place)}")
            start = self.byte
            self._advance(end)
            return Found(start, self.byte, row)

    def _advance(self, place: int) -> None:
        passed = place - self.place
        self.byte += passed if self.text.isascii() else len(self.text[self.place : place].encode())
        self.place = place

    def _read_more(self) -> bool:
        """Append a block, of twice what is left, so that a long record costs linear time.

        False at the end of the file, where nothing is changed.
        """
        left = self.text[self.place :]
        block = self._file.read(max(_BLOCK, 2 * len(left)))
        try:
            more = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            held = len(error.object) - len(block)  # bytes of a character that the last block began
            raise _not_utf8(self.path, self._bytes_read - held + error.start) from None
        if not block:
            return False
        self._bytes_read += len(block)
        self.line += self.text.count("\n", 0, self.place)
        self.text, self.place = left + more, 0
        return True

    def _invalid(self, problem: str, place: int) -> ValueError:
        line = self.line + self.text.count("\n", 0, place)
        hint = "use the suffix .jsonl for one record a line"
        return ValueError(f"{self.path}, line {line}: invalid JSON ({problem}); {hint}")

    def _no_list(self) -> ValueError:
        row = self._value().row
        if self._peek() == "{" and isinstance(row, dict):
            problem = self._invalid("Extra data", self.place)
            return ValueError(f"{problem}, which this is")
        if self._peek():
            return self._invalid("Extra data", self.place)
        one = "; put it in brackets, or name the file .jsonl" if isinstance(row, dict) else ""
        return ValueError(f"{self.path} holds {shown(row)}; a list of records is needed{one}")


def _not_utf8(path: Path, byte: int) -> ValueError:
    return ValueError(f"{path} is not UTF-8 text (byte {byte}); save it as UTF-8 JSON")
