"""Amounts of money as text for people."""


def euros(cents: int) -> str:
    """Format an amount of cents as euros: 2490 is "24.90 EUR"."""
    return f"{cents / 100:.2f} EUR"
