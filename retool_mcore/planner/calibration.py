"""What is reached of the data sheets: the planner's only fitted numbers, each with the measurement it comes from.

Two runs on H200s with verl's plain settings, 2026-11, are all so far. SFT of the 7B shape, TP 2, two GPUs, 32 sequences
of 2.7 k tokens in micro-batches of 16 k: 4.85 s a step, 120 GiB. RL of the 1.5B shape, TP 2, 64 responses of 1024
tokens: 8.7 s, of which generation 4.7, old log-probabilities 1.1, update 2.0 and weight sync 0.8. Both are met because
the constants were fitted to them, which is no test of the model. "assumed" marks what no run of ours has measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    value: float
    source: str


SFT_7B = "fitted: SFT 7B, TP 2, 2 x H200"
RL_1_5B = "fitted: RL 1.5B, TP 2, 2 x H200"

CALIBRATION = {
    "gemm": Constant(0.43, f"{SFT_7B}; share of peak reached by matrix products, forward and backward"),
    "attention": Constant(0.35, "assumed: share of peak reached by fused attention"),
    "link": Constant(0.75, "assumed: share of a link's rate reached by collectives"),
    "memory": Constant(0.70, "assumed: share of the memory's rate reached while decoding"),
    "decode_layer_s": Constant(1.45e-4, f"{RL_1_5B}; a decoding step takes at least so long for each layer"),
    "infer_phase_s": Constant(0.75, f"{RL_1_5B}; old log-probabilities beyond their matrix products"),
    "update_s": Constant(0.95, f"{RL_1_5B}; an update beyond its matrix products"),
    "sync_s": Constant(0.5, f"{RL_1_5B}; a weight sync beyond its bytes"),
    "sync_rate": Constant(10e9, f"{RL_1_5B}; bytes of weights a second into one engine"),
    "buffers_gib": Constant(5.0, f"{SFT_7B}; communication buffers, workspaces, fragments"),
    "logits_bytes": Constant(12.0, f"{SFT_7B}; for each logit: bfloat16, float32, and their gradients"),
    "fused_logits_bytes": Constant(0.5, "assumed: the same with memory.fused_cross_entropy"),
    "usable": Constant(0.95, "assumed: share of the device's memory that a plan may fill"),
    "calls": Constant(4.0, "assumed: tool calls of a response; the paper's later runs make about so many"),
    "execution_cpu_s": Constant(
        0.0133, "measured: one execution that imports sympy, perf/RESULTS.md; print takes 0.0055"
    ),
    "tool_wait_s": Constant(0.2, "assumed: what a call adds to a response's time"),
}


def of(name: str) -> float:
    return CALIBRATION[name].value
