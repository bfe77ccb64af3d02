"""Objects of a user's own, named in a configuration: found in the working folder, or one error."""

import sys
from pathlib import Path

import pytest

from retool_mcore.config.imports import import_object
from retool_mcore.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine_named:score", ""),
        ("mine_named.score", "is not of the form"),
        ("absent_named.rewards:score", "no module absent_named"),
        ("mine_named:other", "mine_named.py has no name other"),
        ("broken_named:score", "importing broken_named raised ZeroDivisionError"),
        ("needs_named:score", "imports no_such_package_named, which is not installed"),
    ],
)
def test_a_module_of_the_working_folder_is_found_and_what_is_not_there_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
):
    (tmp_path / "mine_named.py").write_text("def score(response):\n    return 1.0\n", encoding="utf-8")
    (tmp_path / "broken_named.py").write_text("1 / 0\n", encoding="utf-8")
    (tmp_path / "needs_named.py").write_text("import no_such_package_named\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    if message:
        with pytest.raises(ConfigError) as error:
            import_object("reward.function", path)
        assert message in str(error.value) and f'reward.function = "{path}"' in str(error.value)
    else:
        assert import_object("reward.function", path)(None) == 1.0
    sys.modules.pop("mine_named", None)
