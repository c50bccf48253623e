"""Which path attends, and what is said where a forced one cannot run."""

import json

import pytest

from subtoken_train.cli.main import main
from subtoken_train.kernels import choice
from subtoken_train.kernels.choice import choose_kernel


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    for name in (choice.VARIABLE, "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    choice._choices.clear()
    yield
    choice._choices.clear()


@pytest.mark.parametrize(
    ("device", "installed", "path", "why"),
    [
        ("cpu", True, "cpu", "device is cpu"),
        ("mps", True, "cpu", "device is mps"),
        ("cuda", True, "triton", "device is cuda"),
        ("cuda", False, "cpu", "not installed"),
    ],
)
def test_the_device_decides(device, installed, path, why, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: name if installed else None)
    chosen = choose_kernel(device)
    assert (chosen.path, chosen.forced) == (path, False)
    assert why in str(chosen)


def test_a_forced_path_is_taken_and_said(monkeypatch, capsys):
    monkeypatch.setenv(choice.VARIABLE, "reference")
    assert choose_kernel("cuda").path == "reference"
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernel"] == "reference (SUBTOKEN_KERNEL says so)"


@pytest.mark.parametrize(
    ("forced", "installed", "words"),
    [
        ("fast", True, "use one of reference, cpu, triton"),
        ("triton", False, "triton is not installed"),
        ("triton", True, "lies on 'cpu'"),
    ],
)
def test_a_forced_path_that_cannot_run_is_one_message(forced, installed, words, monkeypatch, capsys):
    monkeypatch.setenv(choice.VARIABLE, forced)
    monkeypatch.setattr(choice, "find_spec", lambda name: name if installed else None)
    with pytest.raises(ValueError, match=words):
        choose_kernel("cpu")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["env"]) == 2
    assert words in capsys.readouterr().err
