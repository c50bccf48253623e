"""Read from files of data what each benchmark is, what it says in prompts, and what it looks for in answers."""

import csv
import json
import pkgutil
from typing import Any

_TEXT = (pkgutil.get_data(__package__, "tasks.csv") or b"").decode()
TASK_ROWS = {row["name"]: row for row in csv.DictReader(_TEXT.splitlines(True))}
WORDS: dict[str, Any] = json.loads(pkgutil.get_data(__package__, "words.json") or b"")
