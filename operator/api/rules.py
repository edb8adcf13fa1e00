"""The rules between fields of a PrefillPipeline, each in two languages.

The API server evaluates ``cel`` and refuses the object; the operator evaluates ``holds`` on what it
reads, because objects stored before a rule existed are still there. The message is one template for
both: ``{model.maxModelLen}`` is a field of the spec, ``{old.…}`` a field of the spec before the
change, and anything else a ``Value`` of the rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prefill_runtime.agent.config import Policy

from .reserved import (
    RESERVED_ARGS,
    RESERVED_CONFIG,
    RESERVED_ENV,
    RESERVED_KEYS,
    RESERVED_PATHS,
    RESERVED_PORTS,
    RESERVED_PREFIX,
    RESERVED_SHORT_ARGS,
    RESERVED_VOLUMES,
)
from .switches import CEL_ONE_POD_SWITCHES, CEL_SWITCHES, one_pod_switches, switches
from .types import PrefillPipelineSpec, Vendor

Spec = PrefillPipelineSpec


@dataclass(frozen=True)
class Value:
    """A part of a message that is computed: a CEL expression, and the same in Python."""

    cel: str
    python: Callable[[Spec], str]


@dataclass(frozen=True)
class Rule:
    """A rule on the spec. ``path`` is where the API server says the problem is."""

    path: str
    cel: str
    holds: Callable[[Spec], bool]
    message: str
    values: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class TransitionRule:
    """A rule on a change of the spec."""

    path: str
    cel: str
    holds: Callable[[Spec, Spec], bool]
    message: str


def argument_name(argument: str) -> str:
    """The option an argument sets, in the engine's spelling: ``--no_host.x=1`` sets ``--host``."""
    return argument.split("=")[0].split(".")[0].replace("_", "-").replace("--no-", "--")


def _reserved(name: str) -> bool:
    # The engine's parser accepts unambiguous abbreviations of long options.
    abbreviates = name.startswith("--") and len(name) > 4 and any(r.startswith(name) for r in RESERVED_ARGS)
    return abbreviates or name in RESERVED_ARGS or name in RESERVED_SHORT_ARGS


def _reserved_args(spec: Spec) -> list[str]:
    return [name for name in map(argument_name, spec.engine.args) if _reserved(name)]


