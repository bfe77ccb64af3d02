"""Platform cuda: its patches against what they replace, and settings that lack what they need."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retool_mcore.config import RlConfig, SftConfig, load_config
from retool_mcore.errors import ConfigError, PlatformError
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.cuda import log_probs, patches, platform
from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.platforms.patches import Patch
from retool_mcore.platforms.patches_sglang import HOST_COPY_PATCH
from retool_mcore.platforms.patches_verl import FLAT_BUCKET_PATCH, LOG_PROB_PATCH
from retool_mcore.preflight import machine
from tests.scenario import ROOT

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device in this machine"),
]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [([3, 3, 3], 6, [2, 1]), ([9, 1, 1], 4, [1, 2]), ([1, 1, 9], 4, [2, 1]), ([], 4, []), ([5], 5, [1])],
)
def test_parts_keep_the_order_and_the_limit(sizes: list[int], limit: int, expected: list[int]):
    params = [torch.zeros(size) for size in sizes]
    made = list(patches.parts(params, limit))
    assert [len(part) for part in made] == expected
    assert [id(p) for part in made for p in part] == [id(p) for p in params]


class OneStep:
    """An optimizer of FusedAdam's make-up that records what each call of step saw."""

    def __init__(self, moments: torch.dtype) -> None:
        self.name_to_dtype_map = {"exp_avg": moments, "exp_avg_sq": moments}
        self.param_groups: list[dict[str, Any]] = [
            {"params": [torch.zeros(3), torch.zeros(3)]},
            {"params": [torch.zeros(2)], "step": 7},
        ]
        self.seen: list[tuple[int, int]] = []

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self.seen.append((sum(p.numel() for p in group["params"]), group["step"]))


@pytest.mark.parametrize(
    ("moments", "seen"),
    [(torch.float32, [(6, 1), (2, 8)]), (torch.bfloat16, [(3, 1), (3, 1), (2, 8)])],
)
def test_a_step_in_parts_counts_one_step_and_restores_the_groups(
    moments: torch.dtype, seen: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patches, "PART_ELEMENTS", 3)
    optimizer = OneStep(moments)
    groups, sizes = optimizer.param_groups, [len(group["params"]) for group in optimizer.param_groups]
    patches.step_in_parts(OneStep.step)(optimizer)
    assert optimizer.seen == seen
    assert optimizer.param_groups is groups and [len(group["params"]) for group in groups] == sizes
    assert [group["step"] for group in groups] == [1, 8]


@pytest.mark.parametrize("name", ["cuda", "ascend"])
def test_float32_is_for_the_cpu(name: str):
    config = load_config(SftConfig, "configs/sft_tiny_cpu.toml", [f"run.platform={name}"])
    with pytest.raises(ConfigError, match=rf'model\.dtype = "float32" does not train on platform "{name}". Use "bfl'):
        get_platform(name).check_settings(config)
    get_platform("cpu").check_dtype(config)


def test_what_needs_transformer_engine_says_so_before_anything_is_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "TRANSFORMER_ENGINE", "a_package_that_is_not_there")
    config = load_config(
        SftConfig, "configs/sft_qwen2.5_7b_h200x8.toml", ["parallel.cp=2", "memory.adam_states=compact"]
    )
    with pytest.raises(PlatformError, match=r"parallel\.cp and memory\.adam_states as set needs Transformer Engine"):
        get_platform("cuda").check_settings(config)


IN_FP8 = ("rollout.precision=fp8", "algorithm.importance_sampling=token")


