"""`retool data` in this process."""

from typer.testing import CliRunner

from retool_mcore.cli.data import app


def succeed(*words: object) -> str:
    """What a command prints that must end well."""
    return _output(words, 0)


def refused(*words: object) -> str:
    """What a command says that must be refused."""
    return _output(words, 2)


def _output(words: tuple[object, ...], code: int) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return result.output
