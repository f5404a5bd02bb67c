"""Findings of ``doctor`` and their remedies."""

from __future__ import annotations

import resource
import socket

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.measure import doctor
from lightning_hiercomm.planning.measure.doctor import Finding
from lightning_hiercomm.planning.measure.ranks import Machine, processors_per_node

GOOD = {
    "torch": "2.15.0",
    "lightning": "2.6.6",
    "torchmetrics": "1.0",
    "lightning-hiercomm": "0.1.0",
    "mpi4py": "4.1.2",
}


def levels(findings):
    return [finding.level for finding in findings]


def test_good_versions_are_one_line_each():
    found = list(doctor.versions(GOOD.get))
    assert levels(found) == ["ok", "ok"]
    assert "lightning 2.6.6, torch 2.15.0, torchmetrics 1.0, lightning-hiercomm 0.1.0" in found[0].text


@pytest.mark.parametrize(
    ("changed", "level", "remedy"),
    [
        ({"lightning": "2.6.3"}, "FAIL", "!=2.6.3"),
        ({"lightning": "2.5.0"}, "FAIL", ">=2.6.1"),
        ({"lightning": None}, "FAIL", "pip install 'lightning"),
        ({"torch": "2.3.1"}, "FAIL", "pip install 'torch>=2.4'"),
        ({"pytorch-lightning": "2.6.6"}, "note", "HIERCOMM_LIGHTNING=pytorch_lightning"),
        ({"mpi4py": None}, "note", "lightning-hiercomm[mpi]"),
    ],
)
def test_other_versions_come_with_a_remedy(changed, level, remedy):
    found = list(doctor.versions({**GOOD, **changed}.get))
    assert any(finding.level == level and remedy in finding.remedy for finding in found)


INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "eth1": None, "ib0": "10.1.0.5"}


@pytest.mark.parametrize(
    ("variable", "value", "level", "text"),
    [
        ("GLOO_SOCKET_IFNAME", None, "ok", "is not set, gloo uses"),
        ("GLOO_SOCKET_IFNAME", "eth0", "ok", "chooses eth0"),
        ("GLOO_SOCKET_IFNAME", "eth", "FAIL", "this machine has lo 127.0.0.1, eth0 10.0.0.5"),
        ("GLOO_SOCKET_IFNAME", "eth1", "FAIL", "chooses eth1, which has no address"),
        ("NCCL_SOCKET_IFNAME", "ib", "ok", "chooses ib0"),
        ("NCCL_SOCKET_IFNAME", "=ib", "FAIL", "this machine has"),
        ("NCCL_SOCKET_IFNAME", "^eth", "ok", "chooses ib0"),
        ("NCCL_SOCKET_IFNAME", "wlan,eth", "ok", "chooses eth0"),
    ],
)
def test_the_interface_of_the_backend_is_reported(variable, value, level, text):
    found = doctor.interface(variable, {} if value is None else {variable: value}, INTERFACES)
    assert found.level == level
    assert text in found.text


def test_this_machines_interfaces_are_found():
    assert "lo" in doctor.interfaces()


def test_an_unresolved_master_address_fails():
    found = list(doctor.addresses({"MASTER_ADDR": "no-such-host.invalid"}, 4))
    assert found[0].level == "FAIL"
    assert "no-such-host.invalid does not resolve" in found[0].text
    assert levels(doctor.addresses({"MASTER_ADDR": "127.0.0.1"}, 4))[0] == "ok"


@pytest.mark.parametrize(
    ("own", "environment", "level"),
    [
        (None, {}, "FAIL"),
        (None, {"GLOO_SOCKET_IFNAME": "eth0"}, "note"),
        ("127.0.1.1", {}, "note"),
        ("10.0.0.5", {}, "ok"),
    ],
)
def test_an_unreachable_host_name_is_noted(monkeypatch, own, environment, level):
    monkeypatch.setattr(doctor, "_resolved", lambda name: own)
    assert levels(doctor.addresses(environment, 4)) == [level]


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "level", "remedy"),
    [
        (1024, 1024, 4, "ok", ""),
        (1024, 65536, 512, "ok", ""),
        (1024, 1024, 896, "ok", ""),
        (1024, 1024, 1000, "FAIL", "ulimit -Hn 1128"),
        (128, 200, 64, "FAIL", "ulimit -Hn 256"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, "ok", ""),
    ],
)
def test_open_files_must_be_enough_for_all_peers(soft, hard, ranks, level, remedy):
    found = doctor.open_files(soft, hard, ranks)
    assert found.level == level
    assert remedy in found.remedy


