"""Run the command as `python -m tuner.cli`."""

import sys

from tuner.cli.main import main

sys.exit(main())
