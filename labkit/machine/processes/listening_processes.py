"""The processes of this user that listen on a loopback address."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil


class NoListener(LookupError):
    """No process that may be stopped listens at an address. The message is one line."""


def find_listeners(url: str) -> list[int]:
    """Return the ids of this user's processes that listen at the loopback address of ``url``.

    Several processes may share a port. A process that another listener has started is left out.
    Raises ``NoListener`` if the address is not a loopback address, no process of this user listens
    there, or the listener is this process or one of its ancestors.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_loopback(host):
        raise NoListener(f"{host} is not a loopback address, such as 127.0.0.1")
    found = {process.pid: process for process in _own_processes() if _listens(process, port)}
    roots = [pid for pid, process in found.items() if not _parents(process) & set(found)]
    if not roots:
        raise NoListener(f"no process of this user listens on port {port}")
    this = {os.getpid(), *_parents(psutil.Process())}
    if starters := [pid for pid in roots if pid in this]:
        raise NoListener(
            f"the server's process {starters[0]} is labkit itself or one of its parents"
        )
    return sorted(roots)


def is_on_this_machine(url: str) -> bool:
    """Return whether the host of ``url`` is this machine; True if its name has no address."""
    try:
        infos = socket.getaddrinfo(urlsplit(url).hostname, None)
    except OSError:
        return True
    own = {one.address for each in psutil.net_if_addrs().values() for one in each}
    return any(_is_loopback(str(info[4][0])) or info[4][0] in own for info in infos)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _own_processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                yield process
        except psutil.Error:  # it has ended, or it is another user's
            continue


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for connection in process.net_connections(kind="tcp")
        )
    except psutil.Error:
        return False


def _parents(process: psutil.Process) -> set[int]:
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()
