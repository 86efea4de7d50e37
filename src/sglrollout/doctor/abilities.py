"""What the library can do on a machine like this one."""

from __future__ import annotations

from sglrollout.doctor.facts import Facts
from sglrollout.doctor.finding import Ability, count


def abilities(facts: Facts, can_run: bool) -> list[Ability]:
    """Of each, whether it is supported here.

    Args:
        can_run: whether anything was found that stops engines.
    """
    number = len(facts.devices.visible)
    if not can_run:
        return [Ability("engines", False, "see what is wrong")]
    found = [on_gpus(number), Ability("engines on the CPU", True, 'device="cpu": for tests and notebooks')]
    return [*found, tensor_parallel(number), sleep(facts), deterministic(number), weights(facts), restarts(facts)]


def on_gpus(number: int) -> Ability:
    why = f"up to {count(number, 'engine')}" if number else "no GPU is visible"
    return Ability("engines on GPUs", bool(number), why)


def tensor_parallel(number: int) -> Ability:
    if number > 1:
        return Ability("tensor parallelism", True, f"tp_size up to {number}")
    return Ability(
        "tensor parallelism", not number, "tp_size=1 alone, as there is one GPU" if number else "on cores of the CPU"
    )


def sleep(facts: Facts) -> Ability:
    version = facts.software.packages.get("torch_memory_saver")
    if not facts.devices.visible:
        return Ability("sleep and wake", False, "memory_saver is for GPUs")
    if version is None:
        return Ability("sleep and wake", False, "pip install torch_memory_saver")
    return Ability("sleep and wake", True, f"memory_saver=True, by torch_memory_saver {version}")


def deterministic(number: int) -> Ability:
    return Ability("deterministic sampling", bool(number), "deterministic=True" if number else "is for GPUs")


def weights(facts: Facts) -> Ability:
    if facts.devices.visible:
        return Ability("weight sync", True, "from a trainer on the same GPUs, over CUDA IPC")
    return Ability("weight sync", True, "through shared host memory")


def restarts(facts: Facts) -> Ability:
    if facts.machine.proc_error:
        return Ability(
            "weights for engines that come back", False, "memory cannot be shared: they wait for the next sync"
        )
    return Ability("weights for engines that come back", True, "from another engine, or a kept snapshot")
