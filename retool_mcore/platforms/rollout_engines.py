"""The engines that sample, and what our code asks of them.

No other file asks for an engine's name.
"""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

CAPTURED = 256  # SGLang's largest decoding step in a graph; twice that from TP 4 on
MOST_CAPTURED = 512  # it captures no larger one by itself on any device


@dataclass(frozen=True, kw_only=True)
class RolloutEngine:
    """What differs between the engines that verl drives for us."""

    name: str  # verl's name for it, of its keys and its registry
    title: str  # its own name, for messages
    own_server: bool = False  # it runs in our server, whose load is polled and whose death is seen
    request_seeds: bool = False  # a request carries its own seed, and how the end of a call is found; else one by one
    # The argument that takes run.seed. None: verl passes its rollout.seed, to which it adds the
    # replica's number.
    seed_argument: str | None = None
    # What gives it a cache of keys and values in FP8: argument, value. None: it has none here.
    fp8_cache: tuple[str, str] | None = None
    # Where its arguments are declared: package, file, class. None: their names are not checked.
    arguments_class: tuple[str, str, str] | None = None
    # The argument for the requests of the largest decoding step in a graph. None: it is left alone.
    graphs_argument: str | None = None
    # The argument for the most tokens that its cache may hold. None: its share of memory says it.
    cache_argument: str | None = None
    # The argument that names a drafter, and the drafters without weights of their own.
    draft_argument: str | None = None
    drafts_without_weights: tuple[str, ...] = ()

    def graphs(self, max_running: int, tp: int) -> dict[str, int]:
        """So that decoding steps of all ``max_running`` requests are captured, up to MOST_CAPTURED.

        Launched kernel by kernel, a step takes the host 0.9 ms a layer (planner/calibration.py).
        """
        largest = captured(max_running, tp)
        if self.graphs_argument is None or largest == captured(0, tp):
            return {}
        return {self.graphs_argument: largest}

    def known_arguments(self) -> set[str] | None:
        """The names that ``rollout.engine_args`` may hold; None where nothing here can say.

        They are read from the engine's source, because importing it takes seconds and a device.
        """
        if self.arguments_class is None:
            return None
        name, file, class_name = self.arguments_class
        package = importlib.util.find_spec(name)
        if package is None or package.submodule_search_locations is None:
            return None  # a login node; preflight reports that the package is missing
        source = (Path(package.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
        classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        return {
            line.target.id
            for each in classes
            if each.name == class_name
            for line in each.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }


def captured(max_running: int, tp: int) -> int:
    """Requests of the largest decoding step in a graph, as ``RolloutEngine.graphs`` asks for."""
    return max(CAPTURED if tp < 4 else MOST_CAPTURED, min(max_running, MOST_CAPTURED))


SGLANG = RolloutEngine(
    name="sglang",
    title="SGLang",
    own_server=True,
    request_seeds=True,
    seed_argument="random_seed",  # verl/sglang_server.py adds the replica's number
    fp8_cache=("kv_cache_dtype", "fp8_e4m3"),
    arguments_class=("sglang", "srt/server_args.py", "ServerArgs"),
    graphs_argument="cuda_graph_max_bs_decode",  # on a CPU it captures nothing
    cache_argument="max_total_tokens",
    draft_argument="speculative_algorithm",
    drafts_without_weights=("NGRAM",),
)
VLLM = RolloutEngine(name="vllm", title="vLLM")  # requests without seeds: it would process seeded ones one by one
ENGINES = {engine.name: engine for engine in (SGLANG, VLLM)}  # by verl's name, which verl's tree holds
