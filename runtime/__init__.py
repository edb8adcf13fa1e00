"""prefill_runtime: everything that runs next to, or inside, a vLLM engine process."""

__version__ = "0.1.0"
