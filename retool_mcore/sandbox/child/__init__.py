"""What runs inside a confined process, after the fork: the notebook cell and what it needs."""
