"""What only those can say, and find, who know a run's token."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

_SEAL = "seal"


class Seal:
    """Signs with a token that all nodes of a run share: HMAC-SHA256. Without one it does nothing.

    It proves that somebody who knows the token has said something once, not when: who listens may say it again.

    Args:
        token: As the nodes were given it; empty if they were not.
    """

    def __init__(self, token: str = "") -> None:
        self._key = token.encode()

    def of(self, data: bytes) -> str:
        """The signature, in letters and digits; empty without a token."""
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()[:32] if self._key else ""

    def name(self, name: str) -> str:
        """Where those who know the token keep what others call by this name."""
        return self.of(name.encode()) or name

    def signed(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """The same, with a signature."""
        return {**said, _SEAL: self.of(_written(said))} if self._key else dict(said)

    def holds(self, said: Mapping[str, Any]) -> bool:
        """Whether somebody has said this who knows the same token, or as little as this node does."""
        given = str(said.get(_SEAL, "")).encode(errors="backslashreplace")  # strangers may say what is no text
        plain = {name: value for name, value in said.items() if name != _SEAL}
        return hmac.compare_digest(given, self.of(_written(plain)).encode())


def _written(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, sort_keys=True).encode()
