"""`retool preflight`: makes what can fail, fail here, before a device-hour is spent."""
