"""The interface that gloo uses on machines whose host name is a loopback address."""

from __future__ import annotations

import pytest

from lightning_hiercomm.nodes import interfaces as module
from lightning_hiercomm.nodes.interfaces import interfaces, use_reachable_interface

KNOWN = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "down0": None}
ROUTES = {"10.0.0.1": "10.0.0.5", "10.1.0.7": "10.1.0.5"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with two networks, whose own name is a loopback address."""
    monkeypatch.delenv(module.VARIABLE, raising=False)
    monkeypatch.setattr(module, "interfaces", lambda: KNOWN)
    monkeypatch.setattr(module, "resolved", lambda name: "127.0.1.1")
    monkeypatch.setattr(module, "address_towards", ROUTES.get)


def chosen(monkeypatch, main_address, others=()):
    found = use_reachable_interface(main_address, lambda own: [own, *others])
    variable = module.os.environ.get(module.VARIABLE)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    assert (found is None) == (variable is None)
    return variable


def test_the_loopback_interface_of_this_machine_is_found(monkeypatch):
    monkeypatch.undo()
    assert interfaces()["lo"] == "127.0.0.1"
    assert module.address_towards("127.0.0.1") is None
    assert module.address_towards("no-such-host.invalid") is None


@pytest.mark.parametrize(("main_address", "interface"), [("10.0.0.1", "eth0"), ("10.1.0.7", "ib0")])
def test_gloo_uses_the_interface_towards_rank_0(monkeypatch, main_address, interface):
    assert chosen(monkeypatch, main_address) == interface


def test_rank_0_uses_the_interface_towards_another_rank(monkeypatch):
    assert chosen(monkeypatch, "own-host-name", ["", "10.1.0.7"]) == "ib0"


def test_ranks_of_one_machine_keep_the_loopback(monkeypatch):
    assert chosen(monkeypatch, "127.0.0.1", ["", ""]) is None


def test_a_name_of_a_usable_address_decides(monkeypatch):
    monkeypatch.setattr(module, "resolved", lambda name: "10.1.0.5")
    assert chosen(monkeypatch, "10.0.0.1") is None


def test_a_name_of_an_address_that_the_machine_no_longer_has_does_not_decide(monkeypatch):
    monkeypatch.setattr(module, "resolved", lambda name: "10.9.9.9")
    assert chosen(monkeypatch, "10.0.0.1") == "eth0"


def test_a_variable_that_is_set_is_not_overruled(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "lo")
    assert use_reachable_interface("10.0.0.1") is None
    assert module.os.environ[module.VARIABLE] == "lo"


def test_the_sentence_names_interface_and_reason():
    assert use_reachable_interface("10.0.0.1").startswith("gloo uses the interface eth0 (10.0.0.5)")
