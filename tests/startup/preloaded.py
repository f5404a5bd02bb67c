"""What multiprocessing's fork server imports for the programs of forked.py."""

import gc
import importlib
import sys
import time
from pathlib import Path

gc.disable()  # what is imported stays, and looking for what does not takes a sixth of the time
sys.path[:] = filter(None, sys.path)  # the package in the folder where tests run is not the one they test
for name in (
    "lightning_hiercomm",
    "lightning.pytorch.cli",
    "matplotlib.pyplot",
    "pytest",
    "pytorch_optimizer",
    "sklearn.datasets",
    "torch.distributed.launcher",
    "torch.utils.tensorboard",
    "torchmetrics.classification",
):
    importlib.import_module(name)
# its own may be a connection's before it is used
lightning_environment = importlib.import_module("lightning.fabric.plugins.environments.lightning")
sys.path.append(str(Path(__file__).parents[1] / "support"))  # Python gives the server only what is on PYTHONPATH
lightning_environment.find_free_network_port = importlib.import_module("ports").free_port  # type: ignore[attr-defined]
sys.path.pop()
# torchrun's agents look for the name of each caller, for a record that no test reads, among all of these modules
rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
rendezvous.get_method_name = lambda depth=2: "unknown"  # type: ignore[attr-defined]
# and only once a second whether all have come
rendezvous._delay = lambda seconds: time.sleep(0.05)  # type: ignore[attr-defined]
importlib.import_module("economy").wait_for_turns()
gc.freeze()  # so that no fork has to copy it
gc.enable()
