"""`data sft --execute` runs each snippet again."""

from retool_mcore.sandbox import open_sandbox
from tests.unit.data.test_convert import INLINE, RAW, convert


async def test_snippets_are_run_again_when_asked():
    lying = {
        **RAW,
        "messages": [RAW["messages"][0], {"role": "assistant", "content": INLINE.replace("\n4\n", "\n5\n")}],
    }
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        report = await convert([RAW, lying], truth="", sandbox=sandbox)
    assert len(report.rows) == 1
    assert report.rejects[0]["stage"] == "execution"
    assert report.rejects[0]["reason"] == "call 1 prints '4', and the trace shows '5'"
