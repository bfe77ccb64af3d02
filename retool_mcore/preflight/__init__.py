"""`retool preflight`: what can fail is made to fail here, before a device-hour is spent."""
