"""Where a setting comes from: a flag, else HEADRACE_*, else --config FILE, else the default.

Every long flag of a command can be said in all three ways by the same name:

    --max-context 4096     HEADRACE_MAX_CONTEXT=4096     max-context = 4096   (TOML, also with _)

A value passes through the flag's own type wherever it is written, and a complaint names the place.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "HEADRACE_"
_YES, _NO = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def add_config(parser: argparse.ArgumentParser) -> None:
    """--config; call `fill_in` after parsing."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help='TOML file with any of these flags as keys, e.g. slots = "25%%"; a flag wins over '
        "HEADRACE_* in the environment, that over the file",
    )


def fill_in(
    parser: argparse.ArgumentParser, options: argparse.Namespace, environ: Mapping[str, str]
) -> dict[str, str]:
    """Fill in what no flag has said (flags must have None as default). Returns where each setting
    that was said anywhere comes from: name -> "flag", a variable's name or the file's.

    Raises:
        UserError: a value that does not serve, a key that no flag has, or a file that is no TOML.
    """
    actions = {
        action.option_strings[-1].lstrip("-"): action
        for action in parser._actions
        if action.option_strings
        and action.dest not in ("help", "config")
        and action.help != argparse.SUPPRESS
    }
    path = options.config
    if path is None and environ.get(f"{PREFIX}CONFIG"):
        path = Path(environ[f"{PREFIX}CONFIG"])
    written = {} if path is None else _read(path, actions)
    sources: dict[str, str] = {}
    for name, action in actions.items():
        variable = PREFIX + name.upper().replace("-", "_")
        if getattr(options, action.dest) is not None:
            sources[name] = "flag"
        elif environ.get(variable):
            setattr(options, action.dest, _value(parser, action, environ[variable], variable))
            sources[name] = variable
        elif name in written:
            place = f"{name} in {path}"
            setattr(options, action.dest, _value(parser, action, written[name], place))
            sources[name] = str(path)
    return sources


def _read(path: Path, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """The file's keys, spelled as flags are."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The configuration {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"The configuration {path} is not valid TOML: {error}.") from None
    except (ValueError, RecursionError):  # Python reads no number of thousands of digits
        raise UserError(
            f"The configuration {path} is nested too deeply, or a number in it is too long."
        ) from None
    written = {key.replace("_", "-"): value for key, value in table.items()}
    for key in written:
        if key not in actions:
            near = difflib.get_close_matches(key, actions, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"The configuration {path} has {key!r}, which is no setting{hint}")
    return written


def _value(
    parser: argparse.ArgumentParser, action: argparse.Action, value: object, place: str
) -> Any:
    """A value as the flag would have it."""
    if action.nargs == 0:  # a switch
        text = str(value).lower()
        if text in _YES:
            return action.const
        if text in _NO:
            return None
        raise UserError(f"{place}: {value!r} is neither true nor false.")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = ",".join(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{place}: {value!r} does not serve; say a text or a number.")
    try:
        read = parser._get_value(action, str(value))
        parser._check_value(action, read)
    except argparse.ArgumentError as error:
        raise UserError(f"{place}: {error.message}.") from None
    return read
