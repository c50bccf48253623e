"""kill -9 at random moments and in the middle of a checkpoint's file: nothing is lost, nothing is seen twice."""

import random

from subtoken_train.datasets.scene_files import write_scenes

from kill_restart import Scene, complete_run, differences, kill_at, kill_writing
from run_server import RunServer


def test_three_kills_change_nothing(tmp_path):
    write_scenes(tmp_path / "scenes", train=20, dev=1, test=1)  # passes of five micro-batches, windows of 2, 2 and 1
    scene, rng = Scene(tmp_path, steps=5), random.Random()
    with RunServer(tmp_path / "log.txt") as server:
        complete_run(server, scene, "unbroken")
        first = kill_at(server, scene, "killed", rng.randrange(4), rng.uniform(0, 0.05))
        second = kill_writing(server, scene, "killed", nth=1)
        kill_at(server, scene, "killed", 2 * (second.resumed_from or 0) + rng.randrange(3), rng.uniform(0, 0.05))
        complete_run(server, scene, "killed")
    assert second.resumed_from == first.resumed_from
    assert f"step-{(first.resumed_from or 0) + 1}.partial" in second.left_behind
    assert differences(scene, "unbroken", "killed") == []
    seen = [name for names in scene.samples("killed") for name in names]
    assert len(scene.samples("killed")) == 9
    assert len(set(seen[:20])) == 20  # each record once in the first pass
