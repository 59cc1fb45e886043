"""The driver: the named actor that plans, trains, scales and recovers one run."""
