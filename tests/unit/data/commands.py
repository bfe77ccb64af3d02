"""`retool data` in this process."""

from typer.testing import CliRunner

from retool_mcore.cli.data import app


def succeed(*arguments: object) -> str:
    """The output of a command that must succeed."""
    return _output(arguments, 0)


def refused(*arguments: object) -> str:
    """The output of a command that must exit with a user error."""
    return _output(arguments, 2)


def _output(arguments: tuple[object, ...], code: int) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output
