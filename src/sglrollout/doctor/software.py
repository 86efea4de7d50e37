"""Checks of what is installed."""

from __future__ import annotations

from packaging.version import Version

from sglrollout.doctor.facts import Facts
from sglrollout.doctor.finding import Finding
from sglrollout.engine.installed import SUPPORTED_VERSIONS, support

_LEAST_PYTHON = (3, 11)
_SHOWN = 6
_KERNELS = ("sglang-kernel", "sgl-kernel")


def check(facts: Facts) -> list[Finding]:
    """All of them, in the order in which a person would mend them."""
    findings = [platform(facts), python(facts), sglrollout(facts), sglang(facts), torch(facts), transformers(facts)]
    return [*findings, kernels(facts), requirements(facts), extras(facts)]


def platform(facts: Facts) -> Finding:
    found = f"{facts.software.platform}, {facts.software.machine}"
    if facts.software.platform == "linux":
        return Finding("platform", "ok", found)
    return Finding(
        "platform", "wrong", found, "use Linux: SGLang's engines run there alone; WSL 2 or a container will do"
    )


def python(facts: Facts) -> Finding:
    found = ".".join(map(str, facts.software.python))
    if facts.software.python[:2] >= _LEAST_PYTHON:
        return Finding("Python", "ok", found)
    return Finding("Python", "wrong", found, "use Python 3.11 or later")


def sglrollout(facts: Facts) -> Finding:
    return Finding("sglrollout", "ok", facts.software.sglrollout)


def sglang(facts: Facts) -> Finding:
    found = facts.software.packages.get("sglang")
    first, last = SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]
    if found is None:
        fix = 'pip install "sglrollout[sglang]"; without a GPU: the README\'s "Try it without a GPU"'
        return Finding("SGLang", "wrong", "not installed", fix)
    kind = support(found)
    if kind == "tested":
        return Finding("SGLang", "ok", found)
    fix = f'pip install "sglang=={last}"'
    if kind == "untested":
        listed = ", ".join(SUPPORTED_VERSIONS)
        return Finding("SGLang", "warning", f"{found}, which was not tried with this library: {listed} were", fix)
    return Finding("SGLang", "wrong", f"{found}, and this library supports {first} to {last}", fix)


def torch(facts: Facts) -> Finding:
    software = facts.software
    found = software.packages.get("torch")
    if found is None:
        return Finding("torch", "wrong", "not installed", 'pip install "sglrollout[sglang]"')
    cuda = software.torch_cuda
    build = f"{found}, built for CUDA {cuda}" if cuda else f"{found}, a build without CUDA"
    if software.torch_error:
        lacks = f", and lacks {_some(software.torch_lacks)}" if software.torch_lacks else ""
        fix = f"pip install {' '.join(software.torch_lacks[:_SHOWN])}" if facts.devices.visible else _cpu_torch(found)
        return Finding("torch", "wrong", f"{build}; it does not import ({software.torch_error}){lacks}", fix)
    if facts.devices.visible and cuda is None:
        fix = f'pip install --force-reinstall "torch=={_plain(found)}", or run engines with device="cpu"'
        return Finding("torch", "wrong", f"{build}, beside GPUs, which engines would use", fix)
    return _as_required(facts, "torch", build, ("torch",))


def transformers(facts: Facts) -> Finding:
    found = facts.software.packages.get("transformers")
    if found is None:
        return Finding("transformers", "wrong", "not installed", 'pip install "sglrollout[sglang]"')
    return _as_required(facts, "transformers", found, ("transformers",))


def kernels(facts: Facts) -> Finding:
    """SGLang's own kernels, which had another name in older versions."""
    found = [f"{name} {version}" for name in _KERNELS if (version := facts.software.packages.get(name))]
    if not found and facts.devices.visible:
        wanted = next((text for text, _ in facts.software.unmet if text.startswith(_KERNELS)), "sglang-kernel")
        return Finding("SGLang's kernels", "wrong", "not installed, and GPUs need them", f'pip install "{wanted}"')
    if not found:
        return Finding("SGLang's kernels", "ok", "not installed; on a CPU a stand-in takes their place")
    for text, version in facts.software.unmet:
        if version is not None and _package(text) in _KERNELS and facts.devices.visible and _is_older(version, text):
            said = f"{', '.join(found)}; SGLang requires {text}, and does not start with an older one"
            return Finding("SGLang's kernels", "wrong", said, f'pip install "{text}"')
    return _as_required(facts, "SGLang's kernels", ", ".join(found), _KERNELS)


def requirements(facts: Facts) -> Finding:
    """The rest of what SGLang requires. Without a GPU most of it is left out on purpose."""
    shown_elsewhere = ("torch==", "transformers", *_KERNELS)
    unmet = [(text, found) for text, found in facts.software.unmet if not text.startswith(shown_elsewhere)]
    if facts.software.packages.get("sglang") is None:
        return Finding("SGLang's requirements", "ok", "unknown without SGLang")
    if not facts.devices.visible:
        return Finding("SGLang's requirements", "ok", "not looked at: most are for GPUs")
    if not unmet:
        return Finding("SGLang's requirements", "ok", "met")
    listed = _some([f"{text} ({found or 'missing'})" for text, found in unmet])
    fix = f'pip install "sglang=={facts.software.packages["sglang"]}"'
    return Finding("SGLang's requirements", "warning", f"not met: {listed}", fix)


def extras(facts: Facts) -> Finding:
    """What some parts use if it is there."""
    uses = {"openai": "clients of serve_openai", "prometheus_client": "metrics"}
    versions = {name: facts.software.packages.get(name) for name in uses}
    found = ", ".join(f"{name} {version or 'not installed'} ({uses[name]})" for name, version in versions.items())
    return Finding("optional packages", "ok", found)


def _as_required(facts: Facts, name: str, found: str, packages: tuple[str, ...]) -> Finding:
    for text, version in facts.software.unmet:
        if version is not None and _package(text) in packages:
            on_a_cpu = name == "torch" and not facts.devices.visible
            fix = _cpu_torch(text.partition("==")[2] or version) if on_a_cpu else f'pip install "{text}"'
            return Finding(name, "warning", f"{found}; SGLang requires {text}", fix)
    return Finding(name, "ok", found)


def _package(requirement: str) -> str:
    end = next((index for index, letter in enumerate(requirement) if letter in "=<>!~[; "), len(requirement))
    return requirement[:end]


def _is_older(version: str, requirement: str) -> bool:
    pinned = requirement.partition("==")[2]
    return bool(pinned) and Version(version) < Version(pinned)


def _cpu_torch(found: str) -> str:
    return f"pip install torch=={_plain(found)} --index-url https://download.pytorch.org/whl/cpu"


def _plain(version: str) -> str:
    return version.partition("+")[0]


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
