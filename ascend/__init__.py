"""Ascend NPUs: the platform's class, what it maps and refuses, its launch scripts. Imported by name
only.
"""
