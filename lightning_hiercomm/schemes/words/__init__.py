"""The words of an agreement: when, merged how, through which graph."""
