"""What the product relies on in vllm-ascend 0.23.0.post1. docs/ascend.md says what follows from it."""

from __future__ import annotations

from tests.unit.ascend.contract import Contract, Only, Says, Signature

WORKER = "vllm_ascend/worker/worker.py"
RUNNER = "vllm_ascend/worker/model_runner_v1.py"
PLATFORM = "vllm_ascend/platform.py"
CONFIG = "vllm_ascend/ascend_config.py"
UTILS = "vllm_ascend/utils.py"
PATCHES = "vllm_ascend/patch/platform/"
BALANCE = PATCHES + "patch_balance_schedule.py"
CHUNKS = "vllm_ascend/core/scheduler_profiling_chunk.py"

RELEASE: tuple[Contract, ...] = (
    Says(path="setup.py", says=('["ascend = vllm_ascend:register"]', '"vllm.general_plugins"'),
         why="its plugins and ours load side by side, each by its own entry point"),
    Says(path=UTILS, name="vllm_version_is", says=("vllm_version = envs_ascend.VLLM_VERSION",),
         why="VLLM_VERSION in the pod decides which patches apply, so it is refused when it is another version"),
    Signature(path="vllm_ascend/__init__.py", name="register_connector", takes="",
              why="a general plugin, in every engine process, applies the platform patches before a scheduler is made"),
    Says(path="vllm_ascend/__init__.py", name="_ensure_global_patch", says=("adapt_patch(is_global_patch=True)",),
         why="the same"),
)  # fmt: skip

NPU_WORKER: tuple[Contract, ...] = (
    Signature(path=WORKER, name="NPUWorker", extends="WorkerBase", why="PrefillNPUWorker stands before this class"),
    Signature(path=WORKER, name="NPUWorker.__init__",
              takes="self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False, **kwargs",
              why="we take vllm_config and pass on the rest"),
    Says(path=WORKER, name="NPUWorker.__init__", says=(
        "self.use_v2_model_runner = self.vllm_config.use_v2_model_runner",
        'if self.use_v2_model_runner and vllm_version_is("0.23.0"): ...',
        "self.use_v2_model_runner = False"),
        why="only the v1 runner was read"),
    Signature(path=WORKER, name="NPUWorker.init_device", takes="self", why="we extend it"),
    Says(path=WORKER, name="NPUWorker.init_device", says=(
        "self.device = self._init_device()", "self.model_runner = NPUModelRunner(self.vllm_config, self.device)"),
        why="after it there is a runner whose execute_model we wrap"),
    Says(path=WORKER, name="NPUWorker._init_device",
         says=("torch.npu.set_device(device)", "self._init_worker_distributed_environment()"),
         why="after it our events belong to this rank's device, and pipeline and tensor groups answer"),
    Signature(path=WORKER, name="NPUWorker.execute_model", takes="self, scheduler_output",
              why="we wrap it: call, sent"),
    Says(path=WORKER, name="NPUWorker.execute_model", says=(
        "handle.wait()",
        "forward_pass = scheduler_output.total_num_scheduled_tokens > 0",
        "if forward_pass and (not get_pp_group().is_first_rank): ...",
        "get_pp_group().irecv_tensor_dict(all_gather_group=all_gather_group)",
        "AsyncIntermediateTensors(tensor_dict, comm_handles=comm_handles, comm_postprocess=comm_postprocess)",
        "output = self.model_runner.execute_model(scheduler_output, intermediate_tensors)",
        "self._pp_send_work = get_pp_group().isend_tensor_dict(output.tensors, all_gather_group=all_gather_group)",
        "return None"),
        why="the order on the stream: last sends, receive (awaited lazily), pass, send; see pass_clock.py"),
    Only(pattern=r"\bmodel_runner\.execute_model\(", places={WORKER: 1},
         why="nothing but a served batch goes through the wrapped method"),
    Signature(path=WORKER, name="NPUWorker.sample_tokens", takes="self, grammar_output",
              why="the last rank's pass ends after it"),
    Signature(path=WORKER, name="NPUWorker.profile_prefill_latency", takes="self, num_tokens",
              why="EngineNative's own profiling calls it"),
)  # fmt: skip

