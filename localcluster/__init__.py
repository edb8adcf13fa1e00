"""A real single-machine Kubernetes for the demo and the tests: `python3 -m localcluster --help`."""
