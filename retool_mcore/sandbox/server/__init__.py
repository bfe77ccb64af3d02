"""Sandbox server: SandboxFusion's HTTP protocol on top of the local sandbox."""
