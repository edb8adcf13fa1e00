"""Entry point ``vllm.general_plugins``: runs in every vLLM process that finds this package, often more than once."""

from __future__ import annotations


def register() -> None:
    """Repair what a tested vLLM version needs repaired.

    Must not raise and must stay cheap: it also runs in processes that use nothing else of ours. An untested version is
    left as it is; the scheduler and the worker class refuse it when they are asked for.
    """
    import vllm
    from prefill_runtime.engine import batch_ring, eager_pipeline, fold_engine, versions

    if not versions.is_tested(vllm.__version__):
        return
    if eager_pipeline.needed_here():
        eager_pipeline.install()
    fold_engine.install()
    batch_ring.install()
