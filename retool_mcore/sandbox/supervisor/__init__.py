"""What starts, confines, feeds and ends executions."""
