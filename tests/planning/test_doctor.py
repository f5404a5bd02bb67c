"""Findings of ``doctor`` and their remedies."""

from __future__ import annotations

import pytest
import torch

from lightning_hiercomm.planning import doctor
from lightning_hiercomm.planning.doctor import Finding

GOOD = {"numpy": "2.0.0", "torch": "2.15.0", "lightning": "2.6.6", "torchmetrics": "1.0", "lightning-hiercomm": "0.1.0"}


def levels(findings):
    return [finding.level for finding in findings]


def test_good_versions_are_one_line():
    found = doctor.versions(GOOD.get)
    assert found.level == "ok"
    assert "lightning 2.6.6, numpy 2.0.0, torch 2.15.0, torchmetrics 1.0, lightning-hiercomm 0.1.0" in found.text


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"lightning": "2.6.3"}, "!=2.6.3"),
        ({"lightning": "2.5.0"}, ">=2.6.1"),
        ({"lightning": None}, "pip install 'lightning"),
        ({"torch": "2.3.1"}, "pip install 'torch>=2.4'"),
    ],
)
def test_other_versions_come_with_a_remedy(changed, remedy):
    found = doctor.versions({**GOOD, **changed}.get)
    assert found.level == "FAIL"
    assert remedy in found.remedy


INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "eth1": None, "ib0": "10.1.0.5"}


@pytest.mark.parametrize(
    ("variable", "value", "level", "text"),
    [
        ("GLOO_SOCKET_IFNAME", None, "ok", "is not set"),
        ("GLOO_SOCKET_IFNAME", "eth0", "ok", "GLOO_SOCKET_IFNAME=eth0"),
        ("GLOO_SOCKET_IFNAME", "wlan0", "FAIL", "this machine has lo 127.0.0.1, eth0 10.0.0.5"),
        ("NCCL_SOCKET_IFNAME", "ib", "ok", "NCCL_SOCKET_IFNAME=ib"),
        ("NCCL_SOCKET_IFNAME", "=ib7", "FAIL", "this machine has"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok", "=^docker,lo"),
        ("NCCL_SOCKET_IFNAME", "wlan,eth", "ok", "wlan,eth"),
    ],
)
def test_the_interface_of_the_backend_is_reported(variable, value, level, text):
    found = doctor.interface(variable, value, INTERFACES)
    assert found.level == level
    assert text in found.text


def machine(boot: str) -> tuple[str, str]:
    return f"host-{boot}", boot


def test_unusual_layouts_are_reported():
    a, b = machine("a"), machine("b")
    assert levels(doctor.layout([[0, 1], [2, 3]], [a, a, b, b])) == ["ok"]
    assert "several nodes are one machine" in list(doctor.layout([[0, 1], [2, 3]], [a] * 4))[1].text
    assert "unequal" in list(doctor.layout([[0, 1], [2]], [a, a, b]))[1].text
    assert "trains as DDP does" in list(doctor.layout([[0, 1]], [a, a]))[1].text
    torn = list(doctor.layout([[0, 1], [2, 3]], [a, b, b, b]))
    assert torn[1].level == "FAIL"


def test_equal_findings_of_several_ranks_are_one_line():
    same, odd = Finding("ok", "same"), [Finding("note", f"odd {rank // 2}", "fix") for rank in range(3)]
    shown = [str(finding) for finding in doctor.gathered([[same, each] for each in odd])]
    assert shown == ["ok    same", "note  ranks 0-1: odd 0: fix", "note  rank 2: odd 1: fix"]


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
    said = [finding.text for finding in doctor.local_findings()]
    assert "4 GPUs (A GPU), backend nccl" in said
    shared = [finding.text for finding in doctor.local_findings(local_rank=4) if finding.level == "FAIL"]
    assert "4 GPUs (A GPU), but more ranks: nccl refuses two ranks on a GPU" in shared
    assert any("NCCL_SOCKET_IFNAME" in text for text in said)
