from torch import Tensor

from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.schemes.components.merges import Merge
from lightning_hiercomm.schemes.reducers.pending import PendingBucket


class Elastic(Merge):
    """Pull the node's values toward a center, and the center, by ``beta``, toward the nodes' mean."""

    keeps_reference = True
    makes_equal = False

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta

    def update_reference(self, index: int, reference: Tensor, difference: Tensor) -> Tensor:
        before = reference.clone()
        reference.add_(difference, alpha=self.beta)
        return before  # every rank merges the center as it was

    def at_once(self, bucket: Bucket, mean: Tensor, nodes: int) -> None:
        bucket.mix(mean, self.beta / nodes)

    def __call__(self, bucket: Bucket, received: PendingBucket, staleness: int, nodes: int) -> None:
        self.at_once(bucket, received.flat, nodes)
