"""Models that SGLang lacks. SGLang imports every module of this package when it loads a model.

sglang_plugin.py names the package in SGLANG_EXTERNAL_MODEL_PACKAGE.
"""
