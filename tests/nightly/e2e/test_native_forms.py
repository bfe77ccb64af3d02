"""RL with the calls of other families than Qwen2's, in their own form, on the real engines.

The model writes such a call by the toss of a coin (coin_model.py). A form that the engine does not
stop at, or that the loop does not read, shows no tool turn; one that is rendered otherwise than it
was sampled shows a mismatch.
"""

import json
from pathlib import Path

import pytest

from retool_mcore.run.metrics import read_metrics
from tests.e2e.coin_model import CallForm, write_coin_task
from tests.e2e.commands import argv_rl, succeed
from tests.template_styles import LLAMA_TOKENS, MISTRAL_TOKENS

pytestmark = [pytest.mark.timeout(600)]

QWEN3_CALL = "\n<function=code_interpreter>\n<parameter=code>\nprint(7)\n</parameter>\n</function>\n"
FORMS = {
    "qwen3_coder": CallForm(call=("<tool_call>", QWEN3_CALL, "</tool_call>"), template="qwen3_coder.jinja"),
    "llama3": CallForm(
        call=('{"name": "code_interpreter", "parameters": {"code": "print(7)"}}', "<|eot_id|>"),
        starts=("\n\n",),
        end="<|eot_id|>",
        template="llama3.jinja",
        special=LLAMA_TOKENS,
    ),
    "mistral": CallForm(
        call=("[TOOL_CALLS]", "code_interpreter", "[ARGS]", '{"code": "print(7)"}', "</s>"),
        starts=("[/INST]", "[/TOOL_RESULTS]"),
        end="</s>",
        template="mistral_v11.jinja",
        special=MISTRAL_TOKENS,
    ),
}


@pytest.mark.parametrize("protocol", FORMS)
def test_calls_in_the_models_own_form_are_run_and_trained(protocol: str, tmp_path: Path, mark: str):
    task = write_coin_task(tmp_path, form=FORMS[protocol])
    settings = (*task, f"rollout.protocol={protocol}", f"run.root={tmp_path}", "run.name=rl", "train.steps=2")
    settings += ("train.prompts_per_step=8", "train.mini_batch_prompts=8", "rollout.group_size=2")
    settings += ("data.max_prompt_tokens=600", "rollout.max_response_tokens=300", "validation.every=0")
    settings += ("checkpoint.every_steps=0", "checkpoint.export=false", "rollout.record_groups=8")
    succeed(argv_rl(*settings), mark, timeout_s=500)
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert all(row["rollout/dropped"] == 0 and row["rollout_corr/kl"] < 1e-4 for row in rows)
    lines = (tmp_path / "rl" / "trajectories" / "trajectories.jsonl").read_text().splitlines()
    turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    results = [result for turn in turns for result in turn["results"]]
    assert len(results) > len(turns) / 6, "a third of all turns is a call"
    assert all((result["code"], result["ok"], result["shown"].strip()) == ("print(7)", True, "7") for result in results)
