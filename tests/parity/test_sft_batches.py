"""A restarted process resumes with the exact next batch."""

import json
import subprocess
import sys
import textwrap

from retool_mcore.data.tasks import TaskSpec, make_task


def test_a_restarted_process_goes_on_with_the_exact_batch(tmp_path):
    # As training resumes: the file is read anew, in another process with other hash seeds, and told
    # only the step.
    make_task(tmp_path, seed=2, spec=TaskSpec(sft_train=50, sft_val=4, rl_train=4, rl_val=4, eval=4))
    code = f"""
        import json, sys
        from retool_mcore.data.tokenizer import load_tokenizer
        from retool_mcore.data.sft import PackedBatches, load_sft
        data = load_sft({str(tmp_path / "sft_train.parquet")!r}, load_tokenizer({str(tmp_path / "model")!r}), 512)
        ranks = [PackedBatches(data.examples, 16, 5, 4, rank, hidden_size=64) for rank in range(4)]
        steps = [int(word) for word in sys.argv[1:]]
        print(json.dumps([[[list(each.token_ids) for each in rank(step)] for rank in ranks] for step in steps]))
    """

    def run(*steps: int) -> list[object]:
        argv = [sys.executable, "-c", textwrap.dedent(code), *map(str, steps)]
        return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()[-1])

    whole = run(*range(1, 9))  # two and a half epochs
    assert run(4, 5, 6, 7, 8) == whole[3:]
    assert len({json.dumps(step) for step in whole}) == 8