NPU_RUNNER: tuple[Contract, ...] = (
    Signature(path=RUNNER, name="NPUModelRunner", extends="GPUModelRunner",
              why="what we know of vLLM's runner holds where it is not overridden"),
    Signature(path=RUNNER, name="NPUModelRunner.execute_model",
              takes="self, scheduler_output, intermediate_tensors=None", why="we wrap it: start, end"),
    Says(path=RUNNER, name="NPUModelRunner.execute_model", says=(
        "self._prepare_inputs(scheduler_output, num_scheduled_tokens_np)",
        "self._preprocess(scheduler_output, num_tokens_padded, intermediate_tensors)",
        "self._model_forward(num_tokens_padded, input_ids, positions, intermediate_tensors, inputs_embeds, "
        "**model_kwargs)",
        "return hidden_states"),
        why="the input is first touched behind the preparation and before the forward: our start event lies there"),
    Says(path=RUNNER, name="NPUModelRunner.sync_and_slice_intermediate_tensors", says=("intermediate_tensors.items()",),
         why="touching the tensors is what waits for the receive"),
    Only(pattern=r"(?<!def )\b_sync_device\(\)", places={RUNNER: 2},
         why="with our policies no step synchronises the device but where profiling_chunk_config asks for it"),
    Says(path=RUNNER, name="NPUModelRunner.execute_model",
         says=("if self.ascend_config.profiling_chunk_config.need_timing: ...", "self._sync_device()"), why="the same"),
    Says(path=RUNNER, name="NPUModelRunner.sample_tokens", says=(
        "if self.ascend_config.profiling_chunk_config.need_timing and hasattr(self, '_execution_start_time'): ...",
        "self._sync_device()"), why="the same"),
    Says(path=RUNNER, name="NPUModelRunner.execute_model",
         says=('getattr(scheduler_output, "disable_profiling_timing", False)',),
         why="it too reads attributes that its scheduler put on a SchedulerOutput, as our stamp travels"),
    Says(path="vllm_ascend/kv_offload/cpu_npu.py",
         says=("torch.npu.Event(enable_timing=True)", "transfer.start_event.elapsed_time(transfer.end_event)"),
         why="NPU events are made and read there as pass_clock.py makes and reads them, milliseconds included"),
)  # fmt: skip

NPU_PLATFORM: tuple[Contract, ...] = (
    Says(path=PLATFORM, name="NPUPlatform.check_and_update_config", says=(
        "if parallel_config and parallel_config.worker_cls == 'auto': ...",
        'parallel_config.all2all_backend = "flashinfer_all2allv"',
        'parallel_config.worker_cls = "vllm_ascend.worker.worker.NPUWorker"'),
        why="a --worker-cls of ours is kept; what else it sets with its own matters to data parallelism only"),
    Only(pattern=r"worker_cls = ", places={PLATFORM: 3}, why="nothing else replaces the worker"),
    Only(pattern=r"scheduler_config\.scheduler_cls = |scheduler_cls: ", places={
        PLATFORM: 2, "vllm_ascend/core/recompute_scheduler.py": 1},
        why="a --scheduler-cls of ours is replaced in these three cases only, which are refused"),
    Says(path=PLATFORM, name="NPUPlatform.check_and_update_config", says=(
        "if ascend_config.recompute_scheduler_enable: ...",
        "vllm_config.scheduler_config = recompute_scheduler_config",
        "if ascend_config.SLO_limits_for_dynamic_batch != -1: ...",
        'vllm_config.scheduler_config.scheduler_cls = "vllm_ascend.core.scheduler_dynamic_batch.SchedulerDynamicBatch"',
        "if ascend_config.profiling_chunk_config.enabled: ...",
        "vllm_config.scheduler_config.scheduler_cls = "
        '"vllm_ascend.core.scheduler_profiling_chunk.ProfilingChunkScheduler"'),
        why="these are the three, and the last wins: EngineNative needs no --scheduler-cls"),
    Only(pattern=r"async_scheduling = (?!vllm_config|self\.|use_async)", places={},
         why="--no-async-scheduling stays as we pass it"),
    Only(pattern=r"(max_num_scheduled_tokens|long_prefill_token_threshold) = (?!int)", places={},
         why="the two numbers that carry our chunk size are ours alone"),
    Says(path=PLATFORM, name="NPUPlatform._fix_incompatible_config",
         says=("vllm_config.scheduler_config.max_num_partial_prefills = 1",),
         why="one prefill at a time is what our scheduler counts on"),
    Says(path=UTILS, name="refresh_block_size", says=(
        "if cache_config.enable_prefix_caching or scheduler_config.enable_chunked_prefill: ...",
        "cache_config.block_size = 128"),
        why="chunk sizes step by 128 tokens, except for hybrid and deepseek_v4 models"),
    Says(path=PLATFORM, name="NPUPlatform", says=('"ASCEND_RT_VISIBLE_DEVICES"',),
         why="the device plugin gives a pod its cards by this variable"),
)  # fmt: skip

