"""The lighthouse of a network namespace: `python elastic_lighthouse.py lighthouse ...`."""

import os
import runpy

from elastic_node import go_to_namespace

if __name__ == "__main__":
    if os.environ.get("NAMESPACE"):
        go_to_namespace(os.environ["NAMESPACE"])
    runpy.run_module("lightning_hiercomm", run_name="__main__", alter_sys=True)
