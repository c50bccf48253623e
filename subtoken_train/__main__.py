"""``python -m subtoken_train``: the same as the console script ``subtoken-train``."""

import sys

from subtoken_train.cli.main import main

sys.exit(main())
