"""``python -m sglrollout``: the command, where its script is not on the path.

May import cli.
"""

import sys

from sglrollout.cli import main

sys.exit(main())
