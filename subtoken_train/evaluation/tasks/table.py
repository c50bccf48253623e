"""The rows of ``tasks.csv`` by name, which say what each benchmark is."""

import csv
import pkgutil

_TEXT = (pkgutil.get_data(__package__, "tasks.csv") or b"").decode()
TASK_ROWS = {row["name"]: row for row in csv.DictReader(_TEXT.splitlines(True))}
