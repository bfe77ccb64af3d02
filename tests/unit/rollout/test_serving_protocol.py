"""`retool data protocol`: which protocol a model's tokenizer and template serve."""

from copy import deepcopy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.chat import chat_format
from retool_mcore.errors import CheckpointError
from retool_mcore.rollout.protocol import serving_protocol
from tests.plain_chatml import PLAIN_CHATML, with_template


@pytest.mark.parametrize(("template", "name"), [(None, "hermes"), (PLAIN_CHATML, "retool")])
def test_the_command_prints_the_protocol(tokenizer, tmp_path: Path, template: str | None, name: str):
    made = tokenizer if template is None else with_template(tokenizer, template)
    made.save_pretrained(tmp_path)
    found = CliRunner().invoke(app, ["protocol", str(tmp_path)])
    assert (found.exit_code, found.stdout) == (0, f"{name}\n"), found.output


def test_a_tag_in_pieces_is_served_by_retool(tokenizer):
    made = deepcopy(tokenizer)
    made.encode = lambda text, **options: [1, 2, 3] if text == "</tool_call>" else tokenizer.encode(text, **options)
    assert serving_protocol(made) == "retool"


def test_a_template_without_an_end_of_turn_is_one_reason(tokenizer):
    made = with_template(tokenizer, "{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor %}")
    assert serving_protocol(made) == "retool"  # eos_token ends a turn there
    made.eos_token = None
    chat_format.cache_clear()
    with pytest.raises(CheckpointError, match="serves none of hermes, qwen3_coder, retool") as caught:
        serving_protocol(made)
    assert str(caught.value).count("closes an assistant turn by") == 1
