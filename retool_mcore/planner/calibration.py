"""The planner's calibration constants, such as the achieved fraction of a data-sheet rate.

They are fitted by hand to the measurements in tests/unit/planner/test_measured.py, which requires
every plan to be within 20 % of its measurement. "assumed" marks constants that were not measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    value: float
    source: str


CALIBRATION = {
    # training
    "products": Constant(0.60, "fitted: share of peak FLOP/s in matrix products, including the time of small kernels"),
    "fp8": Constant(0.71, "fitted: time of matrix products in FP8 / in bfloat16"),
    "attention": Constant(0.26, "fitted: share of peak FLOP/s in attention, counting only the causal half"),
    "permute": Constant(8.0, "fitted: memory passes per token copy, to and from its expert"),
    "layer_s": Constant(2.3e-3, "fitted: launch time of a layer's forward pass, if the host is the bottleneck"),
    "expert_s": Constant(2e-4, "fitted: launch time per expert of a layer"),
    "adapter_s": Constant(1.45e-4, "fitted: launch time per matrix with an adapter"),
    "dequantize": Constant(
        0.42, "fitted: share of memory bandwidth when dequantizing FP8 weights for a matrix product"
    ),
    "memory": Constant(0.70, "assumed: share of memory bandwidth in other kernels"),
    "link": Constant(0.75, "assumed: share of link bandwidth in collectives"),
    "host": Constant(0.55, "fitted: share of the bandwidth between device and host"),
    "spread": Constant(1.35, "measured: mean square of SFT's row lengths / square of their mean"),
    "phase_s": Constant(0.5, "fitted: fixed time of an RL update, and of the pass for old log-probabilities"),
    "update_response_s": Constant(3.7e-3, "fitted: time in an update to fetch and pack a response of the rank"),
    "driver_response_s": Constant(8e-4, "fitted: the driver's time per response of a step"),
    # memory
    "buffers_gib": Constant(3.7, "fitted: communication buffers, workspaces, fragmentation"),
    "logits_bytes": Constant(8.0, "fitted: bytes per logit: bfloat16 and float32 copies, backward included"),
    "fused_logits_bytes": Constant(2.1, "fitted: bytes per logit with memory.fused_cross_entropy"),
    "usable_memory": Constant(0.95, "assumed: share of device memory that training may fill"),
    "engine_gib": Constant(13.0, "assumed: SGLang's own reserve for graphs and activations"),
    "graph_request_gib": Constant(2 / 1024, "assumed: SGLang's reserve per request captured beyond the default"),
    "asleep_gib": Constant(3.0, "assumed: context and graphs of an idle, colocated engine"),
    # generation
    "weights_read": Constant(0.76, "measured: share of memory bandwidth when a decoding step reads the weights"),
    "cache_read": Constant(0.56, "fitted: share of memory bandwidth when attention reads the KV cache"),
    "decode_layer_s": Constant(2e-5, "fitted: fixed time per layer of a decoding step"),
    "decode_request_s": Constant(1.1e-5, "fitted: time per request of a decoding step, for sampling and the answer"),
    "prefill_layer_s": Constant(2e-4, "fitted: launch time per layer of a prefill"),
    "start_response_s": Constant(2.3e-3, "fitted: time for an engine's server to accept a request of a step"),
    "all_reduce_s": Constant(1e-5, "assumed: latency of a small all-reduce over an engine's GPUs, two per layer"),
    "tool_wait_s": Constant(0.036, "measured: time that a call adds to a response"),
    "calls": Constant(2.0, "assumed: tool calls per response"),
    "execution_cpu_s": Constant(0.0133, "measured: CPU time of an execution that imports sympy; print takes 0.0055"),
    # weight sync
    "sync_rate": Constant(67e9, "fitted: bytes per second of weights into one engine"),
    "sync_layer_s": Constant(4.7e-3, "fitted: time per layer"),
    "sync_expert_s": Constant(1e-4, "fitted: time per matrix of an expert"),
    "sync_running_s": Constant(0.6, "fitted: time to pause and resume running responses"),
}


def calibrated(name: str) -> float:
    return CALIBRATION[name].value
