"""Which vLLM versions the plugin knows.

Each difference between versions lives in a module of its own (``cached_prefix``, ``eager_pipeline``, ``finished``); a
version is added here once the tests in tests/engine pass with it.
"""

from __future__ import annotations

from prefill_runtime.engine.errors import UnsupportedEngineError

TESTED = ("0.23.0", "0.28.0")


def base_version(version: str) -> str:
    """Without the build: 0.28.0+cpu is 0.28.0."""
    return version.partition("+")[0]


def is_tested(version: str) -> bool:
    return base_version(version) in TESTED


def check_engine(version: str, allow_untested: bool) -> None:
    """Refuse a version that was not tested, unless the settings take the risk."""
    if is_tested(version) or allow_untested:
        return
    raise UnsupportedEngineError(
        f"vLLM {version} was not tested with prefill-operator (tested: {', '.join(TESTED)}). Use an image with a "
        f"tested version, or set additional_config.prefill.allowUntestedEngine to true to try this one at your own risk"
    )
