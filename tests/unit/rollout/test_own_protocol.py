"""A protocol of a user's own, named in the configuration, is the one that the loop gets."""

import pytest

from configs.examples.protocol import INSTRUCTION, Instructed
from retool_mcore.config import load_evaluation
from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.errors import ConfigError
from retool_mcore.rollout.protocol import Hermes, TextOnly, open_protocol, protocol_of

OWN = "configs.examples.protocol:Instructed"
PROBLEM = [{"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(tokenizer_rows())


def test_a_run_that_names_it_renders_its_prompts(tokenizer):
    config = load_evaluation("configs/rl_tiny_cpu.toml", [f"rollout.protocol={OWN}"])
    protocol = protocol_of(config.rollout, tokenizer)
    assert type(protocol) is Instructed
    own, ours = (tokenizer.decode(each.prompt_ids(PROBLEM)) for each in (protocol, Hermes(tokenizer)))
    assert INSTRUCTION in own and INSTRUCTION not in ours
    assert protocol.stop_token_ids == Hermes(tokenizer).stop_token_ids
    assert type(open_protocol(OWN, tokenizer, tool=False)) is TextOnly


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("xml", r"'xml' is none of hermes, qwen3_coder, retool, llama3, mistral, nor of the form \"module:Name\""),
        ("configs.examples.protocol:INSTRUCTION", "is no subclass of retool_mcore.rollout.protocol.ToolProtocol"),
        ("configs.examples.reward:Response", "is no subclass"),
        ("configs.examples.absent:Protocol", "no module configs.examples.absent in"),
    ],
)
def test_what_is_no_protocol_is_one_error(tokenizer, name: str, told: str):
    with pytest.raises(ConfigError, match=told):
        open_protocol(name, tokenizer)
