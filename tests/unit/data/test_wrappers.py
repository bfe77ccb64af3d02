"""Known instructions come off, problems stay whole, and no leak hides behind an instruction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.data.convert import Conversion
from retool_mcore.data.files import write_parquet
from retool_mcore.data.leaks import overlap
from retool_mcore.data.lint import read_problem_rows, require_disjoint
from retool_mcore.data.prompt_format import QUESTION_MARK, WRAPPERS, hermes_prompt, retool_prompt, unwrap
from retool_mcore.data.rl import convert_rl, rl_row
from retool_mcore.errors import DataError

BY_NAME = {wrapper.name: wrapper for wrapper in WRAPPERS}
ROUND = "A round table seats {} guests, of whom {} are left-handed. How many neighbours can be right-handed?"
CODE = "You may write code, in blocks of three backticks.\nEnd so:\n<answer>\n\\boxed{'x'}\n</answer>"


def wrapped(name: str, problem: str) -> str:
    wrapper = BY_NAME[name]
    return "\n\n".join([*wrapper.heads[:1], problem, *wrapper.tails[:1]])


def as_retool_sft(problem: str) -> str:
    return f"{CODE}\n\n{QUESTION_MARK}\n{wrapped('ReTool-SFT', problem)}"


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.name)
def test_every_text_of_every_wrapper_comes_off(wrapper):
    problem = "How many of 7 doors are open?"
    for text in wrapper.heads:
        assert unwrap(f"{text}\n\n{problem}") == (problem, (wrapper.name,))
        assert unwrap(f"{'  '.join(text.split()).upper()} {problem}")[0] == problem
    for text in wrapper.tails:
        assert unwrap(f"{problem} {text}\n") == (problem, (wrapper.name,))
    middle = f"It says: {(wrapper.heads + wrapper.tails)[0]} How long is that text?"
    assert unwrap(middle) == (middle, ())


@given(
    st.text(alphabet="ab 1$\\{}\n.*", max_size=60), st.sampled_from(sorted(BY_NAME)), st.sampled_from(sorted(BY_NAME))
)
def test_wrappers_around_wrappers_come_off(problem, inner, outer):
    assert unwrap(wrapped(outer, wrapped(inner, problem)))[0] == problem.strip()


@pytest.mark.parametrize("as_prompt, of_protocol", [("hermes", hermes_prompt), ("retool", retool_prompt)])
async def test_sft_and_rl_ask_alike(as_prompt, of_protocol):
    problem = ROUND.format(10, 3)
    talk = [{"role": "user", "content": as_retool_sft(problem)}, {"role": "assistant", "content": "\\boxed{4}"}]
    asked = (await Conversion(as_prompt).row("here", {"messages": talk}))["messages"][0]["content"]
    raw = {"prompt": [{"role": "user", "content": wrapped("DAPO", problem)}], "reward_model": {"ground_truth": "4"}}
    (row,) = convert_rl([("here", raw)], "x").rows
    assert asked == of_protocol(row["prompt"][0]["content"])
    assert "Answer:" not in asked and "Remember" not in asked


def test_no_leak_hides_behind_an_instruction(tmp_path):
    problems = [ROUND.format(2 * n, n) for n in range(10, 210)]
    answer = {"role": "assistant", "content": "\\boxed{4}"}
    rows = [{"messages": [{"role": "user", "content": as_retool_sft(p)}, answer], "tools": None} for p in problems]
    write_parquet(tmp_path / "sft.parquet", rows)
    raw = [
        {**rl_row("x", "4", "x", "test", 0), "prompt": [{"role": "user", "content": wrapped("DAPO", p)}]}
        for p in problems
    ]
    write_parquet(tmp_path / "rl.parquet", raw)
    sft, rl = ([row.problem for row in read_problem_rows(str(tmp_path / f"{x}.parquet"))] for x in ("sft", "rl"))
    found = overlap(sft, rl, ("sft", "rl"))
    assert (len(found.same), found.total) == (200, 200)
    assert "100%: 'A round table seats 20 guests" in found.lines()[1]
    with pytest.raises(DataError, match=r"200 of the 200 problems .* The first: 100%: 'A round table"):
        require_disjoint(str(tmp_path / "sft.parquet"), str(tmp_path / "rl.parquet"))


def test_near_problems_are_found_and_others_are_not():
    table = ROUND.format(10, 3)
    near = ["Unknown words first. " + table, table.replace("guests", "people"), "\\(" + table + "\\)"]
    other = [ROUND.format(12, 5), "How many guests sit at 10 round tables with 3 seats each?", "Find 10 + 3."]
    found = overlap([table], near + other, ("a", "b"))
    assert (len(found.same), found.total) == (1, 6)
    assert {pair.second for pair in (*found.same, *found.near)} == set(near)


def test_an_instruction_that_nobody_knows_makes_no_pairs():
    said = "Think about it for as long as you like and then write down the number that you have found at the end. "
    first = [f"{said} Is the word {word}a{word} long?" for word in map(chr, range(0x3B1, 0x3C9))] * 2
    second = [f"{said} Is the word {word}b{word} short?" for word in map(chr, range(0x3B1, 0x3C9))]
    assert overlap(first, second, ("a", "b")).leaked == 0


def test_with_another_number_it_is_another_problem():
    first, second = (f"{ROUND.format(10, 3)} Each of them plays {n} rounds of cards." for n in (7, 8))
    found = overlap([first], [second, f"Dear reader, hear this. {first}"], ("a", "b"))
    assert (len(found.same), len(found.near)) == (0, 1)
