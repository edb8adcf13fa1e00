"""What a folded pipeline cannot be combined with: refused at the start, with the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.settings import PrefillSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_virtual_stages(vllm_config: VllmConfig) -> None:
    """SettingsError with the first thing that stands against two stages per rank, and the remedy."""
    for problem in _problems(vllm_config):
        raise SettingsError(f"virtualStages is 2, but {problem}")


def _problems(vllm_config: VllmConfig) -> Iterator[str]:
    yield from _of_parallelism(vllm_config)
    yield from _of_model(vllm_config)
    if not vllm_config.model_config.enforce_eager and vllm_config.device_config.device_type != "cpu":
        yield "graphs have not been built for two stages per rank: pass --enforce-eager"
    if vllm_config.speculative_config is not None:
        yield "--speculative-config is set: drafts need the last stage's states on a rank of its own; leave it out"
    if vllm_config.lora_config is not None:
        yield "--enable-lora is set, and adapters would reach one of the two stages only: leave it out"


def _of_parallelism(vllm_config: VllmConfig) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    ranks = parallel.pipeline_parallel_size
    if ranks < 2:
        yield f"--pipeline-parallel-size is {ranks}: set it to 2 or more, or virtualStages to 1"
    if parallel.data_parallel_size > 1:
        yield f"--data-parallel-size is {parallel.data_parallel_size}: run independent pipelines instead"
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            flag = name.replace("_", "-")
            yield f"--{flag} is {size}, which has not been built for two stages per rank: leave it out"
    if parallel.distributed_executor_backend != "mp":
        yield f"--distributed-executor-backend is {parallel.distributed_executor_backend}: set it to mp"


def _of_model(vllm_config: VllmConfig) -> Iterator[str]:
    model, ranks = vllm_config.model_config, vllm_config.parallel_config.pipeline_parallel_size
    layers = model.get_total_num_hidden_layers()
    split = PrefillSettings.of(vllm_config).layer_partition
    count, total = len(split), sum(split)
    if split and (count != 2 * ranks or total != layers):
        yield (
            f"layerPartition has {count} entries with {total} layers in all, and there are {2 * ranks} stages "
            f"and {layers} layers: give the layers of each stage, or leave it out to divide them evenly"
        )
    if layers < 2 * ranks:
        yield (
            f"the model has {layers} layers for {2 * ranks} stages ({ranks} ranks with two each): "
            f"use at most {layers // 2} ranks, or set virtualStages to 1"
        )
    if model.runner_type != "generate":
        yield f"the model is run as {model.runner_type}: only text generation is supported"
    if model.is_multimodal_model:
        yield "the model takes more than text, and its encoder is no part of one decoder stack: use a text model"
    if model.is_encoder_decoder or model.is_hybrid or model.is_attention_free:
        yield "the model is not one stack of decoder layers with attention: set virtualStages to 1"
