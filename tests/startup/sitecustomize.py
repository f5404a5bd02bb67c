"""Python runs this first in every program that the tests start, which finds it on their PYTHONPATH.

Lightning brings very many objects that live until the end. To look for garbage among them takes 2.2 of the 5.6 seconds
in which a process imports Lightning and ends, and many tests start four.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 50)
# the last collections, too, find nothing; nanobind, in triton, then prints what it calls leaks
atexit.register(gc.freeze)
