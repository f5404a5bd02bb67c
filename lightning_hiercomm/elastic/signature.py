"""Signs messages between nodes with the run's token (HMAC)."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

_SIGNATURE = "signature"


class Signer:
    """Signs and verifies messages by HMAC-SHA256; with an empty token it does nothing. It does not prevent replays."""

    def __init__(self, token: str = "") -> None:
        self._secret = token.encode()

    def sign(self, data: bytes) -> str:
        """Return the signature in letters and digits; empty without a token."""
        return hmac.new(self._secret, data, hashlib.sha256).hexdigest()[:32] if self._secret else ""

    def key(self, name: str) -> str:
        """Return the store's key for ``name``, which cannot be computed without the token."""
        return self.sign(name.encode()) or name

    def signed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with its signature."""
        return {**message, _SIGNATURE: self.sign(_encoded(message))} if self._secret else dict(message)

    def verifies(self, message: Mapping[str, Any]) -> bool:
        """Return whether the message has this token's signature; without a token, whether it is unsigned."""
        given = str(message.get(_SIGNATURE, "")).encode(errors="backslashreplace")  # other programs may send any object
        plain = {name: value for name, value in message.items() if name != _SIGNATURE}
        return hmac.compare_digest(given, self.sign(_encoded(plain)).encode())


def _encoded(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, sort_keys=True).encode()
