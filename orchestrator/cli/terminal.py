"""Where tables go: as wide as the terminal, or wide enough for a file."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from protocol.errors import visible

if TYPE_CHECKING:
    from rich.text import Text

#: Tables in a file or a pipe are not wrapped to an imagined terminal.
_FILE_WIDTH = 160


class _PlainConsole(Console):
    """Strings steer nothing: whatever they hold, the terminal shows it."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(visible(text), **how)


def console_for(stream: IO[str]) -> Console:
    """A console on `stdout` or `stderr`, without automatic colours for numbers.

    What is printed is text as it stands: names of models, machines and files come from others and
    may hold [brackets] or :colons:. Colours are said by `style` or by a `rich.text.Text`.
    """
    return _PlainConsole(
        file=stream,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if stream.isatty() else _FILE_WIDTH,
    )
