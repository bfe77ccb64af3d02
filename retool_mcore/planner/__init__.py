"""`retool plan`: memory and time of a run from a roofline, before a device is asked for."""
