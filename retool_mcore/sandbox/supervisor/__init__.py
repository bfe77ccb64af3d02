"""The trusted part of the sandbox: starts, confines, feeds and ends executions."""
