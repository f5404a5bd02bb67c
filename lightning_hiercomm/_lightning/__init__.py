"""Every use of private or fragile parts of Lightning: one function each, with its reason and its test."""


def require_attribute(owner: object, name: str) -> None:
    """Raise an error if Lightning or torch lacks a private attribute that this package uses."""
    if not hasattr(owner, name):
        raise RuntimeError(
            f"this version of Lightning or torch has no {type(owner).__name__}.{name}, which this version of"
            " lightning-hiercomm relies on: upgrade it, or go back to an earlier Lightning, and report this."
        )
