"""``subtoken-train serve``: mistakes are words before anything is loaded, and the command answers until SIGTERM."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from subtoken_train.cli.main import main
from tests.support.commands import refused
from tests.support.places import ROOT

MODEL = ["--backbone", "checkpoints/tiny-llama"]


def test_a_port_in_use_and_a_key_that_no_header_holds(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} of 127.0.0.1 is in use" in refused(capsys, "serve", *MODEL, "--port", str(port))
    (tmp_path / "key").write_text("a\nb\x01\n")
    said = refused(capsys, "serve", *MODEL, "--api-key-file", tmp_path / "key")
    assert "must hold keys of visible ASCII, one a line" in said


def test_kernels_are_compiled_before_it_says_that_it_serves(capsys, monkeypatch, tmp_path):
    """And what stands on the command line is what the server has."""
    told, servers = [], []

    def serve(server, host, port, say):
        servers.append(server)
        told.append("serves")

    monkeypatch.setattr("subtoken_train.kernels.native.library", lambda: told.append("compiled"))
    monkeypatch.setattr("subtoken_train.serving.http_app.serve_chats", serve)
    (tmp_path / "keys").write_text("a\n\nb\n")
    more = ["--api-key-file", str(tmp_path / "keys"), "--contexts-per-key", "--allow-origin", "https://a.org"]
    assert main(["serve", *MODEL, "--port", "0", *more]) == 2  # no port
    assert main(["serve", *MODEL, *more]) == 0
    assert told == ["compiled", "serves"]
    settings = servers[0].settings
    assert (settings.keys, settings.apart, settings.origins) == (("a", "b"), True, ("https://a.org",))


@contextmanager
def serving(*more: str, host: str = "127.0.0.1"):
    """A process that serves at a free port, once it has said so, and the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "subtoken_train", "serve", *MODEL, "--port", str(port), *more]
    running = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout.readline() == f"http://{host}:{port}/v1 serves 'tiny-llama' (Ctrl-C ends it)\n"
        yield running, port
    finally:
        running.kill()


def test_it_answers_until_it_is_told_to_end():
    with serving("--host", "0.0.0.0", host="0.0.0.0") as (running, port):
        socket.create_connection(("127.0.0.1", port)).close()  # once it says so, it is reached
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        asked = [{"role": "user", "content": "Hi"}]
        reply = client.chat.completions.create(model="tiny-llama", messages=asked, max_tokens=2)
        assert reply.usage.completion_tokens == 2
        stream = client.chat.completions.create(model="tiny-llama", messages=asked, max_tokens=12, stream=True)
        next(stream)
        running.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"  # an answer on its way is finished
        assert running.wait(timeout=30) == 130
    said = running.stderr.read()
    assert re.search("warning: --host 0.0.0.0 without --api-key-file: whoever reaches it is answered", said)
    assert said.endswith("subtoken-train: interrupted\n")
    assert re.search(r"^POST /v1/chat/completions 200, \d+\+2 tokens, \d+\.\d\d s$", said, re.MULTILINE)
    assert "Traceback" not in said


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc to find the processes in")
def test_two_processes_answer_at_one_address_and_end_together():
    with serving("--device", "cpu,cpu") as (running, port):
        said = set()
        for _ in range(12):
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            asked = [{"role": "user", "content": "What is a list?"}]
            reply = client.chat.completions.create(model="tiny-llama", messages=asked, max_tokens=8)
            said.add(reply.choices[0].message.content)
            client.close()
        assert len(said) == 1
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        servers = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(servers) == 2
        os.kill(servers[1], signal.SIGKILL)
        running.wait(timeout=60)
        words = "error: the server on cpu ended (exit code -9), and so did the others; start them again\n"
        assert running.stderr.read().endswith(words)
        assert running.returncode == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in servers)
        socket.create_server(("127.0.0.1", port)).close()
