"""Addresses that a server cannot have are refused in words; so is everything that the command finds before it loads."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from subtoken_train.cli.main import main
from subtoken_train.demo.local_server import check_address

ADAPTER = ["--adapter", "checkpoints/adapters/tiny_fastv25_s16k4"]


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def error(capsys, *argv):
    assert main(["demo", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_port_in_use(taken):
    with pytest.raises(ValueError, match=rf"--port {taken} of 127\.0\.0\.1 is in use; choose another one"):
        check_address("127.0.0.1", taken)


def test_a_free_port_stays_free(taken):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_address("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1", "a" * 80])
def test_no_address_of_this_machine(host):
    with pytest.raises(ValueError, match="is no address of this machine"):
        check_address(host, 45678)


def test_the_command_without_gradio(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("subtoken_train.cli.demo.find_spec", lambda name: None if name == "gradio" else find(name))
    assert "not installed: pip install 'subtoken_train[demo]'" in error(capsys, *ADAPTER)


def test_mistakes_before_anything_is_loaded(capsys, monkeypatch, taken):
    monkeypatch.setattr("subtoken_train.cli.demo.find_spec", lambda name: name)
    monkeypatch.setattr("subtoken_train.inference.pool.load_family", lambda *args: pytest.fail("weights were read"))
    assert "the following arguments are required: --adapter" in error(capsys)
    assert "--port is 70,000; it must be 1 to 65,535" in error(capsys, *ADAPTER, "--port", "70000")
    assert f"--port {taken} of 127.0.0.1 is in use" in error(capsys, *ADAPTER, "--port", str(taken))
    assert "nowhere is not an adapter folder" in error(capsys, "--adapter", "nowhere")
    assert "Did you mean '--anchor'?" in error(capsys, *ADAPTER, "--ancor", "x")
