"""A control plane in parallel with the collectives: membership, failures, hangs and common stops."""
