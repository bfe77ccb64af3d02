"""A pair that takes seconds of CPU time to compare."""

_SLOW = [rf"{n}x!+" + "+".join(rf"\sin({k}x)" for k in range(9)) for n in range(10, 29)]
SLOW = (r"\{" + ",".join(_SLOW) + r"\}", r"\{" + ",".join(each + "+0" for each in reversed(_SLOW)) + r"\}")
