"""Values from the environment: paths may name variables, secrets are only ever named, never stored."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_VARIABLE = re.compile(r"(?i)(key|token(?!iz)|secret|passw|credential)")
_SECRET_KEY = re.compile(r"(?i)(api_?key|secret|passw(or)?d|credentials?|(access|auth|hf|bearer)_token)$")
_URL_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:)(?P<password>[^\s@]+)(?=@)")
_SHORTEST_SECRET = 6
_MASK = "***"


def expand(text: str) -> str:
    """`${NAME}` replaced from the environment, `~` at the start by the home folder.

    Raises ValueError when a variable is unset, or when NAME sounds secret.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if _SECRET_VARIABLE.search(name):
            raise ValueError(f"${{{name}}} sounds like a secret, and this value is stored in the run folder")
        return _from_environment(name)

    return os.path.expanduser(_VARIABLE.sub(value, text))


def resolve_secrets(text: str) -> str:
    """`${NAME}` replaced from the environment, secrets too: to be called at use, its result never stored.

    Raises ValueError when a variable is unset.
    """
    return _VARIABLE.sub(lambda match: _from_environment(match[1]), text)


def _from_environment(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(f"the environment has no variable {name}; set it: export {name}=...")
    return value


def refuse_password(url: str) -> str:
    """`url`, if it holds no password. Raises ValueError that does not repeat the password."""
    match = _URL_PASSWORD.search(url)
    if match and not _VARIABLE.fullmatch(match["password"]):
        raise ValueError("holds a password; write ${NAME} in its place and set the variable NAME")
    return url


def refuse_stored_secrets(data: dict[str, Any]) -> dict[str, Any]:
    """`data`, if no key of it (at any depth) is called like a secret and holds one. Raises ValueError."""
    _refuse_secrets_in(data)
    return data


def _refuse_secrets_in(value: Any) -> None:
    for key, item in value.items() if isinstance(value, dict) else ():
        secret = isinstance(item, str | int) and not isinstance(item, bool) and item
        if secret and _SECRET_KEY.search(str(key)):
            raise ValueError(
                f"{key!r} looks like a secret, and recipes are stored; give the name of an environment "
                f"variable instead, e.g. {key}_env: {str(key).upper()}"
            )
        _refuse_secrets_in(item)
    for item in value if isinstance(value, list) else ():
        _refuse_secrets_in(item)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without passwords in addresses and without the values of secret-sounding variables."""
    environment = os.environ if environment is None else environment
    text = _URL_PASSWORD.sub(lambda match: match["head"] + _MASK, text)
    secrets = [v for k, v in environment.items() if _SECRET_VARIABLE.search(k) and len(v) >= _SHORTEST_SECRET]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text
