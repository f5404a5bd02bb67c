"""One question each, asked once: what the package rests on and no user needs to measure again."""
