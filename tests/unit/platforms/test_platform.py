"""Choosing a platform, the environment of its processes, and errors for a wrong machine."""

import pytest
import torch

from retool_mcore.errors import PlatformError
from retool_mcore.platforms import get_platform

accelerator = torch.accelerator.is_available()


def test_an_unknown_platform_is_refused_with_the_known_ones():
    with pytest.raises(PlatformError, match=r'Unknown run\.platform = "tpu"\. Choose one of: cpu, cuda, ascend'):
        get_platform("tpu")


@pytest.mark.skipif(accelerator, reason="needs a machine without a CUDA device")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(PlatformError, match=r'run\.platform = "cuda", but torch .* sees no CUDA device'):
        get_platform("cuda").check_machine()


@pytest.mark.gpu
@pytest.mark.skipif(not accelerator, reason="needs a device to refuse")
def test_cpu_on_a_machine_with_a_device_is_refused():
    with pytest.raises(PlatformError, match="this process sees an accelerator"):
        get_platform("cpu").check_machine()


def test_the_environment_gives_a_reason_for_every_variable_and_yields_to_the_user(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    platform = get_platform("cpu")
    assert all(len(var.reason) > 15 for var in platform.environment())
    env = platform.process_env()
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["PYTHONPATH"].endswith("cpu/stubs:/somewhere")
