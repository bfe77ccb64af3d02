"""Checks a run's settings, inputs and machines before it uses a device: `retool preflight`."""
