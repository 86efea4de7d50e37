"""A process group of one trainer rank and the TP ranks of remote engines, apart from all groups that the trainer has.

Blocking code, run on a thread of its own. Nothing of torch.distributed's global state is read or changed, so it works
the same under torchrun, beside FSDP's groups, and in a script that has none.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from sglrollout.errors import WeightSyncError

Backend: TypeAlias = Literal["nccl", "gloo"]
_BEYOND = 10
"""NCCL's watchdog ends the process, so its deadline is only for what our own ones should have ended."""
_POLL_S = 0.05


class Group:
    """Rank 0 of a group whose other ranks are told to join by :attr:`address`, :attr:`port` and :attr:`name`.

    Args:
        name: that no group before had.
        address: of this machine, as others reach it. The rendezvous listens there alone.
        port: of the rendezvous; 0 is a free one. One that is taken is waited for, as long as the deadline allows.
    """

    def __init__(
        self, name: str, backend: Backend, address: str, port: int, timeout_s: float, device: torch.device | None
    ) -> None:
        self.name, self.backend, self.address = name, backend, address
        self._timeout, self._device = timedelta(seconds=timeout_s), device
        self._group: Any = None
        listening = _listen(address, port, time.monotonic() + timeout_s)
        self.port: int = listening.getsockname()[1]
        self._store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listening.detach(),
        )

    def connect(self, num_ranks: int) -> None:
        """Wait until all others have joined.

        Raises:
            WeightSyncError: they have not, in time.
        """
        # The names under which torch's init_process_group, which SGLang goes by, finds the others.
        kind = "cuda" if self.backend == "nccl" else "cpu"
        store = dist.PrefixStore(
            f"{kind}/", dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        )
        try:
            self._group = self._gloo(store, num_ranks) if self.backend == "gloo" else self._nccl(store, num_ranks)
        except (RuntimeError, ValueError) as error:  # of torch: its DistError is a RuntimeError
            raise WeightSyncError("plan", f"remote engines did not join {self.name}: {error}") from error

    def _gloo(self, store: Any, num_ranks: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        return dist.ProcessGroupGloo(store, 0, num_ranks, options)

    def _nccl(self, store: Any, num_ranks: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout * _BEYOND
        options.is_high_priority_stream = False
        options.group_name = self.name
        return dist.ProcessGroupNCCL(store, 0, num_ranks, options)

    def broadcast(self, tensor: torch.Tensor, wait: Callable[[Callable[[], bool], str], None]) -> None:
        """Send it to all others, and return once it was sent.

        Raises:
            WeightSyncError: one of them is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        works: list[Any] = []  # has the connections: whatever has this frame or that of ``wait`` must not keep them
        try:
            works.append(self._group.broadcast([tensor], options))
            wait(lambda: works[0].is_completed(), "a bucket was not taken by all remote engines")
            works[0].wait()
            if self._device is not None:
                torch.cuda.synchronize(self._device)
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError("transfer", f"the broadcast to remote engines broke: {error}") from error
        finally:
            works.clear()

    def close(self) -> None:
        """Leave it, whatever goes on in it: others find their connections closed. With gloo, which cannot be stopped,
        a broadcast that hangs keeps them open until its deadline; nobody waits for that here."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            threading.Thread(target=_end, args=[[group]], name="sglrollout-leaving", daemon=True).start()


def _end(groups: list[Any]) -> None:
    """End the one in the list, and let go of it: that is what may take its time."""
    for method in ("abort", "shutdown"):
        with contextlib.suppress(Exception):  # it may be broken already
            getattr(groups[0], method)()
    groups.clear()


def _listen(address: str, port: int, deadline: float) -> socket.socket:
    """A port that is taken is waited for: the group before may be about to give it back."""
    while True:
        try:
            return _bound(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                message = f"a rendezvous cannot listen at {address}, port {port}: {error}"
                raise WeightSyncError("plan", message) from error
        time.sleep(_POLL_S)


def _bound(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def address_towards(hosts: Iterable[tuple[str, int]]) -> str:
    """This machine's address on the way to the hosts: one that is reached from elsewhere, if one of them is there.
    Nothing is sent.

    Raises:
        WeightSyncError: there is no way to one of them.
    """
    addresses = [_own_address(*host) for host in hosts]
    return next((address for address in addresses if not ipaddress.ip_address(address).is_loopback), addresses[0])


def _own_address(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise WeightSyncError("plan", f"there is no way to {host}: {error}") from error
    return address
