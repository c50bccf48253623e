"""kill -9 at random moments and in the middle of a checkpoint's file: nothing is lost, nothing is seen twice."""

import os
import random
import signal

import pytest

from subtoken_train.datasets.scene_files import write_scenes
from tests.support.killed_runs import RunServer, Scene, complete_run, differences, kill_at, kill_writing, wait_until


def end_politely(server: RunServer, scene: Scene, run: str) -> None:
    """SIGTERM to the run and its workers, as a cluster sends it."""
    before = scene.newest(run)
    pid = server.start(scene.restart(run))
    wait_until(lambda: scene.newest(run) != before, server)
    os.killpg(pid, signal.SIGTERM)
    assert server.wait() == 143
    said = server.log.read_text()
    assert "SIGTERM: stopped after step" in said
    assert f"last good checkpoint: {scene.newest(run)}" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_three_kills_change_nothing(tmp_path):
    write_scenes(tmp_path / "scenes", train=20, dev=1, test=1)  # passes of five micro-batches, windows of 2, 2 and 1
    scene, rng = Scene(tmp_path, steps=12), random.Random()
    with RunServer(tmp_path / "log.txt") as server:
        complete_run(server, scene, "unbroken")
        first = kill_at(server, scene, "killed", rng.randrange(3), rng.uniform(0, 0.05))
        second = kill_writing(server, scene, "killed", nth=1)
        kill_at(server, scene, "killed", 2 * (second.resumed_from or 0) + rng.randrange(2), rng.uniform(0, 0.05))
        end_politely(server, scene, "killed")
        complete_run(server, scene, "killed")
    assert second.resumed_from == first.resumed_from
    assert f"step-{(first.resumed_from or 0) + 1}.partial" in second.left_behind
    assert differences(scene, "unbroken", "killed") == []
    seen = [name for names in scene.samples("killed") for name in names]
    assert len(scene.samples("killed")) == 20
    for start in range(0, len(seen), 20):  # each record once in every pass
        assert len(set(seen[start : start + 20])) == 20
