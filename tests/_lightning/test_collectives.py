"""torch counts what a program sends, and shows who does; a change of it upstream is to be seen here."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.nn.functional import all_gather as all_gather_with_gradients
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from lightning_hiercomm._lightning.collectives import (
    CollectiveCounter,
    CollectiveWatch,
    counting_backends,
    process_groups,
)
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import connect_torch

ONE = torch.ones(1)
COLLECTIVES = {
    "all_reduce": lambda group: dist.all_reduce(ONE.clone(), group=group),
    "broadcast": lambda group: dist.broadcast(ONE.clone(), 0, group=group),
    "all_gather": lambda group: dist.all_gather([ONE.clone()], ONE, group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(ONE.clone(), ONE, group=group),
    "all_gather_object": lambda group: dist.all_gather_object([None], 1, group=group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(ONE.clone(), ONE, group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(ONE.clone(), ONE, group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "all_gather with gradients": lambda group: all_gather_with_gradients(ONE.clone(), group or dist.group.WORLD),
    "a functional all_reduce": lambda group: functional.all_reduce(ONE.clone(), "sum", group or dist.group.WORLD) + 0,
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("own_group", [False, True])
def test_every_collective_on_a_group_with_other_ranks_counts(process_group, name, own_group):
    counter, group = CollectiveCounter([]), dist.new_group([0]) if own_group else None
    before = counter.count()
    COLLECTIVES[name](group)
    assert counter.count() > before
    harmless = CollectiveCounter([0])
    before = harmless.count()
    COLLECTIVES[name](group)
    assert harmless.count() == before


def test_collectives_of_communicators_do_not_count(process_group):
    counter = CollectiveCounter([])
    before = counter.count()
    communicator = connect_torch(Meter())([[0]], "intra")
    communicator.all_reduce(ONE.clone()).wait()
    dist.all_reduce(ONE.clone(), group=communicator.group)
    assert counter.count() == before
    communicator.close()


def test_excused_collectives_do_not_count_but_those_around_them_do(process_group):
    counter = CollectiveCounter([])
    before = counter.count()
    dist.barrier()
    with counter.excused():
        dist.barrier()
        inside = counter.count()
        with counter.excused():
            dist.barrier()
        assert counter.count() == inside
        dist.barrier()
        assert counter.count() > inside
    dist.barrier()
    assert counter.count() - before == 2


def test_a_closed_counter_lets_go_of_process_groups(process_group):
    counter, group = CollectiveCounter([]), dist.new_group([0])
    dist.all_reduce(ONE.clone(), group=group)
    assert counter.count() == 1
    gone = weakref.ref(group)
    counter.close()
    assert counter.count() == 0
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert gone() is None


def test_nothing_counts_before_there_are_process_groups():
    assert CollectiveCounter([]).count() == 0


def test_a_backend_without_sequence_numbers_counts_nothing(process_group):
    class Backend:
        def _get_sequence_number_for_group(self):
            raise RuntimeError("does not yet support sequence numbers")

    class Group:
        _device_types = ("cpu", "cuda")

        def _get_backend(self, device):
            return Backend()

    assert counting_backends(Group()) == []
    (world,) = process_groups()
    assert len(counting_backends(world)) == 1


def watched(steps, counter):
    """Lines that are found in passes that each do one of the steps."""
    found = []
    watch = CollectiveWatch(counter, lambda *what: found.append(what))
    for step in steps:
        watch.begin()
        step()
        watch.end()
    return found


def speak(name="all_reduce"):
    COLLECTIVES[name](None)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_line_that_starts_a_collective_is_found(process_group, name):
    found = watched([lambda: speak(name)] * 9, CollectiveCounter([]))
    if name == "barrier":
        assert found == []
    else:
        assert [(line.startswith(f"{__file__}:"), optimizer) for line, optimizer in found] == [(True, "")]


@pytest.mark.parametrize("period", [1, 7, 70])
def test_a_collective_in_some_passes_is_found(process_group, period):
    steps = [speak if place % period == 0 else lambda: None for place in range(4 * period)]
    assert len(watched(steps, CollectiveCounter([]))) == 1


def test_excused_collectives_are_not_found(process_group):
    counter = CollectiveCounter([])

    def excused():
        with counter.excused():
            speak()

    assert watched([excused] * 9, counter) == []
    with counter.excused():
        assert len(watched([speak] * 9, counter)) == 1
        assert counter.is_excusing


class Speaking(torch.optim.SGD):
    def look(self):
        speak()


def test_the_optimizer_that_communicates_is_named(process_group):
    from lightning.pytorch.core.optimizer import LightningOptimizer

    optimizer = Speaking([torch.ones(1, requires_grad=True)], lr=0.1)
    for each in (optimizer, LightningOptimizer(optimizer)):
        ((_, name),) = watched([each.look] * 5, CollectiveCounter([]))
        assert name == "Speaking"


def test_collectives_of_other_threads_are_not_found(process_group):
    def elsewhere():
        thread = threading.Thread(target=speak)
        thread.start()
        torch.ones(1) + 1
        thread.join()

    assert watched([elsewhere] * 20, CollectiveCounter([])) == []


def test_modes_of_the_program_stay_as_they_are(process_group):
    counter, flops = CollectiveCounter([]), FlopCounterMode(display=False)
    watch = CollectiveWatch(counter, lambda *what: None)

    def multiply():
        torch.ones(2, 2) @ torch.ones(2, 2)

    watch.begin()
    speak("barrier")
    watch.end()  # the next one is traced
    with flops:  # but not inside another mode
        watch.begin()
        multiply()
        watch.end()
    assert flops.get_total_flops() == 16
    watch.begin()
    with flops:
        watch.end()  # inside of one that began later, so it stays
        multiply()
    assert flops.get_total_flops() == 16
    assert _get_current_dispatch_mode() is not None
    watch.end()
    assert _get_current_dispatch_mode() is None
