"""Console for what commands print for people."""

from rich.console import Console


def plain_console(width: int | None = None) -> Console:
    """
    Return a console that prints text as it is, and lines as long as they are.

    *width* is that of tables where standard output is no terminal.
    """
    return Console(width=None if Console().is_terminal else width, highlight=False, markup=False, soft_wrap=True)
