"""Two hosts on one machine: network namespaces with a cable between them, which can be cut. Needs root.

with two_hosts() as hosts:
    hosts.server.popen(["sglrollout", "serve", "model", "--host", hosts.server.address])
    with hosts.trainer.entered():
        httpx.get(f"http://{hosts.server.address}:30000/health")
    with hosts.cut():
        ...
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace with a loopback interface and one end of the cable.

    Attributes:
        name: of the namespace, for ``ip netns``.
        interface: of the cable's end.
        address: of that.
    """

    name: str
    interface: str
    address: str

    def popen(self, command: Sequence[str], **given: Any) -> subprocess.Popen[Any]:
        """Start a command on this host, with a /dev/shm of its own. The process is the command's own."""
        own_memory = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]  # ip made a mount namespace
        return subprocess.Popen(["ip", "netns", "exec", self.name, *own_memory, *command], **given)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, the sockets it makes and the threads and processes it starts are on this host."""
        with ExitStack() as files:
            here, there = (
                files.enter_context(open(path)) for path in ("/proc/thread-self/ns/net", f"/run/netns/{self.name}")
            )
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())


@dataclass(frozen=True)
class TwoHosts:
    """A trainer's and a server's."""

    trainer: Host
    server: Host

    @contextmanager
    def cut(self) -> Iterator[None]:
        """The cable is cut, and then whole again. Packets are lost, and no connection is told."""
        self.set_link("down")
        try:
            yield
        finally:
            self.set_link("up")

    def set_link(self, state: str) -> None:
        """``down`` or ``up``, at the server's end."""
        _ip("-n", self.server.name, "link", "set", self.server.interface, state)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts that are gone afterwards; whatever runs on them must have ended."""
    number = next(_numbers)
    tag, network = f"{os.getpid()}-{number}", f"10.{200 + os.getpid() % 50}.{number % 250}"
    trainer = Host(f"sglrollout-trainer-{tag}", "cable0", f"{network}.1")
    server = Host(f"sglrollout-server-{tag}", "cable0", f"{network}.2")
    with ExitStack() as made:
        for host in (trainer, server):
            _ip("netns", "add", host.name)
            made.callback(_ip, "netns", "del", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        ends = ("cable0", "netns", trainer.name, "type", "veth", "peer", "name", "cable0", "netns", server.name)
        _ip("link", "add", *ends)
        for host in (trainer, server):
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
        yield TwoHosts(trainer, server)


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.getuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no ip (iproute2) to make network namespaces with"
    try:
        with two_hosts() as hosts, hosts.trainer.entered():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"network namespaces cannot be made here: {said}"
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def listening(pid: int) -> set[str]:
    """``ADDRESS:PORT`` of all that listens on the host that a process is on, in the kernel's notation."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {line.split()[1] for line in lines if line.split()[3] == "0A"}
