"""A trainer on one host, a real server on another: network namespaces with a cable between them."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import sglrollout as sr
from sglrollout import testing
from tests.namespaces import TwoHosts, listening, two_hosts, why_not
from tests.reference import answers_like, greedy, trained, untrained
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


def test_tp_ranks_on_two_hosts_are_one_server_and_end_together(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    path = testing.tiny_model(tmp_path / "untied", tie=False)
    with two_hosts() as hosts, ExitStack() as running:
        folders = [Path(running.enter_context(tempfile.TemporaryDirectory(prefix="t-"))) for _ in range(2)]
        key = tmp_path / "key"
        key.write_text("a-key\n")
        key.chmod(0o600)
        commands = []
        for rank, host in enumerate((hosts.server, hosts.trainer)):
            given = [str(path), "--host", host.address, "--port", str(PORT), "--api-key-file", str(key)]
            given += ["--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank)]
            given += ["--dist-init-addr", f"{hosts.server.address}:5000"]
            command = ServeCommand(given, folders[rank], {"GLOO_SOCKET_IFNAME": host.interface}, host.popen)
            running.callback(command.close)
            commands.append(command)
        url = commands[0].address()
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}}
        with hosts.trainer.entered(), httpx.Client(trust_env=False, timeout=60) as client:
            said = client.post(f"{url}/generate", json=body, headers={"Authorization": "Bearer a-key"}).json()
        assert said["output_ids"] == greedy(untrained(path), (5, 6, 7))
        commands[1].process.send_signal(signal.SIGKILL)
        assert commands[0].process.wait(90) != 0
