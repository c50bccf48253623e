"""What a release is made of, as linters of the extra ``release`` accept it (skipped where absent); nothing is built."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from benchmarks.version_bounds import direct_dependencies
from subtoken_train.version import __version__
from tests.support.places import ON_AN_INDEX, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
STEPS = runpy.run_path(str(ROOT / ".ci" / "container_steps.py"))


def test_the_version_stands_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PROJECT["project"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert source.read_text(encoding="utf-8").count(f'__version__ = "{__version__}"') == 1
    metadata_readers = [
        path for path in source.parent.rglob("*.py") if 'version("subtoken_train")' in path.read_text(encoding="utf-8")
    ]
    assert metadata_readers == []  # which an editable install may leave behind the source
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert "version" not in citation
    assert citation["preferred-citation"]["identifiers"][0]["value"] == "arXiv:2604.21335"


def test_pages_install_the_package_from_where_it_is():
    for page in (ROOT / "README.md", ROOT / "docs/install.md"):
        assert f"pip install {'subtoken_train' if ON_AN_INDEX else '.'}" in page.read_text(encoding="utf-8"), page
    from_an_index = re.compile(r"pip install (-\S+ )*'?subtoken_train(?!\w|\[\w+\] @ )")
    pages = [
        path
        for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.yaml"))
        if path.name != "CHANGELOG.md"
    ]
    assert ON_AN_INDEX or [page for page in pages if from_an_index.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("bundled", PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])
def test_the_container_is_given_what_the_wheel_bundles(bundled):
    """``.dockerignore`` names what is let in; what the wheel bundles must be among it."""
    wanted = [path for path in STEPS["context_files"]() if path == bundled or path.startswith(f"{bundled}/")]
    known = subprocess.run(["git", "ls-files", bundled], cwd=ROOT, capture_output=True, text=True, check=True)
    assert wanted
    assert set(known.stdout.splitlines()) <= set(wanted)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_is_there_and_may_do_little(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    called = [target for step in steps for target in re.findall(r"^make ([\w-]+)", step, re.MULTILINE)]
    assert [target for target in called if not re.search(rf"^{target}:", targets, re.MULTILINE)] == []
    assert all((ROOT / step).is_file() for step in steps if step.startswith(".ci/"))
    assert "secrets." not in path.read_text(encoding="utf-8")


def test_make_removes_nothing_that_a_user_may_have_put_there():
    """Results of an earlier `make real` least of all: every run of it has a folder of its own."""
    rules = re.split(r"^(?=[\w/.$()-]+:)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    removing = [rule for rule in rules if re.search(r"\brm\b|-delete|-exec", rule)]
    assert [rule.partition(":")[0] for rule in removing] == ["clean"]
    assert not re.search(r"\b(results|runs|data)\b", removing[0].partition("\n")[2])
    (real,) = [rule for rule in rules if rule.startswith("real:")]
    assert "--out results/real/$$(date +%Y%m%d-%H%M%S)" in real


def test_publishing_is_by_identity():
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "pypi"
    assert "permissions" not in jobs["build"]  # what runs our code cannot publish


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="check-jsonschema (extra release) is not installed")
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS), ("github-issue-forms", [TEMPLATES / "bug.yml", TEMPLATES / "method.yml"]),
        ("github-issue-config", [TEMPLATES / "config.yml"]), ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)  # fmt: skip
def test_their_schemas_accept_them(schema, files, tmp_path):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.yml").write_text("jobs: 1\n")
    assert subprocess.run([*command, str(tmp_path / "wrong.yml")], capture_output=True, check=False).returncode == 1


def hadolint() -> str | None:
    own = Path(sys.executable).with_name("hadolint")
    return str(own) if own.is_file() else shutil.which("hadolint")


@pytest.mark.skipif(hadolint() is None, reason="hadolint (extra release) is not installed")
def test_hadolint_finds_nothing_in_the_dockerfile():
    done = subprocess.run([hadolint(), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_both_bounds_are_of_every_direct_dependency():
    names = direct_dependencies()
    assert {"torch", "peft", "lm-eval", "huggingface-hub", "types-pyyaml"} <= set(names)
    assert not any(re.search(r"[^a-z0-9-]", name) for name in names)
