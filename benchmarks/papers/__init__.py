"""The five papers' claims, played on one machine: one module per method, a table and a picture each."""
