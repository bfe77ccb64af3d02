"""Drives verl: its keys from our settings; its trainer, workers and agent loop with our steps."""
