"""The planner's only fitted numbers: how much of the data sheets' figures runs reach, and why.

Each number names the measurement that it comes from; "assumed" marks what none of our runs has
measured.

SFT is fitted to two rows of "SFT of a 7B shape on 2 H200" (perf/history.jsonl, 2026-11-21): CP 2 as
kept, with its profile, and CP 2 before its cross-entropy was changed. The other rows of that table
are predictions, and tests/planner holds them to 10 % of memory and 20 % of time.

RL is fitted to one run of the 1.5B shape, TP 2, on two H200, with 64 responses of 1024 tokens and
8.7 s per step, of which generation takes 4.7, old log-probabilities 1.1 and the update 2.0. The
plan meets these figures because it is fitted to them, so they test nothing. A run of the 7B shape
is a test: only its weight sync was fitted (0.71 s, of which moving the weights into the engine
takes 0.4).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    value: float
    source: str


SFT_7B = "fitted: SFT 7B, CP 2, 2 x H200"
RL_1_5B = "fitted: RL 1.5B, TP 2, 2 x H200"
RL_7B = "fitted: RL 7B, TP 2, 2 x H200"
SFT_A3B = "fitted: SFT of a quarter of Qwen3-30B-A3B, EP 2, 2 x H200"
RL_A3B = "fitted: RL of an eighth of Qwen3-30B-A3B, EP 2, 2 x H200"

CALIBRATION = {
    "gemm": Constant(0.72, f"{SFT_7B}; share of peak of the matrix products in its profile"),
    "fp8": Constant(0.67, "fitted: SFT of half a 7B, one H200; time of matrix products in FP8 over bfloat16's"),
    "attention": Constant(0.26, f"{SFT_7B}; the same of attention, causal half counted"),
    "elementwise": Constant(6.0, f"{SFT_7B}; times what is kept for backward passes through memory, in three passes"),
    "gaps": Constant(0.08, f"{SFT_7B}; time without a kernel, as a share of the time with one"),
    "permute": Constant(8.0, f"{SFT_A3B}; times a token's copies go through memory to and from their experts"),
    "expert_layer_s": Constant(
        5.5e-3, "fitted: SFT of half of Qwen3-30B-A3B, EP 4, 4 x H200; the host's time for a layer's forward pass"
    ),
    "expert_launch_s": Constant(1.2e-4, f"{SFT_A3B}, 16 k tokens a micro-batch; the same for each of its experts"),
    "fp8_launches": Constant(2.5, f"{SFT_A3B}; that time in FP8 over bfloat16's"),
    "ring": Constant(0.045, f"{SFT_7B}; what context parallelism adds, as such a share: small kernels, half sequences"),
    "memory": Constant(0.70, "assumed: share of the memory's rate reached"),
    "link": Constant(0.75, "assumed: share of a link's rate reached by collectives"),
    "spread": Constant(1.35, f"{SFT_7B}; mean square of the lengths over the square of their mean"),
    "buffers_gib": Constant(3.7, f"{SFT_7B}; communication buffers, workspaces, fragments"),
    "logits_bytes": Constant(8.0, f"{SFT_7B}; for each logit: bfloat16, float32, and what backward makes of them"),
    "fused_logits_bytes": Constant(2.1, f"{SFT_7B}; the same with memory.fused_cross_entropy"),
    "decode_layer_s": Constant(1.25e-4, f"{RL_1_5B}; so much of a decoding step for each layer, all-reduces apart"),
    "all_reduce_s": Constant(1e-5, "assumed: a small sum over an engine's GPUs, two of which a layer has in a step"),
    "infer_phase_s": Constant(0.8, f"{RL_1_5B}; old log-probabilities beyond their passes"),
    "update_s": Constant(1.05, f"{RL_1_5B}; an update beyond its passes"),
    "sync_s": Constant(0.3, f"{RL_7B}; a weight sync beyond its bytes"),
    "sync_rate": Constant(38e9, f"{RL_7B}; bytes of weights a second into one engine"),
    "sync_expert_s": Constant(6e-4, f"{RL_A3B}; a weight sync for each matrix of an expert"),
    "usable_memory": Constant(0.95, "assumed: share of the device's memory that training may fill; 0.91 has run"),
    "engine_gib": Constant(
        13.0, "assumed: SGLang's own rule for its fraction leaves so much of such a device to graphs and activations"
    ),
    "asleep_gib": Constant(3.0, "assumed: an engine's context and graphs, while it sleeps beside the training"),
    "host_rate": Constant(20e9, "assumed: bytes a second between one device and the host"),
    "calls": Constant(4.0, "assumed: tool calls of a response; the paper's later runs make about so many"),
    "execution_cpu_s": Constant(
        0.0133, "measured: one execution that imports sympy, perf/history.jsonl; print takes 0.0055"
    ),
    "tool_wait_s": Constant(0.2, "assumed: what a call adds to a response's time"),
}

# Seconds from the command to the first step of RL of the 7B shape on two H200 with cold caches, by
# the stage of run/start.py (perf/history.jsonl, 2026-11-23). Measured once, and not modelled.
START_S = {
    "checks": 15.2,
    "ray": 25.9,
    "driver": 24.5,
    "workers": 2.5,
    "model": 41.8,
    "engines": 94.8,
    "weights": 0.9,
}


def calibrated(name: str) -> float:
    return CALIBRATION[name].value
