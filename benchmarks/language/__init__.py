"""Train byte language models with every scheme, all nodes in one process."""
