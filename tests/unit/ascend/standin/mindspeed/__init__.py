"""A stand-in for MindSpeed: it notes that it was asked to patch Megatron-core, and with what."""
