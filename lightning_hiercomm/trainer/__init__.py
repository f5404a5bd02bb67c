"""Lightning's face: strategies, the hooks that a Trainer calls, the callback that shows what was sent."""
