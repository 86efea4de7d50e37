"""Placement: what is visible, who gets what, and the text of each refusal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrollout.config import RolloutConfig
from sglrollout.engine.placement import Device, Placement, cpu_cores, plan, visible_devices
from sglrollout.errors import ConfigError, PlacementError

UUIDS = ("GPU-8f2e0000-aa", "GPU-8f3e0000-bb", "GPU-1c000000-cc", "GPU-2d000000-dd")
ROWS = "".join(f"{index}, {uuid}, NVIDIA H200, 143771\n" for index, uuid in enumerate(UUIDS))


def gpus(num: int) -> list[Device]:
    return [Device(index, UUIDS[index], "NVIDIA H200", 143771 * 1024**2) for index in range(num)]


def config(**options: Any) -> RolloutConfig:
    return RolloutConfig(model="org/model", **options)


def indices(placements: tuple[Placement, ...]) -> list[list[int]]:
    return [[device.index for device in one.devices] for one in placements]


Driver = Callable[..., None]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Sets what nvidia-smi answers and what CUDA_VISIBLE_DEVICES is."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def answers(rows: str = ROWS, *, chosen: str | None = None, code: int = 0, raises: Exception | None = None) -> None:
        def run(command: tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[str]:
            assert (command[0], options["timeout"]) == ("nvidia-smi", 30)
            if raises is not None:
                raise raises
            return subprocess.CompletedProcess(command, code, rows, "cannot reach the driver" if code else "")

        monkeypatch.setattr(subprocess, "run", run)
        if chosen is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    answers()
    return answers


def test_every_gpu_is_visible_by_default(driver: Driver) -> None:
    assert visible_devices() == gpus(4)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,9,1", [0]),
        ("0,x,1", [0]),
        ("1,1", []),
        ("GPU-1c", [2]),
        ("GPU-2d000000-dd,GPU-8f2e", [3, 0]),
        ("GPU-8f", []),
        ("0,GPU-8f2e", []),
        ("GPU-ff", []),
    ],
)
def test_cuda_visible_devices_is_honoured(driver: Driver, chosen: str, expected: list[int]) -> None:
    driver(chosen=chosen)
    found = visible_devices()
    assert [device.uuid for device in found] == [UUIDS[index] for index in expected]
    assert [device.index for device in found] == list(range(len(found)))


def test_mig_ids_are_kept_as_given(driver: Driver) -> None:
    driver(chosen="MIG-11,MIG-22")
    assert visible_devices() == [Device(0, "MIG-11", "MIG instance", 0), Device(1, "MIG-22", "MIG instance", 0)]


def test_no_driver_is_no_device(driver: Driver) -> None:
    driver(raises=FileNotFoundError("nvidia-smi"), chosen="0")
    assert visible_devices() == []


def test_a_failing_driver_is_an_error(driver: Driver) -> None:
    driver("", code=9)
    with pytest.raises(PlacementError, match=r'nvidia-smi failed.*cannot reach the driver.*device="cpu"'):
        visible_devices()


def test_a_driver_without_nvidia_smi_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(raises=FileNotFoundError("nvidia-smi"))
    monkeypatch.setattr("sglrollout.engine.placement._DRIVER_FILE", Path(__file__))
    with pytest.raises(PlacementError, match="no nvidia-smi"):
        visible_devices()


def test_a_hanging_driver_is_an_error(driver: Driver) -> None:
    driver(raises=subprocess.TimeoutExpired("nvidia-smi", 30))
    with pytest.raises(PlacementError, match=r"did not answer within 30 s.*device=\"cpu\""):
        visible_devices()


def test_an_answer_of_another_form_is_an_error(driver: Driver) -> None:
    driver("No devices were found\n")
    with pytest.raises(PlacementError, match="line that is not index, uuid, name, memory: 'No devices were found'"):
        visible_devices()


def test_memory_that_the_driver_does_not_say_is_zero(driver: Driver) -> None:
    driver("0, GPU-1, NVIDIA GB10, [N/A]\n")
    assert visible_devices() == [Device(0, "GPU-1", "NVIDIA GB10", 0)]


def test_mixed_gpus_ask_for_an_order(
    driver: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver("0, GPU-1, T4, 15360\n1, GPU-2, H200, 143771\n")
    visible_devices()
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in caplog.text
    caplog.clear()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    visible_devices()
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "num_visible", "expected"),
    [
        ({}, 4, [[0], [1], [2], [3]]),
        ({"tp_size": 2}, 4, [[0, 1], [2, 3]]),
        ({"tp_size": 2}, 3, [[0, 1]]),
        ({"num_engines": 2}, 4, [[0], [1]]),
        ({"isolation": "thread"}, 4, [[0]]),
        ({"devices": [[3], [1]]}, 4, [[3], [1]]),
        ({"devices": [["GPU-1c"], [0]]}, 4, [[2], [0]]),
        ({"devices": [[2, 0]], "tp_size": 2}, 4, [[2, 0]]),
    ],
)
def test_engines_get_devices_of_their_own(options: dict[str, Any], num_visible: int, expected: list[list[int]]) -> None:
    placements = plan(config(**options), gpus(num_visible))
    assert indices(placements) == expected
    assert {one.device for one in placements} == {"cuda"}


def test_plan_asks_the_driver_by_itself(driver: Driver) -> None:
    driver(chosen="3,1")
    placements = plan(config())
    assert [device.uuid for one in placements for device in one.devices] == [UUIDS[3], UUIDS[1]]


def test_no_gpu_is_a_cpu() -> None:
    assert plan(config(), []) == (Placement("cpu"),)
    assert plan(config(num_engines=3), []) == (Placement("cpu"),) * 3


def test_a_cpu_never_asks_the_driver(driver: Driver) -> None:
    driver(raises=AssertionError("asked"))
    assert plan(config(device="cpu", num_engines=2)) == (Placement("cpu"),) * 2


def test_no_gpu_and_an_option_only_gpus_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^memory_saver must be False on a CPU"):
        plan(config(memory_saver=True), [])


@pytest.mark.parametrize(
    ("options", "num_visible", "text"),
    [
        (
            {"num_engines": 3},
            2,
            "3 engines need 3 devices with tp_size=1, one per rank and none shared, but 2 devices are visible "
            "(0: NVIDIA H200 GPU-8f2e0000-aa; 1: NVIDIA H200 GPU-8f3e0000-bb): lower num_engines or tp_size",
        ),
        ({"tp_size": 4}, 2, "1 engine needs 4 devices with tp_size=4"),
        ({"num_engines": 2}, 1, "but 1 device is visible (0: NVIDIA H200"),
        (
            {"device": "cuda"},
            0,
            "1 engine needs 1 device with tp_size=1, one per rank and none shared, but no device is",
        ),
        ({"devices": [[7]]}, 2, "devices asks for 7, which is not visible; 2 devices are visible"),
        ({"devices": [["GPU-zz"]]}, 1, "devices asks for 'GPU-zz', which is not visible; 1 device is visible"),
        ({"devices": [["GPU-8f"]]}, 2, "devices asks for 'GPU-8f', which 2 visible devices match"),
        ({"devices": [[0]]}, 0, "devices asks for 0, which is not visible; no device is visible"),
        (
            {"devices": [[0], ["GPU-8f2e"]]},
            2,
            "devices asks for 'GPU-8f2e' (device 0, GPU-8f2e0000-aa) for engine 1, but engine 0 has it already",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], num_visible: int, text: str, driver: Driver) -> None:
    with pytest.raises(PlacementError) as refused:
        plan(config(**options), gpus(num_visible))
    assert text in str(refused.value)


def test_the_refusal_shows_the_limit_it_ran_into(driver: Driver) -> None:
    driver(chosen="0")
    with pytest.raises(PlacementError, match=r"1 device is visible under CUDA_VISIBLE_DEVICES='0' \(0: NVIDIA H200"):
        plan(config(num_engines=2))


@pytest.mark.parametrize(
    ("cores", "num_engines", "expected"),
    [
        ({4, 2, 0}, None, ((0, 2, 4),)),
        (set(range(5)), 2, ((0, 1), (2, 3, 4))),
        ({0, 1}, 2, ((0,), (1,))),
        ({0, 1}, 3, ((0,), (1,), (0,))),
    ],
)
def test_cores_are_split_evenly(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], num_engines: int | None, expected: tuple[tuple[int, ...], ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
    assert cpu_cores(config(num_engines=num_engines)) == expected


def test_cores_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert cpu_cores(config()) == ((0, 1),)


@given(st.integers(1, 64), st.integers(1, 16))
def test_every_core_works_and_none_much_more(num_cores: int, num_engines: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)), raising=False)
        shares = cpu_cores(config(num_engines=num_engines))
    assert len(shares) == num_engines
    assert all(shares)
    assert len({len(share) for share in shares}) <= 2
    assert {core for share in shares for core in share} == set(range(num_cores))
