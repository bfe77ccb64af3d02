"""The platform for Ascend NPUs: its class, its table of refused settings, and launch scripts.

The package retool_mcore imports this one only by name, when run.platform is "ascend".
"""
