"""Workers and the signals of a whole run."""

import os
import signal
import time

from subtoken_train.datasets.loaders import outlive_stop_signals


def test_a_worker_outlives_all_but_the_second_sigterm():
    child = os.fork()
    if child == 0:
        outlive_stop_signals(0)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.3)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
