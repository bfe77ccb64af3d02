"""`retool plan`: estimate memory and time of a run from a roofline, without a device."""
