"""What each benchmark is: the rows of ``tasks.csv`` by name."""

import csv
import pkgutil

_TEXT = (pkgutil.get_data(__package__, "tasks.csv") or b"").decode()
TASK_ROWS = {row["name"]: row for row in csv.DictReader(_TEXT.splitlines())}
