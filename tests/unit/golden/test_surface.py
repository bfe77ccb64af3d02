"""Commands and configuration keys stay as users know them. For a change that is meant: surface.py;
read the diff.
"""

import json

from tests.golden.surface import RECORD, surface

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


def test_every_command_has_the_options_it_had():
    assert surface()["commands"] == RECORDED["commands"]


def test_a_configuration_has_the_keys_it_had():
    found = surface()
    assert (found["sft"], found["rl"]) == (RECORDED["sft"], RECORDED["rl"])
