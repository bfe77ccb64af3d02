"""Imported by verl in every training process of a run (``model.external_lib``), Ray's too: the
patches are applied.
"""

from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.platforms.patches import apply_all

apply_all(Cuda().training_patches())
