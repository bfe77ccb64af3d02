"""Runs verl: maps our settings to its keys, and extends its trainer, workers and agent loop."""
