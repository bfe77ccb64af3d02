"""`retool plan`: estimates a run's memory and step time with a roofline model, without a device."""