def _cel_list(items: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{item}'" for item in items) + "]"


_CEL_ARGS = "(has(self.engine.args) ? self.engine.args : [])"
_CEL_RESERVED_ARGS = (
    _CEL_ARGS + ".map(a, a.split('=')[0].split('.')[0].replace('_', '-').replace('--no-', '--'))"
    f".filter(a, a in {_cel_list(RESERVED_SHORT_ARGS)} || a.size() > 4 && a.startsWith('--')"
    f" && {_cel_list(RESERVED_ARGS)}.exists(r, r.startsWith(a)))"
)
_CEL_ENV = f"(has(self.engine.env) ? self.engine.env : []).map(e, e.name).filter(n, n in {_cel_list(RESERVED_ENV)})"
_CEL_MOUNTS = "(has(self.engine.volumeMounts) ? self.engine.volumeMounts : [])"
_CEL_PATHS = (
    _CEL_MOUNTS
    + f".map(m, m.mountPath).filter(p, {_cel_list(RESERVED_PATHS)}.exists(r, p == r || p.startsWith(r + '/')))"
)
_CEL_LOST_MOUNTS = (
    _CEL_MOUNTS + ".map(m, m.name).filter(n, !(has(self.scheduling.podTemplate.volumes)"
    " && self.scheduling.podTemplate.volumes.exists(v, v.name == n)))"
)
_CEL_VOLUMES = (
    "(has(self.scheduling.podTemplate.volumes) ? self.scheduling.podTemplate.volumes : [])"
    f".map(v, v.name).filter(n, n.startsWith('{RESERVED_VOLUMES}'))"
)
_CEL_SOURCES = (
    "[has(self.model.source.hostPath), has(self.model.source.persistentVolumeClaim), has(self.model.source.image),"
    " has(self.model.source.huggingFace)].filter(s, s).size()"
)
# Policies that a single stage can have too.
ANY_PIPELINE = (Policy.AUTO, Policy.FIXED, Policy.TOKEN_THROTTLE)
_FACTOR = re.compile(r"^(0|1)(\.[0-9]{1,5})?$")


def _cel_reserved_keys(name: str) -> str:
    metadata = "self.scheduling.podTemplate.metadata"
    return (
        f"(has({metadata}) && has({metadata}.{name}) ? {metadata}.{name}.map(k, k) : [])"
        f".filter(k, k.startsWith('{RESERVED_PREFIX}') || k in {_cel_list(RESERVED_KEYS)})"
    )


def _reserved_keys(spec: Spec) -> list[str]:
    metadata = spec.scheduling.pod_template.metadata
    keys = [*metadata.labels, *metadata.annotations]
    return [key for key in keys if key.startswith(RESERVED_PREFIX) or key in RESERVED_KEYS]


def _sources(spec: Spec) -> int:
    source = spec.model.source
    return sum(s is not None for s in (source.host_path, source.persistent_volume_claim, source.image)) + (
        source.hugging_face is not None
    )


def _lost_mounts(spec: Spec) -> list[str]:
    volumes = {volume.name for volume in spec.scheduling.pod_template.volumes}
    return [mount.name for mount in spec.engine.volume_mounts if mount.name not in volumes]


def _taken_paths(spec: Spec) -> list[str]:
    paths = [mount.mount_path for mount in spec.engine.volume_mounts]
    return [path for path in paths if any(path == r or path.startswith(r + "/") for r in RESERVED_PATHS)]


def _taken_volumes(spec: Spec) -> list[str]:
    names = [volume.name for volume in spec.scheduling.pod_template.volumes]
    return [name for name in names if name.startswith(RESERVED_VOLUMES)]


def _listed(cel: str, python: Callable[[Spec], list[str]]) -> Value:
    return Value(cel, lambda spec: json.dumps(python(spec)))


def _card_conflict(spec: Spec) -> bool:
    resources = spec.engine.resources
    names = {*resources.requests, *resources.limits}
    return spec.accelerator.vendor is Vendor.ASCEND and spec.accelerator.resource_name in names


def _factor_in_range(spec: Spec) -> bool:
    text = spec.chunking.smoothing_factor
    return bool(_FACTOR.match(text)) and 0 < float(text) <= 1


def _env_conflicts(spec: Spec) -> list[str]:
    return [e.name for e in spec.engine.env if e.name in RESERVED_ENV]


_CEL_TAKEN_CONFIG = (
    "(has(self.engine.additionalConfig) ? ["
    + ", ".join(f"has(self.engine.additionalConfig.{key}) ? '{key}' : ''" for key in RESERVED_CONFIG)
    + "] : []).filter(k, k != '')"
)

RULES = (
    Rule(
        "model.source",
        f"{_CEL_SOURCES} == 1",
        lambda s: _sources(s) == 1,
        "model.source has {count} of hostPath, persistentVolumeClaim, image and huggingFace: set exactly one",
        {"count": Value(_CEL_SOURCES, lambda s: str(_sources(s)))},
    ),
    Rule(
        "parallelism.stagesPerPod",
        "self.parallelism.pipeline % self.parallelism.stagesPerPod == 0",
        lambda s: s.parallelism.pipeline % s.parallelism.stages_per_pod == 0,
        "parallelism.stagesPerPod {parallelism.stagesPerPod} does not divide parallelism.pipeline "
        "{parallelism.pipeline}: every pod needs the same number of stages",
    ),
    Rule(
        "parallelism.layerPartition",
        "!has(self.parallelism.layerPartition) || self.parallelism.layerPartition.size() == 0"
        " || self.parallelism.layerPartition.size() == self.parallelism.pipeline * self.parallelism.virtualStages",
        lambda s: len(s.parallelism.layer_partition) in (0, s.parallelism.stages),
        "parallelism.layerPartition has {count} entries, parallelism.pipeline is {parallelism.pipeline} and "
        "parallelism.virtualStages {parallelism.virtualStages}: give the number of layers of each stage, "
        "pipeline * virtualStages of them",
        {"count": Value("self.parallelism.layerPartition.size()", lambda s: str(len(s.parallelism.layer_partition)))},
    ),
    Rule(
        "parallelism.virtualStages",
        "self.parallelism.virtualStages == 1 || self.parallelism.pipeline >= 2",
        lambda s: s.parallelism.virtual_stages == 1 or s.parallelism.pipeline >= 2,
        "parallelism.virtualStages {parallelism.virtualStages} folds a pipeline back and parallelism.pipeline is "
        "{parallelism.pipeline}: set pipeline to 2 or more, or virtualStages to 1",
    ),
    Rule(
        "parallelism.virtualStages",
        "self.parallelism.virtualStages == 1 || self.chunking.policy != 'EngineNative'",
        lambda s: s.parallelism.virtual_stages == 1 or s.chunking.policy is not Policy.ENGINE_NATIVE,
        "parallelism.virtualStages {parallelism.virtualStages} needs prefill-operator's engine plugin, and "
        "chunking.policy EngineNative loads none: choose another policy, or set virtualStages to 1",
    ),
    Rule(
        "parallelism.expertParallel",
        "!self.parallelism.expertParallel || self.parallelism.tensor >= 2",
        lambda s: not s.parallelism.expert_parallel or s.parallelism.tensor >= 2,
        "parallelism.expertParallel spreads experts over the cards of a stage and parallelism.tensor is "
        "{parallelism.tensor}: set tensor to 2 or more, or expertParallel to false",
    ),
    Rule(
        "chunking.policy",
        f"self.chunking.policy in {_cel_list(ANY_PIPELINE)} || self.parallelism.pipeline >= 2",
        lambda s: s.chunking.policy in ANY_PIPELINE or s.parallelism.pipeline >= 2,
        "chunking.policy {chunking.policy} balances the stages of a pipeline and parallelism.pipeline is "
        "{parallelism.pipeline}: set pipeline to 2 or more, or policy to Auto or Fixed",
    ),
    Rule(
        "chunking.policy",
        "self.chunking.policy != 'EngineNative' || self.accelerator.vendor == 'Ascend'",
        lambda s: s.chunking.policy is not Policy.ENGINE_NATIVE or s.accelerator.vendor is Vendor.ASCEND,
        "chunking.policy EngineNative is a feature of vllm-ascend and accelerator.vendor is {accelerator.vendor}: "
        "choose another policy, such as Auto",
    ),
    Rule(
        "chunking.minTokens",
        "self.chunking.minTokens <= self.chunking.maxTokens",
        lambda s: s.chunking.min_tokens <= s.chunking.max_tokens,
        "chunking.minTokens {chunking.minTokens} is greater than chunking.maxTokens {chunking.maxTokens}: "
        "lower minTokens or raise maxTokens",
    ),
    Rule(
        "chunking.maxTokens",
        "self.chunking.maxTokens <= self.model.maxModelLen",
        lambda s: s.chunking.max_tokens <= s.model.max_model_len,
        "chunking.maxTokens {chunking.maxTokens} is greater than model.maxModelLen {model.maxModelLen}: "
        "lower maxTokens or raise maxModelLen",
    ),
    Rule(
        "chunking.smoothingFactor",
        "self.chunking.smoothingFactor.matches('^(0|1)([.][0-9]{1,5})?$')"
        " && double(self.chunking.smoothingFactor) > 0.0 && double(self.chunking.smoothingFactor) <= 1.0",
        _factor_in_range,
        "chunking.smoothingFactor is {chunking.smoothingFactor}: use a number in quotes greater than 0 and at most "
        "1.0, with at most 5 decimals",
    ),
    Rule(
        "engine.port",
        f"!(self.engine.port in [{', '.join(map(str, RESERVED_PORTS))}])",
        lambda s: s.engine.port not in RESERVED_PORTS,
        f"engine.port {{engine.port}} is used inside the rank group, as are {', '.join(map(str, RESERVED_PORTS))}: "
        "choose another one",
    ),
    Rule(
        "engine.args",
        f"{_CEL_RESERVED_ARGS}.size() == 0",
        lambda s: not _reserved_args(s),
        "engine.args sets {names}, which the operator sets from model, parallelism, chunking, accelerator and "
        "engine.port: use these fields instead",
        {"names": _listed(_CEL_RESERVED_ARGS, _reserved_args)},
    ),
    Rule(
        "engine.env",
        f"{_CEL_ENV}.size() == 0",
        lambda s: not _env_conflicts(s),
        "engine.env sets {names}, which the operator sets: leave them out; layers per stage are "
        "parallelism.layerPartition",
        {"names": _listed(_CEL_ENV, _env_conflicts)},
    ),
    Rule(
        "engine.additionalConfig",
        f"{_CEL_TAKEN_CONFIG}.size() == 0",
        lambda s: not any(key in s.engine.additional_config for key in RESERVED_CONFIG),
        "engine.additionalConfig sets {names}, which the operator sets from chunking: use chunking instead",
        {
            "names": _listed(
                _CEL_TAKEN_CONFIG, lambda s: [key for key in RESERVED_CONFIG if key in s.engine.additional_config]
            )
        },
    ),
    Rule(
        "engine.additionalConfig",
        f"{CEL_SWITCHES}.size() == 0",
        lambda s: not switches(s),
        "engine.additionalConfig or engine.env sets {names}, which puts another scheduler, worker or version in the "
        "place of the one that chunking.policy {chunking.policy} works with: remove it",
        {"names": _listed(CEL_SWITCHES, switches)},
    ),
    Rule(
        "engine.env",
        f"{CEL_ONE_POD_SWITCHES}.size() == 0",
        lambda s: not one_pod_switches(s),
        "engine.env sets {names}, which keeps the ranks of one pod only together, and a replica has {pods} pods: "
        "remove it, or set parallelism.stagesPerPod to parallelism.pipeline",
        {
            "names": _listed(CEL_ONE_POD_SWITCHES, one_pod_switches),
            "pods": Value(
                "self.parallelism.pipeline / self.parallelism.stagesPerPod", lambda s: str(s.pods_per_replica)
            ),
        },
    ),
    Rule(
        "engine.volumeMounts",
        f"{_CEL_PATHS}.size() == 0",
        lambda s: not _taken_paths(s),
        "engine.volumeMounts mounts {names}; /dev/shm, /etc/prefill, /models, /opt/prefill and /run/prefill are the "
        "operator's: choose others",
        {"names": _listed(_CEL_PATHS, _taken_paths)},
    ),
    Rule(
        "engine.volumeMounts",
        f"{_CEL_LOST_MOUNTS}.size() == 0",
        lambda s: not _lost_mounts(s),
        "engine.volumeMounts names {names}, which scheduling.podTemplate.volumes does not have: add the volume",
        {"names": _listed(_CEL_LOST_MOUNTS, _lost_mounts)},
    ),
    Rule(
        "engine.resources",
        "self.accelerator.vendor != 'Ascend' || !has(self.engine.resources)"
        " || !(has(self.engine.resources.requests) && self.accelerator.resourceName in self.engine.resources.requests)"
        " && !(has(self.engine.resources.limits) && self.accelerator.resourceName in self.engine.resources.limits)",
        lambda s: not _card_conflict(s),
        "engine.resources sets {accelerator.resourceName}, which the operator sets to tensor * stagesPerPod = {cards}: "
        "remove it",
        {"cards": Value("self.parallelism.tensor * self.parallelism.stagesPerPod", lambda s: str(s.cards_per_pod))},
    ),
    Rule(
        "scheduling.podTemplate.volumes",
        f"{_CEL_VOLUMES}.size() == 0",
        lambda s: not _taken_volumes(s),
        f"scheduling.podTemplate.volumes names {{names}}; names that start with {RESERVED_VOLUMES} are the operator's: "
        "choose others",
        {"names": _listed(_CEL_VOLUMES, _taken_volumes)},
    ),
    Rule(
        "scheduling.podTemplate.metadata",
        f"({_cel_reserved_keys('labels')} + {_cel_reserved_keys('annotations')}).size() == 0",
        lambda s: not _reserved_keys(s),
        "scheduling.podTemplate.metadata sets {names}, which the operator sets: choose other keys",
        {"names": _listed(f"{_cel_reserved_keys('labels')} + {_cel_reserved_keys('annotations')}", _reserved_keys)},
    ),
    Rule(
        "recovery.backoffSeconds",
        "self.recovery.backoffSeconds <= self.recovery.maxBackoffSeconds",
        lambda s: s.recovery.backoff_seconds <= s.recovery.max_backoff_seconds,
        "recovery.backoffSeconds {recovery.backoffSeconds} is greater than recovery.maxBackoffSeconds "
        "{recovery.maxBackoffSeconds}: lower the one or raise the other",
    ),
)


def _immutable(name: str, attribute: str) -> TransitionRule:
    def holds(new: Spec, old: Spec) -> bool:
        same: bool = getattr(new.parallelism, attribute) == getattr(old.parallelism, attribute)
        return same or new.suspend or old.suspend

    path = f"parallelism.{name}"
    return TransitionRule(
        path,
        f"self.suspend || oldSelf.suspend || self.{path} == oldSelf.{path}",
        holds,
        f"{path} is {{old.{path}}} and cannot become {{{path}}} while the pipeline runs: "
        "set suspend to true, change it, then set suspend to false",
    )


TRANSITION_RULES = (
    _immutable("pipeline", "pipeline"),
    _immutable("tensor", "tensor"),
    _immutable("virtualStages", "virtual_stages"),
    _immutable("stagesPerPod", "stages_per_pod"),
)

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MAX = 63
NAME_MESSAGE = (
    "metadata.name has {length} characters: use at most 63 lower-case letters, digits and dashes, "
    "starting with a letter, so that it can be a label of the pods"
)
NAME_CEL = f"self.metadata.name.size() <= {NAME_MAX} && self.metadata.name.matches('{NAME_PATTERN}')"
