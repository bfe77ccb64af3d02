"""Applies the patches in every training process of a run.

verl imports this module in these processes (``model.external_lib``).
"""

from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.platforms.patches import apply_all

apply_all(Cuda().training_patches())