PATCHED: tuple[Contract, ...] = (
    Says(path=PATCHES + "__init__.py", says=("import vllm_ascend.patch.platform.patch_balance_schedule",),
         why="the base class of our scheduler is replaced always, not only with balance scheduling"),
    Says(path=BALANCE, says=(
        "EngineCoreProc.run_engine_core = run_engine_core",
        "vllm.v1.core.sched.scheduler.Scheduler = BalanceScheduler"), why="the same"),
    Signature(path=BALANCE, name="BalanceScheduler", extends="Scheduler", why="it remains vLLM's scheduler underneath"),
    Signature(path=BALANCE, name="BalanceScheduler.__init__",
              takes="self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=None, "
              "mm_registry=MULTIMODAL_REGISTRY, include_finished_set=False, log_stats=False",
              why="our __init__ passes on what the engine gives"),
    Signature(path=BALANCE, name="BalanceScheduler.schedule", takes="self, throttle_prefills=False",
              why="our schedule() passes on what the engine gives"),
    Says(path=BALANCE, name="BalanceScheduler.schedule", says=(
        "if not self._balance_enabled and (not self._disable_preemption): ...",
        'if vllm_version_is("0.23.0"): ...',
        "return super().schedule()"), why="with balance scheduling off it is vLLM's own schedule()"),
    Says(path=BALANCE, name="BalanceScheduler.schedule", says=(
        "token_budget = self.max_num_scheduled_tokens",
        "if 0 < self.scheduler_config.long_prefill_token_threshold < num_new_tokens: ..."),
        why="its copy of schedule(), which prefill nodes (kv_producer) run, honours our two numbers too"),
    Says(path=BALANCE, name="run_engine_core", says=(
        "if not _balance_scheduling_enabled(vllm_config): ...",
        "return _ORIGINAL_RUN_ENGINE_CORE(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)"),
        why="the engine's loop is vLLM's, so that its step without tokens reaches the workers"),
    Says(path=PATCHES + "patch_async_swa_kv_lifetime.py", says=(
        "Scheduler.__init__ = _patched_scheduler_init",
        "Scheduler._update_after_schedule = _patched_update_after_schedule",
        "Scheduler.update_from_output = _patched_update_from_output",
        "Scheduler._connector_finished = _patched_connector_finished"),
        why="the methods it wraps are not among those that we override without calling them"),
    Signature(path=PATCHES + "patch_async_swa_kv_lifetime.py", name="_patched_update_from_output",
              takes="self, scheduler_output, model_runner_output", why="we call it with these two"),
    Says(path=PATCHES + "patch_shm_broadcast.py", says=(
        "MessageQueue.ReadTimeoutWithWarnings.timeout_ms = timeout_ms", "MessageQueue.acquire_read = acquire_read"),
        why="batches are pickled as before, so the stamp survives"),
    Signature(path=PATCHES + "patch_kv_cache_coordinator.py",
              name="AscendHybridKVCacheCoordinator.find_longest_cache_hit",
              takes="self, block_hashes, max_cache_hit_length", why="cached_prefix.py calls it so"),
    Says(path=PATCHES + "__init__.py", says=(
        'os.getenv("DYNAMIC_EPLB", "false").lower() in ("true", "1")',
        'os.getenv("EXPERT_MAP_RECORD", "false") == "true"',
        "import vllm_ascend.patch.platform.patch_multiproc_executor"),
        why="these two variables bring another executor, so they are refused across pods"),
    Says(path=PATCHES + "patch_multiproc_executor.py", name="AscendMultiprocExecutor._init_executor",
         says=("get_distributed_init_method(get_loopback_ip(), get_open_port())",), why="the same"),
    Says(path=PATCHES + "patch_multiproc_executor.py", name="AscendMultiprocExecutor._init_executor", says=(
        "self.rpc_broadcast_mq = MessageQueue(self.world_size, self.local_world_size, "
        "max_chunk_bytes=max_chunk_bytes, connect_ip=self.parallel_config.master_addr)",),
        why="batch_ring.py gives the ring that is made here more slots"),
    Only(pattern=r"patch_profiling_chunk  # noqa", places={PLATFORM: 1},
         why="its profiling hooks are there with profiling_chunk_config only"),
)  # fmt: skip

