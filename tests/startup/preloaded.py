"""What multiprocessing's fork server imports for the programs of forked.py."""

import gc
import importlib
import sys

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
gc.freeze()  # so that no fork has to copy it
