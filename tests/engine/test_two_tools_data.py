"""The example with two tools makes the data of both trainings."""

from configs.examples.two_tools.make_data import make as make_two_tools
from retool_mcore.config import RlConfig, load_config
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.rollout.protocol import protocol_of
from tests.unit.data.commands import succeed


def test_the_example_of_two_tools_makes_what_both_trainings_read(tmp_path):
    make_two_tools(tmp_path, {"conversations": 40, "problems": 20})
    output = succeed("sft", tmp_path / "conversations.jsonl", "--out", tmp_path / "sft.parquet", "--execute")
    assert "40 after execution (0 rejected)" in output, "the interpreter's calls print what the data shows"
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    examples = load_sft(str(tmp_path / "sft.parquet"), tokenizer, 512).examples
    assert len(examples) == 40
    for example in examples:
        trained = tokenizer.decode([i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m])
        assert trained.count('"name": "lookup"') == 2 and trained.count('"name": "code_interpreter"') == 1
    asked = ("--problem", "question", "--answer", "total")
    succeed("rl", tmp_path / "problems.jsonl", *asked, "--out", tmp_path / "rl.parquet")
    config = load_config(RlConfig, "configs/examples/two_tools/rl_cpu.toml")
    protocol = protocol_of(config.rollout, tokenizer)
    prompt = tokenizer.decode(protocol.prompt_ids([{"role": "user", "content": "?"}]))
    assert "lookup" in prompt and "code_interpreter" in prompt
