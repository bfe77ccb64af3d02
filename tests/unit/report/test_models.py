"""The table of all models, and the trajectories before and after."""

import json
import re
from pathlib import Path

import pytest

from retool_mcore.evaluate.compare import compare, read_report
from retool_mcore.report.build import write_report
from retool_mcore.report.document import MOST_CHARS, Code
from tests.unit.report.generated import write_evaluation, write_run

RIGHT = {  # folder, run or None, with the tool: right samples of four problems, of four each
    ("base", None, True): [0, 0, 1, 0],
    ("base_text", None, False): [1, 0, 1, 0],
    ("sft", "sft", True): [1, 2, 1, 0],
    ("tool", "tool_rl", True): [4, 4, 3, 1],
    ("tool_text", "tool_rl", False): [0, 1, 1, 0],
    ("text_text", "text_rl", False): [2, 2, 1, 1],
}
HOSTILE = "</pre><script>alert(1)</script> \u202e | **x**"


def whole(root: Path) -> list[Path]:
    start = f"{root}/sft/export"
    runs = [
        write_run(root / "tool_rl", model={"path": start}),
        write_run(root / "text_rl", model={"path": start}, rollout={"tools": []}),
        write_run(root / "sft", kind="sft", model={"path": f"{root}/base"}),
    ]
    (root / "problems.jsonl").write_text(
        "".join(json.dumps({"problem": f"Asked {n} <b>bold</b>?", "answer": str(n)}) + "\n" for n in range(4))
    )
    for (folder, run, tool), right in RIGHT.items():
        model = f"{root}/{run}/export" if run else f"{root}/base"
        write_evaluation(root / "eval" / folder, model, right, tool=tool, data=f"{root}/problems.jsonl")
    return runs


def write_samples(folder: Path, *, calls: set[tuple[int, int]] = frozenset(), said: str = "said") -> None:
    rows = []
    for row in read_report(folder)["per_problem"]:
        for sample, correct in enumerate(row["correct"]):
            place = f"{folder.name} {row['id']}-{sample}"
            called = {"code": f"print('{place}')\nif 1 < 2:\n    pass", "ok": True, "shown": f"out {place}"}
            results = [called] if (row["id"], sample) in calls else []
            turns = [{"text": f"{said} {place}", "results": results}, {"text": "last", "results": []}]
            rows.append({"problem": row["id"], "sample": sample, "truth": row["truth"], "correct": correct})
            rows[-1] |= {"turns": turns, "extracted": f"a {place}", "stop_reason": "finished"}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))


def report(root: Path, runs: list[Path], form: str = ".md") -> str:
    out = root / f"r{form}"
    write_report(runs, out, [root / "eval"])
    return out.read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_all_models_stand_in_one_table_against_the_first(tmp_path: Path):
    text = section(report(tmp_path, whole(tmp_path)), "The models").replace("\\_", "_")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    accuracies = [row for row in rows if len(row) == 5][2:]
    assert [row[:4] for row in accuracies] == [
        ["start model (base)", "with the tool", "4", "0.062 (0.012 to 0.113)"],
        ["start model (base)", "text only", "4", "0.125 (0.075 to 0.175)"],
        ["sft", "with the tool", "4", "0.250 (0.200 to 0.300)"],
        ["tool_rl", "with the tool", "4", "0.750 (0.700 to 0.800)"],
        ["tool_rl", "text only", "4", "0.125 (0.075 to 0.175)"],
        ["text_rl", "text only", "4", "0.375 (0.325 to 0.425)"],
    ]

    def paired(first: str, second: str) -> str:
        found = compare(read_report(tmp_path / "eval" / first), read_report(tmp_path / "eval" / second))
        return f"{found.difference:+.3f} ({found.low:+.3f} to {found.high:+.3f})"

    assert [row[4] for row in accuracies] == [
        *("", "", paired("base", "sft"), paired("base", "tool")),
        *(paired("base_text", "tool_text"), paired("base_text", "text_text")),
    ]
    assert [row for row in rows if len(row) == 2][2:] == [
        ["start model (base): text only, then with the tool", paired("base_text", "base")],
        ["tool_rl: text only, then with the tool", paired("tool_text", "tool")],
        ["text_rl, text only, then tool_rl, with the tool", paired("text_text", "tool")],
    ]


def test_examples_are_wrong_before_and_right_after_with_calls_first(tmp_path: Path):
    runs = whole(tmp_path)
    write_samples(tmp_path / "eval" / "sft")
    write_samples(tmp_path / "eval" / "tool", calls={(2, 2), (1, 3), (0, 0)})
    text = section(report(tmp_path, runs), "Trajectories before and after")
    heads = re.findall(r"tool\\_rl, example \d: problem (\d+), sample (\d+)", text)
    assert heads == [("1", "3"), ("2", "2"), ("0", "1")], "0-0 was right before; with calls first, each problem once"
    for place in ("1-3", "2-2", "0-1"):
        assert f"said sft {place}" in text and f"said tool {place}" in text
    assert "if 1 &lt; 2:\n    pass" in text and "out tool 1-3" in text and "out tool 0-0" not in text
    assert "Asked 1 &lt;b&gt;bold" in text and "Before, wrong: answer a sft 1-3; the truth is 1." in text
    assert report(tmp_path, runs) == report(tmp_path, runs)


@pytest.mark.parametrize("form", [".md", ".html"])
def test_what_a_model_said_is_no_markup(tmp_path: Path, form: str):
    runs = whole(tmp_path)
    for name in ("sft", "tool"):
        write_samples(tmp_path / "eval" / name, said=HOSTILE)
    text = report(tmp_path, runs, form)
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text and "\u202e" not in text
    assert text.count("<pre>") == text.count("</pre>") == 3 * 5


def test_missing_or_damaged_samples_are_told(tmp_path: Path):
    runs = whole(tmp_path)
    assert "None: they need samples.jsonl" in report(tmp_path, runs)
    (tmp_path / "problems.jsonl").unlink()
    for name in ("sft", "tool"):
        write_samples(tmp_path / "eval" / name)
    assert "its text is not there" in report(tmp_path, runs)
    for line in ("{\n", "[]\n", '{"problem": 0, "sample": 1}\n'):
        (tmp_path / "eval" / "tool" / "samples.jsonl").write_text(line)
        assert "samples.jsonl, line 1: not a sample of" in report(tmp_path, runs)


def test_long_texts_are_cut_aloud():
    shown = Code(title="x", text="a\x1b[1m" + "b" * MOST_CHARS).lines
    assert "\x1b" not in shown and shown.endswith("... and 4 characters more") and len(shown) < MOST_CHARS + 40