def machine(boot: str, processors: float = 4.0) -> Machine:
    return Machine(f"host-{boot}", boot, processors)


def test_unusual_layouts_are_reported():
    a, b = machine("a"), machine("b")
    assert levels(doctor.layout([[0, 1], [2, 3]], [a, a, b, b])) == ["ok"]
    assert "several nodes are one machine" in list(doctor.layout([[0, 1], [2, 3]], [a] * 4))[1].text
    assert "unequal" in list(doctor.layout([[0, 1], [2]], [a, a, b]))[1].text
    assert "trains as DDP does" in list(doctor.layout([[0, 1]], [a, a]))[1].text
    torn = list(doctor.layout([[0, 1], [2, 3]], [a, b, b, b]))
    assert torn[1].level == "FAIL"


def test_more_threads_than_cores_are_noted():
    assert doctor.threads([machine("a")] * 4, [1] * 4).level == "ok"
    assert doctor.threads([machine("a", 8)] * 4, [4] * 4).remedy == "set OMP_NUM_THREADS=2"
    assert "start fewer ranks" in doctor.threads([machine("a", 2)] * 4, [1] * 4).remedy


def in_threads(work, size=3):
    def body(rank, world):
        return work(Topology([[r] for r in range(size)], rank, world.connect(rank), Meter()))

    return ThreadWorld(size).run(body)


def test_a_reachable_port_is_ok():
    found = in_threads(lambda topology: list(doctor.control_port(topology, "127.0.0.1")))
    assert [levels(each) for each in found] == [["ok", "ok"]] * 3
    assert "the longest round trip to the first node takes 0." in found[1][1].text


def test_ranks_that_cannot_reach_the_port_are_named(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for (found,) in in_threads(lambda topology: list(doctor.control_port(topology, "127.0.0.1"))):
        assert found.level == "FAIL"
        assert "ranks 1-2 cannot reach 127.0.0.1" in found.text


def test_a_far_node_is_noted_with_the_rate_of_one_stream():
    assert doctor.distance(0.001, 2**22).level == "ok"
    assert doctor.distance(0.08, None).level == "ok"
    far = doctor.distance(0.08, 4_000_000)
    assert far.level == "note"
    assert far.text.endswith("takes 80 ms, so one TCP stream carries at most 0.4 Gbit/s")


def test_equal_findings_of_several_ranks_are_one_line():
    def work(topology):
        return doctor.gathered(
            topology.world, [Finding("ok", "same"), Finding("note", f"odd {topology.rank // 2}", "fix")]
        )

    shown = [str(finding) for finding in in_threads(work)[0]]
    assert shown == ["ok    same", "note  ranks 0-1: odd 0: fix", "note  rank 2: odd 1: fix"]


def test_processors_of_a_machine_are_shared_by_its_ranks():
    machines = [machine("a", 4), machine("a", 4), machine("b", 8)]
    found = in_threads(lambda topology: processors_per_node(topology, machines[topology.rank]))
    assert found[0] == [2, 2, 8]


def test_one_process_examines_itself(capsys, monkeypatch):
    assert doctor.examine() == 0
    shown = capsys.readouterr().out
    assert "python 3" in shown
    assert "start this with torchrun" in shown
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.examine() == 1
    assert "FAIL  GLOO_SOCKET_IFNAME=nonesuch0" in capsys.readouterr().out


def test_doctor_names_gpus_with_backend_and_interface(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no-such-interface")
    said = [finding.text for finding in doctor.local_findings(1)]
    assert "4 GPUs (A GPU), backend nccl" in said
    shared = [finding.text for finding in doctor.local_findings(8, local_rank=4) if finding.level == "FAIL"]
    assert "4 GPUs (A GPU), but more ranks: nccl refuses two ranks on a GPU" in shared
    assert any("NCCL_SOCKET_IFNAME" in text for text in said)
