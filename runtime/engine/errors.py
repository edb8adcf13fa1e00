"""What makes the plugin refuse to start; every message says what to change."""

from __future__ import annotations


class SettingsError(ValueError):
    """``additional_config.prefill`` cannot be used with this engine."""


class UnsupportedEngineError(RuntimeError):
    """This vLLM version was never tested with the plugin."""
