"""Platform cuda: NVIDIA GPUs."""
