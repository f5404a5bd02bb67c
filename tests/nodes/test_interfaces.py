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
    monkeypatch.setenv(module.VARIABLE, "")  # the package sets it itself
    monkeypatch.delenv(module.VARIABLE)
    monkeypatch.setattr(module, "interfaces", lambda: KNOWN)
    monkeypatch.setattr(module, "resolved", lambda name: "127.0.1.1")
    monkeypatch.setattr(module, "address_towards", ROUTES.get)


def test_the_loopback_interface_of_this_machine_is_found(monkeypatch):
    monkeypatch.undo()
    assert interfaces()["lo"] == "127.0.0.1"
    assert module.address_towards("127.0.0.1") is None
    assert module.address_towards("no-such-host.invalid") is None


LOOPBACK = "127.0.1.1"


@pytest.mark.parametrize(
    ("main_address", "others", "own_name", "interface"),
    [
        pytest.param("10.0.0.1", [], LOOPBACK, "eth0", id="the one towards rank 0"),
        pytest.param("10.1.0.7", [], LOOPBACK, "ib0", id="the other one towards rank 0"),
        pytest.param("own-host-name", ["", "10.1.0.7"], LOOPBACK, "ib0", id="on rank 0, the one towards another rank"),
        pytest.param("127.0.0.1", ["", ""], LOOPBACK, None, id="the loopback for ranks of one machine"),
        pytest.param("10.0.0.1", [], "10.1.0.5", None, id="that of a usable address of the host name"),
        pytest.param("10.0.0.1", [], "10.9.9.9", "eth0", id="not an address that the machine no longer has"),
    ],
)
def test_gloo_uses_the_interface_over_which_ranks_reach_each_other(
    monkeypatch, main_address, others, own_name, interface
):
    monkeypatch.setattr(module, "resolved", lambda name: own_name)
    found = use_reachable_interface(main_address, lambda own: [own, *others])
    assert module.os.environ.get(module.VARIABLE) == interface
    assert (found is None) == (interface is None)


def test_a_variable_that_is_set_is_not_overruled(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "lo")
    assert use_reachable_interface("10.0.0.1") is None
    assert module.os.environ[module.VARIABLE] == "lo"


def test_the_sentence_names_interface_and_reason():
    assert use_reachable_interface("10.0.0.1").startswith("gloo uses the interface eth0 (10.0.0.5)")
