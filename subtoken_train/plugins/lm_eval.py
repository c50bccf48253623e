"""``python -m subtoken_train.plugins.lm_eval ARGS...``: lm-evaluation-harness with ``--model subtoken``.

The arguments are the harness's own. At the end it says what compression kept of the prompts' caches.
"""

import sys

from subtoken_train.cli.terminal import guarded, quiet_libraries
from subtoken_train.errors import check_package


def main() -> int:
    """Register the model, run the harness's command line, report; a ``ValueError`` where it is not installed."""
    check_package("lm_eval", "eval", "this command")
    quiet_libraries()
    from lm_eval.__main__ import cli_evaluate

    from subtoken_train.plugins.lm_eval_model import SubTokenLM

    cli_evaluate()
    if SubTokenLM.last is not None:
        print(SubTokenLM.last.report())
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
