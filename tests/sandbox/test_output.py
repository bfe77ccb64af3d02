"""The bounded output keeps head and tail of anything, counts what it drops, and never breaks a
character.
"""

from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.sandbox.base import ExecResult
from retool_mcore.sandbox.supervisor.output import BoundedOutput


def capture(chunks: list[bytes], limit_bytes: int) -> BoundedOutput:
    output = BoundedOutput(limit_bytes)
    for chunk in chunks:
        output.write(chunk)
    return output


@given(st.lists(st.binary(max_size=50)), st.integers(8, 64))
def test_head_tail_and_count_for_any_bytes_in_any_chunks(chunks: list[bytes], limit_bytes: int):
    whole = b"".join(chunks)
    text, dropped_bytes = capture(chunks, limit_bytes).text()
    if len(whole) <= limit_bytes // 2 * 2:
        assert (text, dropped_bytes) == (whole.decode(errors="backslashreplace"), 0)
    else:
        head, _, rest = text.partition(f"\n[... {dropped_bytes} bytes dropped ...]\n")
        assert len(whole) - limit_bytes - 1 <= dropped_bytes < len(whole) - limit_bytes + 8
        assert whole.decode(errors="backslashreplace").startswith(head)
        assert len(rest) <= limit_bytes * 4


@given(st.text(alphabet="aé€🎉", min_size=40), st.integers(8, 32))
def test_a_cut_never_breaks_a_character(text: str, limit_bytes: int):
    shown, _ = capture([text.encode()], limit_bytes).text()
    assert "\\x" not in shown


def test_a_cut_stream_by_hand():
    output = capture([b"0123456789" * 10], 8)
    assert output.text() == ("0123\n[... 92 bytes dropped ...]\n6789", 92)


def test_the_text_for_the_model():
    def text(**fields: object) -> str:
        return ExecResult(**{"status": "finished", "return_code": 0, "stdout": "", "stderr": "", **fields}).text

    assert text(stdout="4\n") == "4"
    assert text(stdout="a\n", stderr="Traceback\n", return_code=1) == "a\nTraceback"
    assert text() == ""
    assert text(status="time_limit", return_code=None, run_s=10.04) == "[stopped at the time limit, after 10.0 s]"
    assert text(stdout="x", return_code=2) == "x\n[exit code 2]"
