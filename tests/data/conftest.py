import pytest

from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import tokenizer_rows


@pytest.fixture(scope="session")
def tokenizer():
    """The quickstart's tokenizer: byte-level BPE and a template of the Qwen2.5 style."""
    return build_tokenizer(tokenizer_rows())
