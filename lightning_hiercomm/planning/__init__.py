"""What a cluster will gain from which scheme: a cost model, a probe of the cluster, and a recommendation."""
