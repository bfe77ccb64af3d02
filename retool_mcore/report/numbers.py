"""Formats numbers and durations for readers."""


def number(value: float) -> str:
    """Format with at most four significant digits, or from 1000 on as an integer with commas.

    Below 1e-3 and from 1e7 on, use scientific notation.
    """
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e7):
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def share(value: float) -> str:
    return f"{value:.3f}"


def signed(value: float) -> str:
    return f"{value:+.3f}"


def duration(seconds: float) -> str:
    """Format with at most two units: 45 s, 12 min 30 s, 3 h 5 min, 2 d 4 h."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    for large, name, small, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= large:
            whole, left = divmod(seconds, large)
            return f"{whole} {name} {left // small} {rest}"
    raise AssertionError("a duration of a minute or more has a largest unit")
