"""ReTool on Megatron-core: supervised and reinforcement learning of tool-integrated reasoning."""

__version__ = "0.1.0"
