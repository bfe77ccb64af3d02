"""Whole solutions as one program, in words alone, and the parts of a training set."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.build import build_gsm8k, parse_gsm8k
from retool_mcore.data.chat import render, render_prompt
from retool_mcore.data.convert import Conversion
from retool_mcore.data.files import read_rows
from retool_mcore.data.leaks import overlap
from retool_mcore.data.lint import lint_file
from retool_mcore.data.parts import part_of
from retool_mcore.data.programs import link, program_of
from retool_mcore.data.prompts import QUESTION_MARK, hermes_prompt
from retool_mcore.data.verify import Rejected
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.sandbox import open_sandbox
from tests.data.commands import refused, succeed
from tests.data.test_build import ANSWER, SAMPLE
from tests.data.test_large import QUESTION


async def built(question: str, answer: str, calls="one", text=True):
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        return await build_gsm8k(
            [("line 1", {"question": question, "answer": answer})], sandbox, calls=calls, text=text
        )


async def test_a_solution_becomes_one_program_and_a_text_of_the_same_problem():
    tool, text = (await built(QUESTION, ANSWER)).rows
    code = tool["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"]
    assert code == (
        "# Natalia sold clips in May.\nstep1 = 48/2\n"
        "# Natalia sold clips altogether in April and May.\nstep2 = 48+step1\nprint(round(step2, 2))"
    )
    assert tool["messages"][2]["content"] == "72.0"
    assert tool["messages"][3]["content"] == "The answer is \\boxed{72}."
    assert tool["tools"] and text["tools"] is None
    assert text["messages"][1] == {
        "role": "assistant",
        "content": (
            "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n"
            "The answer is \\boxed{72}."
        ),
    }
    assert tool["messages"][0] == text["messages"][0]


async def test_a_problem_whose_program_or_text_fails_has_no_row_of_either_form():
    rest = "She spent 75-55 = $<<75-55=20>>20\nSo it was 20/4 = $5\n#### 5"  # the program ends at 20
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        rows = [(str(n), {"question": QUESTION, "answer": a}) for n, a in enumerate((ANSWER, rest))]
        report = await build_gsm8k(rows, sandbox, calls="one", text=True)
    assert [row["index"] for row in report.rows] == [0, 0]
    assert [reject["stage"] for reject in report.rejects] == ["answer"]
    assert report.lines()[-1] == "50.00% survived"  # of the problems, not of the rows


def test_an_operand_is_a_step_only_where_it_can_be_nothing_else():
    given_ = {48}
    assert link("48+24", given_, [24]) == "48+step1"
    assert link("48+24", {48, 24}, [24]) == "48+24"  # the question states 24, too
    assert link("1.50*124-24", given_, [124, 24]) == "1.50*step1-step2"
    with pytest.raises(Rejected, match="may be step1 or step2"):
        link("48+24", given_, [24, 24])


def test_comments_state_nothing_that_the_program_computes():
    answer = (
        "If he babysits he earns 2*7 = $<<2*7=14>>14.\n"
        "He has $14 and his $65, a total of 14 + 65 = $<<14+65=79>>79, and $79 is enough.\n#### 79"
    )
    solution = parse_gsm8k(answer)
    program = program_of("He has 65 and works 2 hours for 7.", solution.steps, solution.rest)
    comments = " ".join(line.comment for line in program.lines)
    assert "14" not in comments and "79" not in comments
    assert "$65" in comments and "has step1 and" in comments


def test_a_step_that_only_states_a_number_is_no_calculation():
    solution = parse_gsm8k("So x is <<1440=1440>>1440.\n<<1440-1200=240>>240\n#### 240")
    with pytest.raises(Rejected, match="step 1 states 1440 and calculates nothing"):
        program_of("It weighs 1200 grams.", solution.steps, solution.rest)


async def test_markup_in_a_comment_is_refused():
    with pytest.raises(Exception, match="the program holds </code>"):
        await built(QUESTION, ANSWER.replace("clips in May.", "clips </code>"))


async def test_rows_ask_as_rollout_and_evaluation_ask(tokenizer):
    """The prompt's tokens of each form are those of the run that learns from it."""
    tool, text = (await built(QUESTION, ANSWER)).rows
    asked = [{"role": "user", "content": hermes_prompt(QUESTION)}]
    for protocol, row in (("hermes", tool), ("text", text)):
        wanted = render_prompt(asked, row["tools"], tokenizer)
        rendered = render(row["messages"], row["tools"], tokenizer)
        assert rendered.token_ids[: len(wanted)] == wanted, protocol
    assert open_protocol("hermes", tokenizer, tool=False).prompt_ids(asked) == render_prompt(asked, None, tokenizer)
    assert open_protocol("hermes", tokenizer, tool=True).prompt_ids(asked) == render_prompt(
        asked, tool["tools"], tokenizer
    )


@pytest.mark.parametrize("protocol", ["hermes", "retool"])
async def test_a_text_row_stays_one_in_either_protocol(protocol):
    tool, text = (await built(QUESTION, ANSWER)).rows
    conversion = Conversion(protocol, "ground_truth")
    assert (await conversion.row("row 1", text))["messages"] == text["messages"]
    assert (await conversion.row("row 1", text))["tools"] is None
    made = await conversion.row("row 0", tool)
    assert (QUESTION_MARK in made["messages"][0]["content"]) == (protocol == "retool")
    assert bool(made["tools"]) == (protocol == "hermes")


def test_the_parts_of_a_training_set_are_disjoint_by_the_leak_check(tmp_path):
    problems: dict[str, list[str]] = {}
    for part in ("sft", "rl", "validation"):
        out = str(tmp_path / f"{part}.parquet")
        share = ["--part", part, "--sft-share", "0.4"]
        succeed("rl", SAMPLE, "--out", out, *share)
        problems[part] = lint_file(out, None, None).problems
    assert sum(map(len, problems.values())) == 60
    for first, second in (("sft", "rl"), ("sft", "validation"), ("rl", "validation")):
        assert overlap(problems[first], problems[second], (first, second)).leaked == 0
    assert overlap(problems["rl"], problems["rl"], ("a", "b")).leaked > 0  # it would be found


def test_sft_traces_and_rl_problems_of_different_parts_share_no_problem(tmp_path):
    sft, rl = tmp_path / "sft.parquet", tmp_path / "rl.parquet"
    options = ["--out", str(sft), "--calls", "one", "--text", "--part", "sft"]
    assert CliRunner().invoke(app, ["build", "gsm8k", str(SAMPLE), *options]).exit_code == 0
    assert CliRunner().invoke(app, ["rl", str(SAMPLE), "--out", str(rl), "--part", "rl"]).exit_code == 0
    found = [lint_file(str(path), None, None).problems for path in (sft, rl)]
    assert overlap(found[0], found[1], ("sft", "rl")).leaked == 0
    assert {row["tools"] is None for _, row in read_rows(sft, ("tools",))} == {True, False}


@given(st.text(max_size=80), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_of_sft_only_adds_to_it(question, one, other):
    low, high = sorted((one, other))
    assert part_of(question, low) != "sft" or part_of(question, high) == "sft"
    assert part_of(f"  {question.upper()} ".lower(), high) == part_of(question.lower(), high)


def test_a_row_without_a_question_cannot_be_dealt(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"input": "1+1", "target": "2"}) + "\n", encoding="utf-8")
    output = refused("rl", path, "--out", tmp_path / "o.parquet", "--part", "rl")
    assert "--part reads the text of column question or problem" in " ".join(output.split())
