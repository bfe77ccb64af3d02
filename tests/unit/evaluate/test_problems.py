"""Problems keep their own turns, or get the format of the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.config import load_evaluation
from retool_mcore.data.prompt_format import PromptFormat, recorded_format
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import Problem, read_problems
from retool_mcore.evaluate.run import Case, CaseSamples, SampleFile
from retool_mcore.evaluate.servers import TokenSampler
from retool_mcore.rollout.protocol import open_protocol

CONFIG = Path(__file__).parents[3] / "configs/rl_tiny_cpu.toml"


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_bare_problem_is_asked_as_the_model_was_and_a_files_own_turns_stay(tmp_path: Path):
    known = PromptFormat(system="Be brief.", instruction="")
    (bare,) = read_problems([jsonl(tmp_path / "p.jsonl", {"problem": "1 + 1?", "answer": "2"})])
    assert bare.in_format(known).messages == known.messages("1 + 1?")
    assert bare.in_format(None) == bare and bare.messages == PromptFormat().messages("1 + 1?")
    with pytest.raises(DataError, match=r"line 1, column answer: the answer is None.* leaves such rows out"):
        read_problems([jsonl(tmp_path / "none.jsonl", {"problem": "1 + 1?", "answer": None})])
    with pytest.raises(DataError, match=r"empty\.jsonl: the file has no problems"):
        read_problems([jsonl(tmp_path / "empty.jsonl")])
    turns = [{"role": "user", "content": "1 + 1?"}]
    row = {"prompt": turns, "reward_model": {"ground_truth": "2"}}
    (own,) = read_problems([jsonl(tmp_path / "q.jsonl", row)])
    assert own.in_format(known).messages == turns


def test_the_first_prompt_is_shown_as_the_model_sees_it_after_a_warning(tmp_path: Path, tokenizer: Any):
    samples, case = SampleFile(tmp_path / "out", {}), Case(name="m", model=str(tmp_path))

    def notes(problem: Problem) -> list[str]:
        work = CaseSamples(case=case, config=load_evaluation(CONFIG), problems=[problem], n=1, samples=samples)
        return list(TokenSampler(open_protocol("hermes", tokenizer), work).notes(work))

    own = Problem(id=0, messages=[{"role": "user", "content": "1 + 1?"}], truth="2")
    (shown,) = notes(own)
    assert shown.startswith("the first prompt, as m sees it:\n<|im_start|>system") and "code_interpreter" in shown
    PromptFormat(system="Be brief.", instruction="").write(tmp_path)
    warning, _ = notes(own)
    assert 'system turn "Be brief."' in warning and "no system turn" in warning
    (shown,) = notes(Problem(id=0, messages=[], truth="4", text="2 + 2?").in_format(recorded_format(tmp_path)))
    assert "Be brief." in shown and "2 + 2?" in shown
