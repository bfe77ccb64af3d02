"""``python -m ascend`` prints the mapping table of README.md."""

import sys

from ascend.limits import markdown

sys.stdout.write(markdown())