CONFIG_KEYS: tuple[Contract, ...] = (
    Says(path=CONFIG, name="AscendConfig.__init__", says=(
        'additional_config.get("profiling_chunk_config", {})',
        "if self.profiling_chunk_config.enabled and vllm_config.parallel_config.pipeline_parallel_size <= 1: ...",
        '"VLLM_ASCEND_BALANCE_SCHEDULING"',
        "if self.profiling_chunk_config.enabled and self.enable_balance_scheduling: ...",
        'additional_config.get("recompute_scheduler_enable", False)',
        'additional_config.get("SLO_limits_for_dynamic_batch", -1)'),
        why="the keys that admission refuses beside our policies, and what EngineNative needs"),
    Says(path=CONFIG, name="AscendConfig.__init__", says=('additional_config.get("xlite_graph_config", {})',),
         why="a key that admission refuses"),
    Says(path=CONFIG, name="AscendConfig._get_config_value",
         says=("if config_key in additional_config: ...", "return env_value"),
         why="enable_balance_scheduling: false outweighs the variable"),
    Says(path=CONFIG, name="ProfilingChunkConfig.__init__", says=(
        'self.enabled: bool = config.get("enabled", False)',
        'self.smooth_factor: float = float(config.get("smooth_factor", 1.0))',
        'self.min_chunk: int = int(config.get("min_chunk", 4096))',
        'self.need_timing: bool = config.get("need_timing", self.enabled)'),
        why="the agent renders these three for EngineNative, and without them no step is synchronised"),
    Says(path=CONFIG, name="ProfilingChunkConfig._validate", says=("0 < self.smooth_factor <= 1.0",),
         why="the API allows the same range"),
    Only(pattern=r"additional_config(\.get\(|\[)\"(prefill|short_request_first_config|scheduler_config)\"", places={},
         why="our section is not read by it, and these keys of other versions do nothing in this one"),
    Only(pattern=r"for .* in (vllm_config\.|self\.)?additional_config", places={},
         why="unknown keys are not looked for, so our section is not refused"),
    Signature(path=CHUNKS, name="ProfilingChunkScheduler", extends="Scheduler", why="what EngineNative runs"),
    Says(path=CHUNKS, name="ProfilingChunkScheduler.run_profiling_chunk_init",
         says=("num_samples = 64", '"profile_prefill_latency"'),
         why="EngineNative profiles at every start, 65 passes long, inside the engine's start"),
    Says(path=CHUNKS, name="ProfilingChunkScheduler._build_rpc_kwargs", says=(
        "pc.world_size - pc.tensor_parallel_size * pc.prefill_context_parallel_size",
        "kwargs['unique_reply_rank'] = output_rank"),
        why="docs/ascend.md says that EngineNative takes the times of the last stage"),
)  # fmt: skip

GROUPS = "vllm_ascend/patch/worker/patch_distributed.py"

FOLDED: tuple[Contract, ...] = (
    Signature(path=RUNNER, name="NPUModelRunner.__init__", takes="self, vllm_config, device",
              why="each stage of a rank has a runner of its own, made like the worker's"),
    Signature(path=WORKER, name="NPUWorker.load_model", takes="self", why="called once for each stage"),
    Says(path=WORKER, name="NPUWorker.load_model", says=("self.model_runner.load_model()",),
         why="it loads into the runner that stands in model_runner"),
    Signature(path=WORKER, name="NPUWorker.initialize_from_config", takes="self, kv_cache_config",
              why="called once for each stage"),
    Says(path=WORKER, name="NPUWorker.initialize_from_config",
         says=("self.model_runner.initialize_kv_cache(kv_cache_config)",), why="as load_model"),
    Says(path=RUNNER, name="NPUModelRunner.initialize_kv_cache",
         says=("kv_caches = self.initialize_kv_cache_tensors(kv_cache_config)",),
         why="the tail's runner takes the tensors of the head's there"),
    Signature(path=RUNNER, name="NPUModelRunner.initialize_kv_cache_tensors", takes="self, kv_cache_config",
              why="the same"),
    Signature(path=RUNNER, name="NPUModelRunner.sample_tokens", takes="self, grammar_output",
              why="a tail pass on rank 0 ends with it"),
    Says(path=WORKER, name="NPUWorker.determine_available_memory", says=(
        "memory_profiling(self.init_snapshot, weights_memory=int(self.model_runner.model_memory_usage))",
        "self.model_runner.profile_run()"),
        why="both stages are counted in the runner that it asks"),
    Signature(path=GROUPS, name="GroupCoordinatorPatch", extends="GroupCoordinator",
              why="a pipeline group keeps its own class behind ours"),
    Says(path=GROUPS, name="GroupCoordinatorPatch.__init__", says=("self.group_ranks = group_ranks",),
         why="our channels are made of the same ranks"),
    Only(pattern=r"torch_distributed_backend\b.*=", places={},
         why="its groups lack this attribute, so vLLM's make_sibling_device_group fails: we make our own groups"),
)  # fmt: skip

ALL: tuple[Contract, ...] = (*FOLDED, *RELEASE, *NPU_WORKER, *NPU_RUNNER, *NPU_PLATFORM, *PATCHED, *CONFIG_KEYS)
