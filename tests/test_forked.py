"""Programs of tests begin as forks of a server that has imported what they need."""

import os

from forked import ForkedPython

LOOKS = """
import gc, os, sys
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
waits = not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) == os.SCHED_BATCH
print(dynamic_rendezvous.get_method_name(), gc.get_freeze_count() > 100_000, "ports" in sys.modules, waits)
"""


def test_a_forked_program_has_all_that_is_preloaded(tmp_path):
    program = ForkedPython(["-c", LOOKS], os.environ, tmp_path / "said")
    output, _ = program.communicate(timeout=60)
    assert output.splitlines() == ["unknown True True True"]
