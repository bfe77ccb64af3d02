"""Platform `cpu`: verl's Megatron engine over gloo and the real SGLang, on machines without an
accelerator.
"""
