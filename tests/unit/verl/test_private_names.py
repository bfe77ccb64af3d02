"""Each private name of other libraries that our code uses is unchanged."""

import pytest

from retool_mcore.platforms import get_platform
from retool_mcore.platforms.patches import Seam
from retool_mcore.verl.private_names import SEAMS

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


@pytest.mark.parametrize(
    "seam", [*SEAMS, *get_platform("cpu").seams(), *get_platform("cuda").seams()], ids=lambda seam: seam.title
)
def test_each_private_name_exists_with_its_recorded_parameters(seam: Seam):
    seam.check_version()
    seam.check_signature()
