"""What this cluster and this program do: probes, timed steps, the doctor."""
