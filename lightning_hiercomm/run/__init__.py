"""One fit, without a Trainer: what runs the schemes, and what of a module agrees."""
