"""A trainer on one host, a real server on another: network namespaces with a cable between them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.namespaces import TwoHosts, listening, two_hosts, why_not
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
        given = [str(tiny_model), "--host", host.address, "--port", str(PORT), "--api-key-file", str(key)]
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


def test_a_trainer_on_another_host_joins_a_group_over_the_interface_that_the_user_names(apart: Apart) -> None:
    """By which it sends weights: once the server is up, its processes are not confined to the loopback interface."""
    code = (
        "import sys\n"
        "from sglrollout.engine import cpu_support\n"
        "cpu_support.enable()\n"
        "from sglang.srt.utils import init_custom_process_group\n"
        "where = {'backend': 'gloo', 'init_method': f'tcp://{sys.argv[1]}:29600', 'group_name': 'weights'}\n"
        "print('joining', flush=True)\n"
        "init_custom_process_group(world_size=2, rank=0, **where)\n"
        "print('joined', flush=True)\n"
    )
    trainer = apart.hosts.trainer
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": trainer.interface}
    command = [sys.executable, "-c", code, trainer.address]
    ask = {"master_address": trainer.address, "master_port": 29600, "rank_offset": 1, "world_size": 2}
    with trainer.popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "joining\n"
            joined = apart.ask("/init_weights_update_group", {**ask, "group_name": "weights", "backend": "gloo"})
            assert joined.json()["success"], joined.text
            assert process.stdout.read() == "joined\n"
        finally:
            process.kill()


def test_sigterm_ends_it_and_leaves_nothing(apart: Apart) -> None:
    """The last of these tests."""
    assert apart.command.end(signal.SIGTERM) == 0, apart.command.said
    apart.command.assert_nothing_left(within_s=1.0)
    with pytest.raises(httpx.ConnectError):
        apart.ask()
