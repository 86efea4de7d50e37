"""A trainer on one host, a real server on another: network namespaces with a cable between them."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import sglrollout as sr
from tests.namespaces import TwoHosts, listening, two_hosts, why_not
from tests.reference import answers_like, trained
from tests.remote import until
from tests.serve_command import ServeCommand

pytestmark = pytest.mark.slow

PORT = 30000
ASK: dict[str, Any] = {"text": "hi", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


@dataclass
class Apart:
    """Both hosts, and the server that runs on its one."""

    hosts: TwoHosts
    command: ServeCommand
    url: str
    key: str

    def ask(
        self, path: str = "/generate", body: Any = ASK, key: str | None = None, timeout_s: float = 60
    ) -> httpx.Response:
        """From the trainer's host."""
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        with self.hosts.trainer.entered(), httpx.Client(trust_env=False, timeout=timeout_s) as client:
            return client.post(f"{self.url}{path}", json=body, headers=headers)


@pytest.fixture(scope="module")
def apart(tiny_model: Path) -> Iterator[Apart]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts, tempfile.TemporaryDirectory(prefix="t-") as temporary:
        key, host = Path(temporary, "key"), hosts.server
        given = [str(tiny_model), "--host", host.address, "--port", str(PORT)]
        given += ["--api-key-file", str(key)]
        command = ServeCommand(given, Path(temporary), {"GLOO_SOCKET_IFNAME": host.interface}, host.popen)
        try:
            yield Apart(hosts, command, command.address(), key.read_text().strip())
        finally:
            command.close()


def test_the_server_says_where_it_is_and_where_its_key_is(apart: Apart) -> None:
    assert apart.url == f"http://{apart.hosts.server.address}:{PORT}"
    (line,) = [line for line in apart.command.said if "RemoteEngine" in line]
    assert apart.key not in "\n".join(apart.command.said)
    assert f"{apart.command.temporary}/key" in line


def test_a_trainer_on_another_host_generates_with_the_key_alone(apart: Apart) -> None:
    assert apart.ask(key="wrong").status_code == 401
    assert len(apart.ask().json()["output_ids"]) == 4


def test_nothing_but_the_http_port_is_reached_from_outside(apart: Apart) -> None:
    address = socket.inet_aton(apart.hosts.server.address)[::-1].hex().upper()
    found = listening(apart.command.process.pid)
    assert f"{address}:{PORT:04X}" in found
    assert len(found) > 1  # gloo's, of the scheduler
    assert {place for place in found if not place.startswith("0100007F:")} == {f"{address}:{PORT:04X}"}


def test_a_cable_that_is_cut_fails_a_request_in_time_and_the_server_is_there_again_after_it(apart: Apart) -> None:
    with apart.hosts.cut(), pytest.raises(httpx.TransportError):
        apart.ask(timeout_s=1.0)
    assert apart.ask().status_code == 200


def test_a_rollout_on_another_host_samples_and_syncs_and_does_so_again_after_the_cable_was_cut(
    apart: Apart, tiny_model: Path
) -> None:
    async def train() -> None:
        import torch

        model = trained(tiny_model, 1)
        remote = [sr.RemoteEngine(apart.url, api_key=apart.key, dead_after_s=3.0)]
        options: dict[str, Any] = {"max_restarts": 20, "restart_delay_s": 0.1, "progress": False}
        async with (
            sr.AsyncRolloutEngine(tiny_model, num_engines=0, remote=remote, **options) as rollout,
            sr.WeightSyncer(rollout, sr.ModuleSource(model), timeout_s=30.0) as syncer,
        ):
            assert not await answers_like(rollout, model)
            assert (await syncer.sync()).method == "broadcast"
            assert await answers_like(rollout, model)
            with apart.hosts.cut():
                await until(lambda: rollout.engines[0].state == "restarting", 60.0)
            await until(lambda: rollout.engines[0].state == "ready", 60.0)  # with the weights that it had
            assert await answers_like(rollout, model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            await syncer.sync()
            assert await answers_like(rollout, model)

    with apart.hosts.trainer.entered():
        anyio.run(train)


def test_sigterm_ends_it_and_leaves_nothing(apart: Apart) -> None:
    """The last of these tests."""
    assert apart.command.end(signal.SIGTERM) == 0, apart.command.said
    apart.command.assert_nothing_left(within_s=1.0)
    with pytest.raises(httpx.ConnectError):
        apart.ask()
