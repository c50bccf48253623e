"""``subtoken-train env``: the facts, and how absent things are written."""

import json
import os
import platform
from importlib.metadata import version

from subtoken_train.cli import env
from subtoken_train.cli.main import main


def test_json_holds_versions_and_hardware(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == version("torch")
    assert facts["cpu_count"] == os.cpu_count()
    assert {"subtoken_train", "platform", "nvidia_smi", *env.PACKAGES} <= set(facts)


def test_absent_package_and_absent_gpu(capsys, monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package-at-all",))
    monkeypatch.setattr(env.shutil, "which", lambda name: None)
    assert main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["no-such-package-at-all"] == "not installed"
    assert rows["nvidia_smi"] == "none found"
