"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_FORM = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(iB|B|)")


def parse_bytes(text: str) -> int:
    """
    Return the bytes that a text names: `80GiB` has 2 ** 30 bytes a unit, `80GB` and `80G` 10 ** 9.

    Raises:
        ValueError: It is no positive amount of whole bytes.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 GB"), parse_bytes("24G")
    (85899345920, 1500000000, 24000000000)
    """
    found = _FORM.fullmatch(text)
    amount = Decimal(0)
    if found is not None and (found[2] or found[3] == "B"):
        amount = Decimal(found[1]) * (1024 if found[3] == "iB" else 1000) ** _PREFIXES[found[2]]
    if amount < 1 or amount != int(amount):
        raise ValueError(f"{text!r} is no amount of memory: write 80GiB, 80GB or 24G")
    return int(amount)


def written_bytes(number: float) -> str:
    """
    Return an amount of bytes for people to read, in powers of 1,024.

    >>> written_bytes(85899345920), written_bytes(1500)
    ('80.00 GiB', '1.46 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:,.2f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"
