"""Grafana dashboards as Python, one module per board; ``python -m observability`` writes the JSON that is shipped."""
