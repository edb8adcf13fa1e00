"""Stock vLLM against this product's policies on real engines; see docs/benchmarks.md."""
