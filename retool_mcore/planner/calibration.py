"""The planner's only fitted numbers: how much of the data sheets' figures runs reach, and why.

Each number names the measurement that it comes from; "assumed" marks what none of our runs has
measured.

SFT is fitted to two rows of "SFT of a 7B shape on 2 H200" (perf/history.jsonl, 2026-11-21): CP 2 as
kept, with its profile, and CP 2 before its cross-entropy was changed. The other rows of that table
are predictions, and tests/unit/planner holds them to 10 % of memory and 20 % of time.

What the host launches in training, where it is slower than a device: three constants for layers,
adapters and the optimizer's tensors, fitted to SFT of 0.5B (f03b0a2 alone, 7e84857 with adapters)
and of a 32B shape with adapters. RL's updates of 0.5B were not in that fit. What adapters move
through memory is counted, and held on RL of 7B and SFT of 32B with adapters.

RL's generation, seven constants, is fitted to five rows of "RL on H200" in perf/RESULTS.md (the 7B
shape in bfloat16, the mean of five runs, in FP8 and in mode "partial_rollout", its quarter in
"sync" and in "async"), to bare SGLang of 7B in bfloat16 and FP8, and to three rows of "Small models
on one GPU": f03b0a2 with the tool and in words, 328593a in words. What a step costs beyond its
passes is fitted to the same rows, and what the driver does to rows of 7e84857, whose code it is.
tests/unit/planner holds all recorded rows to 5 % of a step: of those named here that shows that one set
of constants does for all, and no more.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    value: float
    source: str


SFT_7B = "fitted: SFT 7B, CP 2, 2 x H200"
RL_7B = "fitted: RL 7B, 2 x H200"
RL_FP8 = "fitted: RL 7B in FP8, 2 x H200"
RL_ROWS = "fitted: RL of 7B and of its quarter, 2 x H200"
RL_SMALL = "fitted: RL 7B in FP8 on 2 x H200, and of 0.5B on one H100 or H200"
RL_NOW = "fitted: RL of 0.5B, and of 7B with adapters, on one H100 each at 7e84857"
SFT_SMALL = "fitted: SFT of 0.5B, one H100 or H200"
SFT_A3B = "fitted: SFT of a quarter of Qwen3-30B-A3B, EP 2, 2 x H200"
RL_A3B = "fitted: RL of an eighth of Qwen3-30B-A3B, EP 2, 2 x H200"

CALIBRATION = {
    "gemm": Constant(0.72, f"{SFT_7B}; share of peak of the matrix products in its profile"),
    "fp8": Constant(0.67, "fitted: SFT of half a 7B, one H200; time of matrix products in FP8 over bfloat16's"),
    "attention": Constant(0.26, f"{SFT_7B}; the same of attention, causal half counted"),
    "elementwise": Constant(6.0, f"{SFT_7B}; times what is kept for backward passes through memory, in three passes"),
    "gaps": Constant(0.08, f"{SFT_7B}; time without a kernel, as a share of the time with one"),
    "permute": Constant(8.0, f"{SFT_A3B}; times a token's copies go through memory to and from their experts"),
    "dense_layer_s": Constant(
        2.3e-3, f"{SFT_SMALL}; the host's time for a layer's forward pass, where its device waits for it"
    ),
    "adapter_launch_s": Constant(
        1.45e-4, f"{SFT_SMALL}, with adapters and without; the same for each matrix that has an adapter"
    ),
    "optimizer_tensor_s": Constant(
        5e-5, "fitted: SFT of a 32B shape with adapters, one H100; the host's time for a tensor in the optimizer's step"
    ),
    "expert_layer_s": Constant(
        5.5e-3, "fitted: SFT of half of Qwen3-30B-A3B, EP 4, 4 x H200; the host's time for a layer's forward pass"
    ),
    "expert_launch_s": Constant(1.2e-4, f"{SFT_A3B}, 16 k tokens a micro-batch; the same for each of its experts"),
    "fp8_launches": Constant(2.5, f"{SFT_A3B}; that time in FP8 over bfloat16's"),
    "ring": Constant(0.045, f"{SFT_7B}; what context parallelism adds, as such a share: small kernels, half sequences"),
    "memory": Constant(0.70, "assumed: share of the memory's rate reached"),
    "whole": Constant(
        0.42,
        "fitted: SFT of a 32B shape on a base in FP8, one H100; that share when weights are made whole, by two kernels "
        "of torch's that are not vectorized: a cast from float8, and a product with a column",
    ),
    "link": Constant(0.75, "assumed: share of a link's rate reached by collectives"),
    "spread": Constant(1.35, f"{SFT_7B}; mean square of the lengths over the square of their mean"),
    "buffers_gib": Constant(3.7, f"{SFT_7B}; communication buffers, workspaces, fragments"),
    "logits_bytes": Constant(8.0, f"{SFT_7B}; for each logit: bfloat16, float32, and what backward makes of them"),
    "fused_logits_bytes": Constant(2.1, f"{SFT_7B}; the same with memory.fused_cross_entropy"),
    "weights_read": Constant(0.76, "measured: bare SGLang, 7B; of the memory's rate, by a decoding step's products"),
    "cache_read": Constant(0.56, f"{RL_ROWS}; the same of its attention"),
    "decode_step_s": Constant(2.4e-4, f"{RL_ROWS}; a decoding step beyond its layers and requests"),
    "decode_request_s": Constant(6.0e-6, f"{RL_ROWS}; so much for each request: its sampling and its answer"),
    "decode_layer_s": Constant(1.1e-5, f"{RL_ROWS}; so much for each layer, all-reduces apart"),
    "decode_fp8_s": Constant(2.0e-5, f"{RL_FP8}; what a layer in FP8 adds to it: tokens are cast"),
    "launch_layer_s": Constant(
        9.1e-4, f"{RL_SMALL}; the engine's host for a layer of a prefill, and of decoding above what is captured"
    ),
    "start_response_s": Constant(2.3e-3, f"{RL_SMALL}; an engine's server for each response of a step, before it runs"),
    "all_reduce_s": Constant(1e-5, "assumed: a small sum over an engine's GPUs, two of which a layer has in a step"),
    "infer_phase_s": Constant(1.2, f"{RL_7B}; old log-probabilities beyond their passes"),
    "update_s": Constant(0.13, f"{RL_SMALL}; an update beyond its passes"),
    "update_response_s": Constant(
        3.7e-3, f"{RL_SMALL}; the same for each response of a rank, which fetches, cuts and packs its own alone"
    ),
    "update_shared_s": Constant(
        0.33, f"{RL_ROWS}; a step's updates on devices that engines have, too: what sync has beside async, not profiled"
    ),
    "advantage_s": Constant(0.06, f"{RL_NOW}; advantages, the driver's part in a step"),
    "advantage_response_s": Constant(3.9e-4, f"{RL_NOW}; the same for each response"),
    "other_s": Constant(0.09, f"{RL_SMALL}; engines that sleep and wake, and what is between a step's phases"),
    "other_response_s": Constant(2e-4, f"{RL_SMALL}; the same for each response"),
    "replay_value_s": Constant(2.4e-8, f"{RL_A3B}; the driver's part for each expert of a layer of a token replayed"),
    "metrics_s": Constant(0.11, f"{RL_NOW}; metrics between two steps"),
    "metrics_token_s": Constant(5e-6, f"{RL_NOW}; for each token of the trajectories that are written"),
    "sync_s": Constant(0.07, f"{RL_ROWS}; a weight sync beyond its bytes"),
    "sync_rate": Constant(67e9, f"{RL_ROWS}; bytes of weights a second into one engine"),
    "sync_running_s": Constant(0.6, f"{RL_ROWS}; a weight sync while responses run, which stop and go on"),
    "sync_layer_s": Constant(4.7e-3, f"{RL_SMALL}; a weight sync for each layer, of a dozen tensors"),
    "merge_s": Constant(
        3e-4, "fitted: RL of 0.5B with adapters and without, one H100; the host for each merged matrix"
    ),
    "sync_expert_s": Constant(
        1e-4, "fitted: RL of an eighth of Qwen3-30B-A3B, EP 2, 2 x H100; a weight sync for each matrix of an expert"
    ),
    "usable_memory": Constant(0.95, "assumed: share of the device's memory that training may fill; 0.91 has run"),
    "engine_gib": Constant(
        13.0, "assumed: SGLang's own rule for its fraction leaves so much of such a device to graphs and activations"
    ),
    "graph_request_gib": Constant(
        2 / 1024, "assumed: SGLang's own rule; each request of a decoding step in a graph beyond its usual largest"
    ),
    "asleep_gib": Constant(3.0, "assumed: an engine's context and graphs, while it sleeps beside the training"),
    "host": Constant(0.55, f"{RL_7B}, the idle actor on the host; share of the rate between device and host reached"),
    "calls": Constant(4.0, "assumed: tool calls of a response; the paper's later runs make about so many"),
    "execution_cpu_s": Constant(
        0.0133, "measured: one execution that imports sympy, perf/history.jsonl; print takes 0.0055"
    ),
    "tool_wait_s": Constant(0.036, "measured: RL 7B, 2 x H200; what a call of sympy adds to a response's time"),
}

# Seconds from the command to the first step of RL of the 7B shape on two H200 with cold caches, by
# the stage of run/start.py (perf/history.jsonl, 2026-11-23). Measured once, and not modelled.
START_S = {
    "checks": 15.2,
    "ray": 25.9,
    "driver": 24.5,
    "workers": 2.5 + 41.8,  # to start, and to build the model
    "engines": 94.8,
    "weights": 0.9,
}


def calibrated(name: str) -> float:
    return CALIBRATION[name].value
