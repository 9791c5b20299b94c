"""Numbers as one says them."""

import math


def duration(seconds: float | int) -> str:
    """As one says it: less than a minute, 12 minutes, 3.5 hours, 12 days."""
    if seconds < 60:
        return "less than a minute"
    units = (("minute", 60, 60), ("hour", 3600, 48), ("day", 86400, math.inf))
    unit, size = next((unit, size) for unit, size, until in units if round(seconds / size) < until)
    number = f"{seconds / size:.2g}" if seconds < 10 * size else f"{seconds / size:,.0f}"
    return f"{number} {unit}{'s' * (number != '1')}"


def amount(n: int | float) -> str:
    """Of bytes: 1.5 GiB, 20 KiB, 5 B."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            break
        n /= 1024
    return f"{n:,.0f} B" if unit == "B" else f"{n:,.4g} {unit}"
