"""[model] chat_template and template_args reach all places that render, and the exported model."""

from pathlib import Path

import pytest

from retool_mcore.config import EvaluationConfig, RlConfig, SftConfig, load_config
from retool_mcore.config.model import BUILT_IN
from retool_mcore.data.files import write_parquet
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tokenizer import endless, load_tokenizer, read_template, template_of, tokenizer_of
from retool_mcore.errors import CheckpointError, ConfigError
from retool_mcore.evaluate.run import Case, identity_of
from retool_mcore.platforms.base import get_platform
from retool_mcore.rollout.protocol import protocol_of
from retool_mcore.verl.keys.tree import RL_KEYS, SFT_KEYS, ppo_keys, sft_sections
from tests.template_styles import tokenizer_in
from tests.unit.data.commands import succeed

ROOT = Path(__file__).parents[3]
QUESTION = {"role": "user", "content": "How much is 2 + 2?"}
OFF = "model.template_args={ enable_thinking = false }"
EMPTY = "<think>\n\n</think>\n\n"
ROW = {"messages": [QUESTION, {"role": "assistant", "content": "\\boxed{4}"}], "tools": None}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer_in("Qwen3: an empty thinking block").save_pretrained(folder)
    return folder


def run_of(kind: type, path: Path, *settings: str):
    name = "sft_tiny_cpu.toml" if kind is SftConfig else "rl_tiny_cpu.toml"
    return load_config(kind, ROOT / "configs" / name, [f"model.path={path}", *settings])


def test_an_argument_changes_what_is_rendered_everywhere_alike(qwen3: Path, tmp_path: Path):
    sft, rl = run_of(SftConfig, qwen3, OFF), run_of(RlConfig, qwen3, OFF)
    tokenizer = tokenizer_of(rl.model)
    prompt = protocol_of(rl.rollout.with_tools(False), tokenizer).prompt_ids([QUESTION])
    assert tokenizer.decode(prompt).endswith(f"<|im_start|>assistant\n{EMPTY}")
    write_parquet(tmp_path / "rows.parquet", [ROW])
    (example,) = load_sft([str(tmp_path / "rows.parquet")], tokenizer_of(sft.model), 400).examples
    assert list(example.token_ids)[: len(prompt)] == prompt
    assert not any(list(example.loss_mask)[: len(prompt)])  # the block is written, and not learnt
    evaluated = tokenizer_of(EvaluationConfig.of(rl).model, str(qwen3))
    assert evaluated.chat_template == tokenizer.chat_template
    options = ("--template-args", OFF.partition("=")[2], "--max-tokens", "5")
    output = succeed("lint", tmp_path / "rows.parquet", "--model", qwen3, *options)
    assert "1 rows (100.0%) are over 5 tokens" in output
    assert f" {sum(example.loss_mask)} in the row with the fewest" in output.replace("(", " ").replace("\n", " ")
    plain, other = (EvaluationConfig.of(run_of(RlConfig, qwen3, *settings)) for settings in ((), (OFF,)))
    case = Case(name="m", model=str(qwen3))
    assert identity_of(plain, case, []) != identity_of(other, case, []), "their samples must not be mixed"
    default = load_sft([str(tmp_path / "rows.parquet")], tokenizer_of(run_of(SftConfig, qwen3).model), 400).examples[0]
    assert sum(default.loss_mask) > sum(example.loss_mask)


def test_verl_makes_its_tokenizers_with_the_template(qwen3: Path):
    rl, sft, platform = run_of(RlConfig, qwen3, OFF), run_of(SftConfig, qwen3, OFF), get_platform("cpu")
    text = tokenizer_of(rl.model).chat_template
    ppo = run_of(RlConfig, qwen3, OFF, "algorithm.name=ppo", "critic.lr=1e-5")
    assert ppo_keys(rl, platform)["actor_rollout_ref.model.custom_chat_template"] == text
    assert ppo_keys(ppo, platform)["critic.model.custom_chat_template"] == text
    assert sft_sections(sft, platform)["model"]["custom_chat_template"] == text
    assert "custom_chat_template" not in sft_sections(run_of(SftConfig, qwen3), platform)["model"]
    assert RL_KEYS["actor_rollout_ref.model.custom_chat_template"] == "model.chat_template"
    assert SFT_KEYS["model.custom_chat_template"] == "model.chat_template"


@pytest.mark.parametrize("name", [*BUILT_IN, "file"])
def test_a_base_model_takes_a_template_of_ours_or_a_file(tokenizer, tmp_path: Path, name: str):
    base = tmp_path / "base"
    tokenizer.save_pretrained(base)
    (base / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"has no chat template.*model\.chat_template to a file or to one of"):
        load_tokenizer(str(base))
    template = name if name in BUILT_IN else str(ROOT / "tests" / "templates" / "plain_chatml.jinja")
    wanted = "hermes" if name == "chatml" else "retool"
    assert succeed("protocol", base, "--chat-template", template).splitlines()[-1] == wanted
    for args, lines in (("{}", ""), ('{ b = 2, a = "x" }', '{% set a = "x" %}\n{% set b = 2 %}\n')):
        words = (f"model.chat_template={template}", f"model.template_args={args}")
        model = run_of(SftConfig, base, *words).model
        assert template_of(model) == tokenizer_of(model).chat_template == lines + read_template(template)


def test_what_is_no_template_or_no_argument_is_refused(qwen3: Path):
    with pytest.raises(ConfigError, match=r"model.chat_template = nowhere is neither a readable file"):
        tokenizer_of(run_of(RlConfig, qwen3, "model.chat_template=nowhere").model)
    for name in ("messages", "a-b"):
        with pytest.raises(ConfigError, match=f"model.template_args has '{name}'"):
            run_of(RlConfig, qwen3, f'model.template_args={{ "{name}" = 1 }}')


def test_a_template_may_count_in_one_loop_and_at_each_turn():
    assert endless("{% for m in messages %}{% for n in range(1000000) %}{{ n }}{% endfor %}{% endfor %}") == ""
    assert endless("{% for n in range(9) %}{% for m in messages %}{{ n - 1000000 }}{% endfor %}{% endfor %}") == ""
