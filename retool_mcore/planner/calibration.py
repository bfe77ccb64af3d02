"""The planner's calibration constants, such as the share of data-sheet peak rates that runs reach.

They are fitted by hand to the measurements in tests/unit/planner/test_measured.py, which requires
every plan to be within 20 % of its measurement. "assumed" marks values that no run has measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    value: float
    source: str


CALIBRATION = {
    # training
    "products": Constant(0.60, "fitted: share of peak of the matrix products, with all small kernels in their time"),
    "fp8": Constant(0.71, "fitted: that time in FP8 over bfloat16's"),
    "attention": Constant(0.26, "fitted: share of peak of attention, causal half counted"),
    "permute": Constant(8.0, "fitted: times a token's copies go through memory to and from their experts"),
    "layer_s": Constant(2.3e-3, "fitted: the host launches a layer's forward pass, where its device waits for it"),
    "expert_s": Constant(2e-4, "fitted: the same for each of its experts"),
    "adapter_s": Constant(1.45e-4, "fitted: the same for each matrix that has an adapter"),
    "whole": Constant(0.42, "fitted: share of the memory's rate when weights in FP8 are converted for a product"),
    "memory": Constant(0.70, "assumed: share of the memory's rate that other kernels reach"),
    "link": Constant(0.75, "assumed: share of a link's rate that collectives reach"),
    "host": Constant(0.55, "fitted: share of the rate between device and host"),
    "spread": Constant(1.35, "measured: mean square of SFT's lengths over the square of their mean"),
    "phase_s": Constant(0.5, "fitted: an update of RL beyond its passes, and the pass over old log-probabilities"),
    "update_response_s": Constant(3.7e-3, "fitted: the same for each response of a rank, which fetches and packs it"),
    "driver_response_s": Constant(8e-4, "fitted: the driver's work for each response of a step"),
    # memory
    "buffers_gib": Constant(3.7, "fitted: communication buffers, workspaces, fragments"),
    "logits_bytes": Constant(8.0, "fitted: for each logit, bfloat16, float32, and what backward makes of them"),
    "fused_logits_bytes": Constant(2.1, "fitted: the same with memory.fused_cross_entropy"),
    "usable_memory": Constant(0.95, "assumed: share of the device's memory that training may fill; 0.91 has run"),
    "engine_gib": Constant(13.0, "assumed: SGLang's own rule leaves so much to graphs and activations"),
    "graph_request_gib": Constant(2 / 1024, "assumed: SGLang's own rule, for each request of a larger graph"),
    "asleep_gib": Constant(3.0, "assumed: an engine's context and graphs while it sleeps"),
    # generation
    "weights_read": Constant(0.76, "measured: share of the memory's rate when a decoding step reads the weights"),
    "cache_read": Constant(0.56, "fitted: the same of its attention"),
    "decode_layer_s": Constant(2e-5, "fitted: so much for each layer of a decoding step"),
    "decode_request_s": Constant(1.1e-5, "fitted: so much for each of its requests: sampling and the answer"),
    "prefill_layer_s": Constant(2e-4, "fitted: the engine's host launches a layer of a prefill"),
    "start_response_s": Constant(2.3e-3, "fitted: an engine's server takes a response of a step, before it runs"),
    "all_reduce_s": Constant(1e-5, "assumed: a small sum over an engine's GPUs, two of which a layer has"),
    "tool_wait_s": Constant(0.036, "measured: what a call adds to a response's time"),
    "calls": Constant(2.0, "assumed: tool calls of a response"),
    "execution_cpu_s": Constant(0.0133, "measured: one execution that imports sympy; print takes 0.0055"),
    # weight sync
    "sync_rate": Constant(67e9, "fitted: bytes of weights a second into one engine"),
    "sync_layer_s": Constant(4.7e-3, "fitted: for each layer"),
    "sync_expert_s": Constant(1e-4, "fitted: for each matrix of an expert"),
    "sync_running_s": Constant(0.6, "fitted: while responses run, which stop and continue"),
}


def calibrated(name: str) -> float:
    return CALIBRATION[name].value
