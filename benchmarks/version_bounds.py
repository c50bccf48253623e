"""The tests at the lowest and at the highest versions that ``pyproject.toml`` allows, in two environments.

    python benchmarks/version_bounds.py                                   # every quick test, some 20 minutes each
    python benchmarks/version_bounds.py tests/artifact tests/families     # a part: printed, and kept where --out says

uv makes the environments, below ``.venv-bounds``: *lowest* with the lower bound of each direct dependency (and of what
they need, the newest), *highest* with the newest of everything. The tests of each run in one process after the other.
Versions and counts go to ``--out``; the exit code is 1 where a test of this run fails. Where torch is to come from
somewhere else than the package index, uv's own variables say so (``UV_FIND_LINKS``, ``UV_TORCH_BACKEND=cpu``).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv-bounds"
OUT = ROOT / "benchmarks" / "results" / "version_bounds.json"
BOUNDS = {"lowest": "lowest-direct", "highest": "highest"}
"""Environment -> uv's ``--resolution``."""
WHOLE = ["tests"]
MARKS = "not slow and not gpu"
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)\b")


def direct_dependencies() -> list[str]:
    """Names of the package's own requirements and of its extra ``dev``, as ``pyproject.toml`` has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return sorted({re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines})


def make(name: str) -> Path:
    """The Python of an environment with the package, editable, and its extra ``dev``."""
    folder = ENVIRONMENTS / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run = [sys.executable, "-m", "uv"]
    subprocess.run(
        [*run, "venv", "--quiet", "--seed", "--allow-existing", "--python", sys.executable, str(folder)], check=True
    )
    words = ["pip", "install", "--quiet", "--python", str(python), "--upgrade", "--resolution", BOUNDS[name]]
    subprocess.run([*run, *words, "--editable", f"{ROOT}[dev]"], check=True)
    return python


def installed(python: Path) -> dict[str, str]:
    """Versions of the direct dependencies in an environment, by name."""
    words = [sys.executable, "-m", "uv", "pip", "list", "--python", str(python), "--format", "json"]
    listed = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    found = {entry["name"].lower().replace("_", "-"): entry["version"] for entry in listed}
    return {name: found[name] for name in direct_dependencies()}


def counts(summary: str) -> dict[str, int]:
    """Outcome -> how many, of pytest's last line."""
    return {outcome.rstrip("s") if "error" in outcome else outcome: int(n) for n, outcome in _COUNT.findall(summary)}


def run_tests(python: Path, tests: list[str]) -> dict[str, Any]:
    """Run them; what failed, counts and seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    begin = time.perf_counter()
    pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words = [*pytest, "-m", MARKS, *tests]
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.strip())
    code, seconds = process.wait(), round(time.perf_counter() - begin)
    failed = [line.split(" - ")[0].split(maxsplit=1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {"exit_code": code, "counts": counts(lines[-1] if lines else ""), "failed": failed, "seconds": seconds}


def main() -> int:
    """Both environments, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=WHOLE, help="files and folders (default: tests)")
    parser.add_argument("--only", choices=BOUNDS, help="one environment alone; the other one's record stays")
    parser.add_argument("--out", type=Path, help=f"default: {OUT.relative_to(ROOT)}; of a part of the tests: none")
    args = parser.parse_args()
    names = [args.only] if args.only else list(BOUNDS)
    out = args.out or (OUT if args.tests == WHOLE else None)  # a part does not take the whole's place
    record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if args.only and out and out.is_file() else {}
    failed = False
    for name in names:
        python = make(name)
        found = run_tests(python, args.tests)
        print(f"{name}: {found['counts']}", flush=True)
        version = ".".join(map(str, sys.version_info[:3]))
        record[name] = {"python": version, "tests": args.tests, "marks": MARKS, **found, "versions": installed(python)}
        failed = failed or bool(found["exit_code"])
        if out:
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
