import importlib.util
import os
import signal
import sys

# Before torch is imported. Two parts of `make test` and their engines share two cores: a second
# thread of OpenMP finds none, and the first waits for it spinning.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from retool_mcore.platforms.cpu.platform import STUBS

if importlib.util.find_spec("torchvision") is None:  # transformers asks once, as it is imported
    sys.path.insert(0, str(STUBS))  # a run's own processes find it by PYTHONPATH

from retool_mcore.data.task_model import build_tokenizer, write_model
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.platforms.base import get_platform
from retool_mcore.platforms.network import INTERFACES, RAY_ON_LOOPBACK, RAY_SECRETS
from retool_mcore.rollout.server import SglangServer

# Hypothesis's warnings about a busy machine are ignored. Examples share a test's fixtures.
hypothesis_settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
hypothesis_settings.load_profile("tests")

# Programs that tests start inherit what is ignored, as under nohup or in a shell's background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

RUN_VARIABLES = ("RAY_AUTH_MODE", *RAY_ON_LOOPBACK, *RAY_SECRETS, *INTERFACES)


@pytest.fixture(autouse=True)
def without_secrets_of_other_tests():
    """A run in this process makes a secret for Ray and its engines, not for the next test."""
    before = {name: os.environ.get(name) for name in RUN_VARIABLES}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="module")
def verl_on_cpu():
    """verl imports in this process, on platform cpu."""
    pytest.importorskip("verl", reason="verl is not installed")
    import torch

    from retool_mcore.verl.plugin import assert_loaded

    if torch.accelerator.is_available():
        pytest.skip("platform cpu refuses an accelerator")
    get_platform("cpu").activate()
    assert_loaded()  # another file's tests may have imported verl before the platform was known


@pytest.fixture(scope="session")
def tokenizer():
    """The quickstart's tokenizer: byte-level BPE, a template of the Qwen2.5 style, </tool_call> one
    token.
    """
    return build_tokenizer(tokenizer_rows())


@pytest.fixture(scope="session")
def merging_tokenizer():
    """A tokenizer that, like Qwen's, has one token for the ">" of </code> and the line break after
    it.
    """
    trace = "I count.\n<code>\n```python\nprint(1)\n```\n</code>\n<interpreter>\n1\n</interpreter>\n\nif a>=b: a->b\n"
    rows = [*tokenizer_rows(), *({"messages": [{"role": "user", "content": trace}], "tools": None} for _ in range(3))]
    made = build_tokenizer(rows)
    assert len(made.encode(">\n", add_special_tokens=False)) == 1, "the line break does not merge"
    return made


@pytest.fixture(scope="session")
def model_dir(tokenizer, tmp_path_factory):
    """A random model of the quickstart's architecture."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, tokenizer, seed=0)
    return directory


@pytest.fixture(scope="session")
def server(model_dir, tmp_path_factory):
    """The real SGLang server on the CPU, set up as verl sets it up: tokens in, tokens out.

    A test that loads other weights into it must load ``model_dir`` again.
    """
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_TOKEN", "a secret")  # processes that send weights derive the key from it
        made = SglangServer(
            model_dir,
            get_platform("cpu"),
            dtype="float32",
            log_path=log_path,
            extra_args=["--skip-tokenizer-init", "--enable-custom-logit-processor"],
            max_running_requests=64,
            engine_args={"random_seed": 41},
        )
    with made as running:
        yield running
