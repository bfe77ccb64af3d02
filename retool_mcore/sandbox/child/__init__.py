"""Code that runs inside the confined process: the cell runner and its helpers."""
