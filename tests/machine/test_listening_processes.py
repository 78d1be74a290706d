"""Processes that listen on a loopback address: which of them labkit may stop."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from labkit.machine.processes import listening_processes
from labkit.machine.processes.listening_processes import NoListener, find_listeners

SERVER = """
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
workers = [os.fork() for _ in range(2)] if sys.argv[1:] else []
if not sys.argv[1:] or all(workers):
    print(listener.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.fixture
def server():
    """A function that starts a server, with or without workers that share its port."""
    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process.pid, int(process.stdout.readline())

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


@pytest.mark.parametrize("words", [[], ["workers"]])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_process_that_listens_is_returned_without_those_that_it_has_started(
    server, words, host
):
    pid, port = server(*words)
    assert find_listeners(f"http://{host}:{port}/v1") == [pid]


def test_a_listener_whose_parents_cannot_be_read_counts_as_started_by_no_other(server, monkeypatch):
    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    pid, port = server()
    monkeypatch.setattr(psutil.Process, "parents", refuse)
    assert find_listeners(f"http://127.0.0.1:{port}") == [pid]


@pytest.mark.parametrize("host", ["192.0.2.7", "example.org", "0.0.0.0"])
def test_another_machine_is_refused(host):
    with pytest.raises(NoListener, match=f"{host} is not a loopback address"):
        find_listeners(f"http://{host}:80")


def test_a_port_where_no_process_listens_is_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(NoListener, match=f"no process of this user listens on port {port}"):
            find_listeners(f"http://127.0.0.1:{port}")


def test_the_process_of_another_user_is_refused(server, monkeypatch):
    _, port = server()
    monkeypatch.setattr(listening_processes.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(NoListener, match="no process of this user"):
        find_listeners(f"http://127.0.0.1:{port}")


def test_this_process_and_its_parents_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        with pytest.raises(
            NoListener, match=r"the server's process .* is labkit itself or one of its parents"
        ):
            find_listeners(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("[::1]", True), ("localhost", True), ("192.0.2.1", False)],
)
def test_an_address_of_another_machine_is_not_here(host, here):
    assert listening_processes.is_on_this_machine(f"http://{host}:8000") is here


def test_an_address_of_one_s_own_network_is_here(monkeypatch):
    own = {"en0": [SimpleNamespace(address="192.0.2.1")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    assert listening_processes.is_on_this_machine("http://192.0.2.1:8000")
