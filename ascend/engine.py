"""Applies the check of a checkpoint's tensors in every training process of a run.

verl imports this module in these processes (``model.external_lib``).
"""

from retool_mcore.platforms.patches_bridge import MODEL_PATCH

MODEL_PATCH.apply()
