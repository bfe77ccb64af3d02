"""SandboxFusion's HTTP protocol: the sandbox as a service of a node."""
