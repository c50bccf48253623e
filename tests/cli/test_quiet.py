"""What libraries say that no user can act on is not shown; what matters is."""

import logging

import pytest

from subtoken_train.cli.terminal import quiet_libraries


@pytest.mark.parametrize(
    ("logger", "message", "shown"),
    [
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: no", False),
        ("bitsandbytes.autograd._functions", "MatMul8bitLt: inputs will be cast from bfloat16 to float16", False),
        ("bitsandbytes.autograd._functions", "something is wrong", True),
        ("lightning.pytorch.utilities.rank_zero", "Tip: For seamless cloud uploads", False),
    ],
)
def test_noise_is_filtered_by_message(logger, message, shown):
    quiet_libraries()
    record = logging.LogRecord(logger, logging.WARNING, __file__, 1, message, None, None)
    assert bool(logging.getLogger(logger).filter(record)) == shown
