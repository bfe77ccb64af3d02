"""Ascend NPUs: the platform's class, what it maps and refuses, its launch scripts.

Other code imports this package by name only.
"""
