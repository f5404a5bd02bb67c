"""Strategies for Trainer and Fabric, the hooks that Lightning calls, and the callback that logs traffic."""
