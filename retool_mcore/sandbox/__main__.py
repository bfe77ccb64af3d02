"""``python -m retool_mcore.sandbox``: the sandbox commands without the rest of the package."""

from retool_mcore.sandbox.server.command import app

app()