@pytest.mark.parametrize(
    ("settings", "installed", "said"),
    [
        (IN_FP8, "a_package_that_is_not_there", "no DeepGEMM installed"),
        (IN_FP8, "json", None),
        ((*IN_FP8, "rollout.engine_args={fp8_gemm_runner_backend='cutlass'}"), "json", "CUTLASS products"),
        ((*IN_FP8, "rollout.engine_args={fp8_gemm_runner_backend='deep_gemm'}"), "json", None),
        ((), "a_package_that_is_not_there", None),
    ],
)
def test_engines_in_fp8_that_are_no_faster_are_remarked_on(
    settings: tuple[str, ...], installed: str, said: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(platform, "DEEP_GEMM", installed)
    config = load_config(RlConfig, "configs/rl_qwen2.5_7b_h200x8.toml", settings)
    remarks = get_platform("cuda").remarks(config)
    assert len(remarks) == (said is not None) and all(str(said) in remark for remark in remarks)
    monkeypatch.setattr(Cuda, "check_settings", lambda self, config: None)
    found = list(machine.settings(config, get_platform("cuda")))
    assert [each.severity for each in found] == ["ok", *["warning"] * len(remarks)]


@pytest.mark.parametrize(("fp8", "ep", "told"), [("tensorwise", 8, True), ("tensorwise", 1, False), ("off", 8, False)])
def test_fp8_of_experts_which_is_slower_is_remarked_on(fp8: str, ep: int, told: bool):
    settings = (f"model.fp8={fp8}", f"parallel.ep={ep}")
    config = load_config(SftConfig, "configs/sft_qwen3_30b_a3b_h200x8.toml", settings)
    remarks = get_platform("cuda").remarks(config)
    assert len(remarks) == told and all("slower than in bfloat16" in remark for remark in remarks)


@pytest.mark.parametrize("patch", [LOG_PROB_PATCH, FLAT_BUCKET_PATCH, HOST_COPY_PATCH], ids=lambda patch: patch.title)
def test_what_only_cuda_patches_takes_what_it_took(verl_on_cpu: None, patch: Patch):
    patch.check_version()
    for change in patch.changes:
        patch.check_parameters(change.target, change.parameters)


def test_the_page_lists_what_cuda_changes_of_sglang():
    of_cuda = Cuda().sglang_patches()
    if not of_cuda:
        pytest.skip("SGLang is not installed")
    section = (ROOT / "retool_mcore/platforms/README.md").read_text(encoding="utf-8").split("\n## ")[1]
    listed = re.findall(r"^\| `(.+?)` \|", section, flags=re.MULTILINE)
    changed = [change.target for patch in of_cuda for change in patch.changes]
    assert listed == [".".join(target.split(".")[-2:]) for target in changed]


def test_the_stand_in_for_apex_is_last_on_the_path_and_only_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{platform.KERNELS}:/somewhere")
    assert get_platform("cuda").process_env()["PYTHONPATH"] == f"/somewhere:{platform.KERNELS}"


def reference(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the labels from the same 16-bit logits, in float32."""
    logits_TV = (hidden_TH @ weight_VH.t()).float()
    return torch.log_softmax(logits_TV, -1).gather(-1, labels_T[:, None])[:, 0]


def assert_alike(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Gradients of 16-bit products."""
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(ours.float().flatten(), theirs.float().flatten(), 0) > 0.9999
        torch.testing.assert_close(ours.float().norm(), theirs.float().norm(), atol=0, rtol=1e-2)


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.fixture
    def group(self) -> Any:
        pytest.importorskip("transformer_engine")
        from megatron.core import parallel_state

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:29577", rank=0, world_size=1)
            parallel_state.initialize_model_parallel()
        return parallel_state.get_tensor_model_parallel_group()

    def test_fused_log_probs_and_gradients_equal_a_float32_softmax(self, group: Any):
        def never(*_: Any) -> Any:
            raise AssertionError("verl's kernel was called")

        fused = log_probs.log_probs_by_transformer_engine(never)
        torch.manual_seed(0)
        tokens, hidden, vocab = 257, 256, 5003
        inputs = [torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) * 0.3 for n in (tokens, vocab)]
        hidden_TH, weight_VH = (tensor.requires_grad_() for tensor in inputs)
        labels_T = torch.randint(vocab, (tokens,), device="cuda")
        upstream_T = torch.randn(tokens, device="cuda")
        expected_T = reference(hidden_TH, weight_VH, labels_T)
        expected = torch.autograd.grad((expected_T * upstream_T).sum(), (hidden_TH, weight_VH))
        found_T, entropy_T = fused(hidden_TH[:, None], weight_VH, labels_T[None], 1.0, "none", group)
        found = torch.autograd.grad((found_T * upstream_T).sum(), (hidden_TH, weight_VH), retain_graph=True)
        torch.testing.assert_close(found_T, expected_T, atol=1e-5, rtol=1e-5)
        assert_alike(found, expected)
        logits_TV = (hidden_TH @ weight_VH.t()).float()
        expected_T = torch.distributions.Categorical(logits=logits_TV).entropy()
        torch.testing.assert_close(entropy_T, expected_T, atol=1e-3, rtol=1e-3)
        expected = torch.autograd.grad((expected_T * upstream_T).sum(), (hidden_TH, weight_VH))
        assert_alike(torch.autograd.grad((entropy_T * upstream_T).sum(), (hidden_TH, weight_VH)), expected)
        with torch.no_grad():
            _, entropy_T = fused(hidden_TH[:, None], weight_VH, labels_T[None], 1.0, "none", group)
        torch.testing.assert_close(entropy_T, expected_T, atol=1e-3, rtol=1e-3)

    def test_another_temperature_scales_the_logits_of_both(self, group: Any):
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        fused = log_probs.log_probs_by_transformer_engine(linear_cross_entropy)
        torch.manual_seed(0)
        hidden_TH, weight_VH = (
            (torch.randn(n, 256, device="cuda", dtype=torch.bfloat16) * 0.3).requires_grad_() for n in (257, 5003)
        )
        labels_T = torch.randint(5003, (257,), device="cuda")
        found_T, entropy_T = fused(hidden_TH[:, None], weight_VH, labels_T[None], 0.7, "none", group)
        logits_TV = (hidden_TH.float() @ weight_VH.float().t()) / 0.7
        expected_T = torch.log_softmax(logits_TV, -1).gather(-1, labels_T[:, None])[:, 0]
        torch.testing.assert_close(found_T, expected_T, atol=5e-2, rtol=0)
        wanted_T = torch.distributions.Categorical(logits=logits_TV).entropy()
        torch.testing.assert_close(entropy_T, wanted_T, atol=5e-2, rtol=0)
        upstream_2T = torch.randn(2, 257, device="cuda")  # verl's kernel takes no expanded gradient
        expected = torch.autograd.grad(
            (torch.stack((expected_T, wanted_T)) * upstream_2T).sum(), (hidden_TH, weight_VH)
        )
        found = torch.autograd.grad((torch.stack((found_T, entropy_T)) * upstream_2T).sum(), (hidden_TH, weight_VH))
        assert_alike(found, expected)

    def test_the_stand_in_adds_to_the_gradient_buffer(self):
        import importlib.util

        path = platform.KERNELS / "fused_weight_gradient_mlp_cuda.py"
        spec = importlib.util.spec_from_file_location("stand_in", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        data = SimpleNamespace(
            input=torch.randn(64, 32, device="cuda", dtype=torch.bfloat16),
            grad=torch.randn(64, 48, device="cuda", dtype=torch.bfloat16),
            main=torch.randn(48, 32, device="cuda"),
        )
        expected = data.main + data.grad.float().t() @ data.input.float()
        module.wgrad_gemm_accum_fp32(data.input, data.grad, data.main)
        torch.testing.assert_close(data.main, expected, atol=1e-4, rtol=1e-4)
