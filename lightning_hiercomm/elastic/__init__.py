"""Elastic runs: nodes leave and join while the others continue training.

The states of a node; each arrow names the event that moves it on::

        start
          |
          v           admitted               state restored
    +-----------+ ---------------> +------------+ --------> +------------+
    |  JOINING  |                  | RECOVERING |           |  TRAINING  | <--------------------+
    +-----------+ <--------------- +------------+           +------------+                      |
       |  ^   |    no state arrives                           |  ^      |  period is over        | all have
       |  |   | the fit begins: all exchange initial values   |  |      v                        | succeeded:
       |  |   +-----------------------------------------------|--+   +-----------------+         | commit
       |  |                                                   |      |  SYNCHRONIZING  | --------+
       |  | restarted by its supervisor                       |      +-----------------+
       |  |                                                   |        |  ^        |  | one has failed:
       |  +-------- exit code 75 <------ LOST <---------------+--------+  +--------+  | roll back, ask again
       |                                                      |                    +--+
       | refused, or the run has finished                     | last step
       v                                                      v
    exit code 1 or 69                                     FINISHED (exit code 0)

SYNCHRONIZING has three steps: *quorum* (the lighthouse sends every node the requests of all, and each computes the same
members from them), *exchange* (the scheme's collectives), and *vote* (in the store of the first member).

=====================  =================================================  =====================================
what                   where                                              class
=====================  =================================================  =====================================
who is alive, asks     :mod:`~lightning_hiercomm.elastic.lighthouse`      ``TorchftLighthouse``
who takes part         :mod:`~lightning_hiercomm.elastic.quorum`          ``compute_quorum``
asks, ends if stale    :mod:`~lightning_hiercomm.elastic.rendezvous`      ``Rendezvous``
connections            :mod:`~lightning_hiercomm.elastic.topology`        ``ElasticTopology``
all or none            :mod:`~lightning_hiercomm.elastic.transaction`     ``Transaction``, ``Vote``
recovery               :mod:`~lightning_hiercomm.elastic.healing`         ``Healing``
=====================  =================================================  =====================================
"""

from lightning_hiercomm.elastic.configuration import Elastic

__all__ = ["Elastic"]
