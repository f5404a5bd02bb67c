"""SSD-SGD: a sharded parameter server that is pulled every few steps, with local updates in between.

``scheme`` has an iteration of the algorithm, ``server`` push, step and pull, and ``rules`` the local updates.
"""
