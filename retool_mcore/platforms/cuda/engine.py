"""Applies the patches and registers bridges in every training process of a run.

verl imports this module in these processes (``model.external_lib``).
"""

from retool_mcore.platforms.cuda.platform import Cuda
from retool_mcore.platforms.patches import apply_all

apply_all(Cuda().training_patches())

from mbridge.core import register_model  # noqa: E402
from mbridge.models.llama import LLaMABridge  # noqa: E402

register_model("mistral")(LLaMABridge)  # same layers as Llama, for sequences within model/families.py's window
