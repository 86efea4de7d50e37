"""Checks of the environment: what breaks engines elsewhere, and what this library does about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglrollout.doctor.facts import Facts
from sglrollout.doctor.finding import Finding
from sglrollout.engine.environment import not_for_engines, within_the_engine

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CPU = ("SGLROLLOUT_CPU", "SGLANG_USE_CPU_ENGINE")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "true", "yes", "on")
_SHOWN = 8


def check(facts: Facts) -> list[Finding]:
    """Those that have something to look at; the Hub's always."""
    checks: tuple[Callable[[Facts], Finding | None], ...] = (
        *(launcher, allocator, interfaces, cpu_engine, blocking, sglang_variables),
    )
    return [*(finding for one in checks if (finding := one(facts)) is not None), hub(facts)]


def launcher(facts: Facts) -> Finding | None:
    names = [name for name in not_for_engines(facts.environment) if name not in _ALLOCATOR]
    if not names:
        return None
    found = f"{_some(sorted(names))}: of the trainer's launcher; engines do not inherit them"
    return Finding("launcher", "ok", found)


def allocator(facts: Facts) -> Finding | None:
    given = [name for name in _ALLOCATOR if name in facts.environment]
    if not given:
        return None
    found = f"{_assignments(facts.environment, given)}: the trainer's own; engines do not inherit it"
    if not any(_has_expandable(facts.environment[name]) for name in given):
        return Finding("allocator", "ok", found)
    found += ". CUDA IPC cannot share expandable segments, so a sync stages the weights"
    fix = "leave expandable_segments out, for weights that are read where they are; or keep it and take the longer sync"
    return Finding("allocator", "warning", found, fix)


def interfaces(facts: Facts) -> Finding | None:
    names = [
        name for name in within_the_engine("") if name in facts.environment and name not in not_for_engines([name])
    ]
    if not names:
        return None
    found = f"{_assignments(facts.environment, names)}: engines have their own, within one machine"
    return Finding("interfaces", "ok", found)


def cpu_engine(facts: Facts) -> Finding | None:
    given = [name for name in _CPU if facts.environment.get(name, "").lower() in _TRUE]
    if not given or not facts.devices.visible:
        return None
    found = f"{_assignments(facts.environment, given)}, beside GPUs: engines there would look for a CPU's kernels"
    return Finding("CPU engines", "wrong", found, f'unset {" ".join(given)}; device="cpu" chooses the CPU')


def blocking(facts: Facts) -> Finding | None:
    name = "CUDA_LAUNCH_BLOCKING"
    if facts.environment.get(name, "0") in ("", "0") or not facts.devices.visible:
        return None
    found = f"{_assignments(facts.environment, [name])}: engines inherit it, and wait for each kernel"
    return Finding("launches", "warning", found, f"unset {name}")


def sglang_variables(facts: Facts) -> Finding | None:
    own = {*within_the_engine(""), *_CPU}
    names = sorted(name for name in facts.environment if name.startswith("SGLANG_") and name not in own)
    if not names:
        return None
    return Finding("SGLang's variables", "ok", f"{_some(names)}: engines inherit them as they are")


def hub(facts: Facts) -> Finding:
    environment = facts.environment
    home = environment.get("HF_HOME", "~/.cache/huggingface")
    cache = environment.get("HF_HUB_CACHE", f"{home}/hub")
    given = [name for name in _OFFLINE if environment.get(name, "").lower() in _TRUE]
    if not given:
        return Finding("model hub", "ok", f"online: a model that is not in {cache} is downloaded")
    found = f"{_assignments(environment, given)}: models are a path, or in {cache} already"
    return Finding("model hub", "ok", found)


def _has_expandable(setting: str) -> bool:
    pairs = [part.partition(":") for part in setting.replace(" ", "").lower().split(",")]
    return any(name == "expandable_segments" and value == "true" for name, _, value in pairs)


def _assignments(environment: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name}={environment[name]}" for name in names)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
