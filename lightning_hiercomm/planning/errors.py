"""What goes wrong because of what was asked for."""


class PlanningError(ValueError):
    """Something that a person can put right; its message is one line that says how."""
