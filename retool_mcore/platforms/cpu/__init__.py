"""Platform `cpu`: verl's Megatron engine over gloo and the real SGLang, without an accelerator."""
