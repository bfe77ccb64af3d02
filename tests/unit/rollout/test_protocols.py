"""Which protocol a configuration selects, and which one a tokenizer and its template support."""

from copy import deepcopy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.examples.protocol import INSTRUCTION, Instructed
from retool_mcore.cli.data import app
from retool_mcore.config import load_evaluation
from retool_mcore.data.chat import chat_format
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.rollout.protocol import Hermes, TextOnly, default_protocol, open_protocol, protocol_of
from tests.plain_chatml import PLAIN_CHATML, with_template

OWN = "configs.examples.protocol:Instructed"


def test_a_run_with_a_users_protocol_renders_its_prompts(tokenizer):
    config = load_evaluation("configs/rl_tiny_cpu.toml", [f"rollout.protocol={OWN}"])
    protocol = protocol_of(config.rollout, tokenizer)
    assert type(protocol) is Instructed
    problem = [{"role": "user", "content": "What is 1 + 1?"}]
    own, ours = (tokenizer.decode(each.prompt_ids(problem)) for each in (protocol, Hermes(tokenizer)))
    assert INSTRUCTION in own and INSTRUCTION not in ours
    assert protocol.stop_token_ids == Hermes(tokenizer).stop_token_ids
    assert type(open_protocol(OWN, tokenizer, tool=False)) is TextOnly


def test_what_is_no_protocol_is_one_error(tokenizer):
    with pytest.raises(ConfigError, match=r"not a subclass of retool_mcore\.rollout\.protocol"):
        open_protocol("configs.examples.protocol:INSTRUCTION", tokenizer)


@pytest.mark.parametrize(("template", "name"), [(None, "hermes"), (PLAIN_CHATML, "retool")])
def test_the_command_prints_the_protocol(tokenizer, tmp_path: Path, template: str | None, name: str):
    made = tokenizer if template is None else with_template(tokenizer, template)
    made.save_pretrained(tmp_path)
    found = CliRunner().invoke(app, ["protocol", str(tmp_path)])
    assert (found.exit_code, found.stdout) == (0, f"{name}\n"), found.output


def test_a_model_that_hermes_does_not_fit_gets_protocol_retool_or_a_reason(tokenizer):
    made = deepcopy(tokenizer)  # its vocabulary does not spell out the tag
    made.encode = lambda text, **options: [1, 2, 3] if text == "</tool_call>" else tokenizer.encode(text, **options)
    assert default_protocol(made) == "retool"
    made = with_template(tokenizer, "{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor %}")
    assert default_protocol(made) == "retool"  # eos_token ends a turn there
    made.eos_token = None
    chat_format.cache_clear()
    with pytest.raises(CheckpointError, match=r"none of hermes, qwen3_coder, retool.* ends an assistant turn with"):
        default_protocol(made)
