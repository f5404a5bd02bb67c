"""A control plane beside the collectives: who is there, who failed, who should stop."""
