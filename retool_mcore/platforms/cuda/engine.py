"""Applies the patches in every training process of a run, including Ray's.

verl imports this module there (``model.external_lib``).
"""

from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.platforms.patches import apply_all

apply_all(Cuda().training_patches())
