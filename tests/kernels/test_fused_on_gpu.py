"""The fused kernels on a GPU: the reference's numbers in every dtype, two launches, nothing read by the host."""

import pytest
import torch

from tests.support.packing import BOUNDS, FusedCell, deviation, layer_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(100))
def test_drawn(seed, dtype):
    cell = FusedCell.drawn(seed, dtype=dtype)
    assert deviation(cell, seed, "cuda") < BOUNDS[dtype], cell


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("pieces", ["none", "few", "many"])
def test_published_widths_and_long_layers(width, pieces, dtype):
    given = {"width": width, "pieces": pieces, "entries": 3000, "keeps": "some", "heads": 4, "layout": "per_head"}
    cell = FusedCell.drawn(width, dtype=dtype, group=4, **given)
    assert deviation(cell, width, "cuda") < BOUNDS[dtype], cell


def launches(call) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    own = torch.autograd.DeviceType.CUDA  # calls of the driver are events of the host
    return [event.name for event in profile.events() if event.device_type == own]


def test_a_layer_takes_three_launches_at_most_and_waits_for_nothing(monkeypatch):
    from subtoken_train.kernels.dispatch import attend
    from subtoken_train.kernels.row_table import FusedState
    from subtoken_train.kernels.storage import Tail

    monkeypatch.delenv("SUBTOKEN_KERNEL", raising=False)
    cell = FusedCell.drawn(3, sets="own", keeps="some", entries=50, dtype="bfloat16", window=None, new=1)
    blocks, state = layer_of(cell, 3, "cuda"), FusedState()
    states = torch.randn(2, cell.heads, 3, cell.width, device="cuda", dtype=torch.bfloat16)
    query, tail = states.repeat_interleave(cell.group, 1)[:, :, :1], Tail(states, states, 3)

    def step() -> torch.Tensor:
        return attend(query, blocks, tail, 0.3, state=state)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        names = launches(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(names) <= 3, names
    assert any("attend_stretch" in name for name in names)
