"""The words of an agreement: when, and merged how."""
