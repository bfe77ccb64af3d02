"""The rollout engines and their properties.

Other files use these properties and never compare an engine's name.
"""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

CAPTURED = 256  # SGLang's largest captured decode batch by default, in requests; twice that from TP 4 on
MAX_CAPTURED = 512  # SGLang's default never exceeds this, on any device


@dataclass(frozen=True, kw_only=True)
class RolloutEngine:
    """Properties of an engine that verl runs for us."""

    name: str  # in verl's keys and registry
    title: str  # for messages
    our_server: bool = False  # whether it runs in our server class, with load polling and restarts
    request_seeds: bool = False  # whether requests carry a seed and the parameters that detect a call's end
    # The argument that takes run.seed. None: verl passes rollout.seed plus the replica's number.
    seed_argument: str | None = None
    # Argument and value that select an FP8 KV cache. None: not supported.
    fp8_cache: tuple[str, str] | None = None
    # Where its arguments are declared: package, file, class. None: argument names are not checked.
    arguments_class: tuple[str, str, str] | None = None
    # The argument for the largest captured decode batch, in requests. None: we do not set it.
    graphs_argument: str | None = None
    # The argument for the KV cache's size in tokens. None: only its memory fraction limits it.
    cache_argument: str | None = None
    # The argument for the memory of DeltaNet states, relative to that of the KV cache.
    states_argument: str | None = None
    # The argument that selects a speculative algorithm, and the algorithms without draft weights.
    draft_argument: str | None = None
    drafts_without_weights: tuple[str, ...] = ()

    def graphs(self, max_running: int, tp: int) -> dict[str, int]:
        """Arguments that capture decode batches of up to ``max_running`` requests in CUDA graphs.

        The limit is MAX_CAPTURED; {} if the default is enough. Without a graph, the host
        launches every kernel of a decode step, which takes longer.
        """
        largest = captured(max_running, tp)
        if self.graphs_argument is None or largest == captured(0, tp):
            return {}
        return {self.graphs_argument: largest}

    def known_arguments(self) -> set[str] | None:
        """The valid names in ``rollout.engine_args``; None if unknown on this machine.

        Reads them from the engine's source, because importing it takes seconds and a device.
        """
        if self.arguments_class is None:
            return None
        name, file, class_name = self.arguments_class
        package = importlib.util.find_spec(name)
        if package is None or package.submodule_search_locations is None:
            return None  # as on a login node; preflight reports the missing package
        source = (Path(package.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
        classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        return {
            line.target.id
            for node in classes
            if node.name == class_name
            for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }


def captured(max_running: int, tp: int) -> int:
    """The largest captured decode batch, in requests, with ``RolloutEngine.graphs``."""
    return max(CAPTURED if tp < 4 else MAX_CAPTURED, min(max_running, MAX_CAPTURED))


SGLANG = RolloutEngine(
    name="sglang",
    title="SGLang",
    our_server=True,
    request_seeds=True,
    seed_argument="random_seed",  # verl/sglang_server.py adds the replica's number
    fp8_cache=("kv_cache_dtype", "fp8_e4m3"),
    arguments_class=("sglang", "srt/server_args.py", "ServerArgs"),
    graphs_argument="cuda_graph_max_bs_decode",  # has no effect on a CPU
    cache_argument="max_total_tokens",
    states_argument="mamba_full_memory_ratio",
    draft_argument="speculative_algorithm",
    drafts_without_weights=("NGRAM",),
)
VLLM = RolloutEngine(name="vllm", title="vLLM")  # no request seeds: vLLM would process seeded requests one by one
ENGINES = {engine.name: engine for engine in (SGLANG, VLLM)}  # by their name in verl
