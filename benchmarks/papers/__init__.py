"""The five papers' claims, simulated on one machine: one module per method, a table and a picture each."""
