"""Two processes: what happens to one of them stops both at the same step; each goes on with its own random state."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "two_process_stop.py"


@pytest.mark.slow
def test_both_stop_and_go_on_alike(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    environment = {**os.environ, **common, "OMP_NUM_THREADS": "1"}
    environment.pop("PL_GLOBAL_SEED", None)  # of a run in this process: both would start from it
    processes = [
        subprocess.Popen([sys.executable, PROGRAM, tmp_path], env={**environment, "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found == {
            "stopped": "SIGTERM: stopped after step 2",
            "diverged": "the loss is NaN or infinite after step 2; it was not saved",
            "failed": "the checkpoint of step 4: File too large",
            "newest": "step-2",
            "same": True,
            "moved": True,
            "states_differ": True,
        }
