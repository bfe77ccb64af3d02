"""``python -m retool_mcore.sandbox``: the sandbox commands without the rest of the package."""

from retool_mcore.cli.sandbox import app

app()
